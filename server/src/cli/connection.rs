//! Which server a command talks to, and as whom.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tidepool_client::{Client, ClientSettings, Tls};

use super::admin_http::AdminClient;
use super::failure::Failure;

/// Arguments of every command that talks to a server.
#[derive(Debug, Args)]
pub(super) struct ConnectionArguments {
    /// gRPC of the node: host:port or unix:/path
    #[arg(long, global = true, env = "TIDEPOOL_ENDPOINT", default_value = "127.0.0.1:7420", value_name = "ADDRESS")]
    endpoint: String,
    /// Admin HTTP of the node: host:port
    #[arg(long, global = true, env = "TIDEPOOL_ADMIN", default_value = "127.0.0.1:7422", value_name = "ADDRESS")]
    admin: String,
    /// File with the token (the cluster's secret)
    #[arg(long, global = true, env = "TIDEPOOL_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// File in PEM with this client's certificate, for nodes with `engine.tls_certificate`
    #[arg(long, global = true, env = "TIDEPOOL_TLS_CERTIFICATE", value_name = "FILE", hide_short_help = true)]
    tls_certificate: Option<PathBuf>,
    /// File in PEM with its private key, mode 0600
    #[arg(long, global = true, env = "TIDEPOOL_TLS_KEY", value_name = "FILE", hide_short_help = true)]
    tls_key: Option<PathBuf>,
    /// File in PEM with the authorities from which nodes' certificates must come
    #[arg(long, global = true, env = "TIDEPOOL_TLS_AUTHORITIES", value_name = "FILE", hide_short_help = true)]
    tls_authorities: Option<PathBuf>,
    /// Name that nodes' certificates must bear; default: the host that is connected to
    #[arg(long, global = true, env = "TIDEPOOL_TLS_NAME", value_name = "NAME", hide_short_help = true)]
    tls_name: Option<String>,
    /// Whose objects are meant
    #[arg(long, global = true, env = "TIDEPOOL_TENANT", default_value = "", hide_default_value = true)]
    tenant: String,
    /// Seconds that a call may take
    #[arg(long, global = true, default_value_t = 30.0, value_name = "SECONDS")]
    timeout: f64,
}

impl ConnectionArguments {
    fn token(&self) -> Result<Option<String>, Failure> {
        let read = |path: &PathBuf| {
            std::fs::read_to_string(path)
                .map(|token| token.trim().to_owned())
                .map_err(|error| Failure::usage(format!("read token file {}: {error}", path.display())))
        };
        self.token_file.as_ref().map(read).transpose()
    }

    fn deadline(&self) -> Result<Duration, Failure> {
        Duration::try_from_secs_f64(self.timeout)
            .ok()
            .filter(|deadline| !deadline.is_zero())
            .ok_or_else(|| Failure::usage(format!("--timeout {}: give more than 0 seconds", self.timeout)))
    }

    fn tls(&self) -> Result<Option<Tls>, Failure> {
        match (&self.tls_certificate, &self.tls_key, &self.tls_authorities) {
            (None, None, None) => Ok(None),
            (Some(certificate), Some(key), Some(authorities)) => {
                let tls = Tls::from_files(certificate, key, authorities, self.tls_name.clone());
                tls.map(Some).map_err(|error| Failure::usage(error.to_string()))
            }
            _ => Err(Failure::usage("--tls-certificate, --tls-key and --tls-authorities belong together")),
        }
    }

    /// A client with `connections` connections.
    pub(super) fn client(&self, connections: usize) -> Result<Client, Failure> {
        self.client_with(|settings| settings.connections = connections)
    }

    /// A client with settings of its own, but for the deadline.
    pub(super) fn client_with(&self, change: impl FnOnce(&mut ClientSettings)) -> Result<Client, Failure> {
        let (deadline, engine_tls) = (self.deadline()?, self.tls()?);
        let mut settings = ClientSettings { deadline, engine_tls, ..ClientSettings::default() };
        change(&mut settings);
        let builder = Client::builder().endpoint(&self.endpoint).tenant(&self.tenant).settings(settings);
        let builder = match self.token()? {
            Some(token) => builder.token(token),
            None => builder,
        };
        Ok(builder.build()?)
    }

    /// A client of admin HTTP.
    pub(super) fn admin(&self) -> Result<AdminClient, Failure> {
        Ok(AdminClient::new(self.admin.clone(), self.token()?, self.deadline()?))
    }

    pub(super) fn tenant(&self) -> &str {
        &self.tenant
    }
}
