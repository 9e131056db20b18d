//! `tidepool serve`: runs a node until a signal ends it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::failure::{FAILED, Failure};
use super::output::Output;
use crate::config::{Config, load};
use crate::{Error, Server, telemetry};

/// Where settings come from, in rising precedence: file, environment, flags.
#[derive(Debug, Args)]
pub(super) struct SettingsArguments {
    /// TOML file with settings
    #[arg(long, env = "TIDEPOOL_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// One setting, as `section.field=value`; may be repeated
    #[arg(long = "set", value_name = "SETTING")]
    settings: Vec<String>,
    /// Data folder
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    /// Bytes of DRAM to lend, such as 4GiB
    #[arg(long, value_name = "SIZE")]
    dram: Option<String>,
    /// Bytes of disk to lend, such as 100GiB; 0: no NVMe tier
    #[arg(long, value_name = "SIZE")]
    nvme: Option<String>,
    /// Nodes of a group to join, as host:port[,host:port..]; only an empty data folder joins
    #[arg(long, value_name = "ADDRESSES", value_delimiter = ',')]
    join: Vec<String>,
}

/// Arguments of `serve`.
#[derive(Debug, Args)]
pub(super) struct ServeArguments {
    #[command(flatten)]
    settings: SettingsArguments,
}

impl SettingsArguments {
    /// Reads and checks them.
    pub(super) fn load(&self) -> Result<Config, Failure> {
        let mut overrides = self.settings.clone();
        if let Some(data) = &self.data {
            let data = data.to_str().ok_or_else(|| Failure::usage("--data is not UTF-8: name it in a config file"))?;
            overrides.push(format!("data={}", quoted(data)));
        }
        if let Some(dram) = &self.dram {
            overrides.push(format!("dram.capacity={}", quoted(dram)));
        }
        if !self.join.is_empty() {
            let addresses: Vec<String> = self.join.iter().map(|address| quoted(address)).collect();
            overrides.push(format!("cluster.join=[{}]", addresses.join(",")));
        }
        match self.nvme.as_deref() {
            Some("0") => overrides.push("nvme.enabled=false".into()),
            Some(nvme) => overrides.push(format!("nvme.capacity={}", quoted(nvme))),
            None => {}
        }
        let environment =
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        Ok(load(self.config.as_deref(), environment, &overrides)?)
    }
}

/// As a TOML string, so that it is never read as anything else.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Prints the addresses once they are good, then waits for SIGTERM or SIGINT.
pub(super) async fn run(arguments: &ServeArguments, output: &Output) -> Result<ExitCode, Failure> {
    let config = arguments.settings.load()?;
    let _flushed_at_end = telemetry::install(&config.telemetry)?;
    let mut signals = Signals::install()?;
    let server = tokio::select! {
        started = Server::start(config) => started?,
        // Nothing is served yet; what recovery adopted so far is adopted again next time.
        () = signals.next() => return Ok(ExitCode::SUCCESS),
    };
    let addresses = server.addresses();
    if output.is_json() {
        // One line, so that whoever started the process can read it while the process runs.
        let line = serde_json::to_string(addresses).map_err(|error| Failure::local("OUTPUT", error.to_string()))?;
        output.bytes(format!("{line}\n").as_bytes())?;
    } else {
        let unix = addresses.unix.as_ref().map(|path| format!("\nsocket  unix:{}", path.display())).unwrap_or_default();
        let (grpc, data) = (addresses.grpc, addresses.data.display());
        let engine = addresses.engine.map(|engine| format!("\nengine  {engine}")).unwrap_or_default();
        let admin = addresses.admin.map(|admin| format!("\nadmin   http://{admin}")).unwrap_or_default();
        output.bytes(format!("grpc    {grpc}{unix}{engine}{admin}\ndata    {data}\n").as_bytes())?;
    }
    let serve = async {
        server.ready().await?;
        notify(&[sd_notify::NotifyState::Ready]);
        std::future::pending::<Result<(), Error>>().await
    };
    let ended = tokio::select! {
        ended = serve => ended,
        // What it holds counts for nothing any more, and nobody would answer it.
        unwelcome = server.unwelcome() => return Err(unwelcome.into()),
        () = signals.next() => return stop(server, &mut signals).await,
    };
    server.shutdown().await;
    ended.map(|()| ExitCode::SUCCESS).map_err(Into::into)
}

async fn stop(server: Server, signals: &mut Signals) -> Result<ExitCode, Failure> {
    tracing::info!("stopping; a second signal stops at once");
    notify(&[sd_notify::NotifyState::Stopping]);
    tokio::select! {
        () = server.shutdown() => Ok(ExitCode::SUCCESS),
        () = signals.next() => {
            tracing::warn!("stopped at once: what was not persisted is recovered at the next start");
            Ok(ExitCode::from(FAILED))
        }
    }
}

/// Tells systemd, if it asked to be told.
fn notify(state: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "systemd can't be told");
    }
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn install() -> Result<Self, Failure> {
        let listen =
            |kind| signal(kind).map_err(|error| Failure::local("SIGNALS", format!("listen to signals: {error}")));
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
