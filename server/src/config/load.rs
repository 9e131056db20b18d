//! Reads settings from file, environment and flags, and checks them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tidepool_metadata::ErrorKind;
use toml::{Table, Value};

use super::{Config, Labels, Size};
use crate::error::Error;

/// Why settings are refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file can't be read.
    #[error("read config file {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Not TOML, a field that does not exist, or a value of the wrong type.
    #[error("{origin}: {what}")]
    Malformed {
        /// File, variable or flag.
        origin: String,
        /// What is wrong.
        what: String,
    },
    /// A value out of bounds.
    #[error("{field} = {value} is out of bounds: {bounds}")]
    OutOfBounds {
        /// The field, with its section.
        field: &'static str,
        /// The value.
        value: String,
        /// What is allowed.
        bounds: String,
    },
    /// Settings that do not go together.
    #[error("{0}")]
    Contradiction(String),
}

impl From<ConfigError> for Error {
    fn from(error: ConfigError) -> Self {
        let refused = Self::new(ErrorKind::Invalid, "BAD_CONFIG", error.to_string());
        match error {
            ConfigError::OutOfBounds { field, .. } => refused.field(field),
            _ => refused,
        }
    }
}

const PREFIX: &str = "TIDEPOOL_";
/// Variables with the prefix that are not settings: they belong to the command line and to the build.
const NOT_SETTINGS: [&str; 7] = ["ENDPOINT", "ADMIN", "TOKEN_FILE", "CONFIG", "CACHE", "TENANT", "LOG"];

/// Reads the file (if one is named), the variables of `environment` that start with `TIDEPOOL_`, and `overrides`
/// (`section.field=value`), in rising precedence.
///
/// # Errors
/// See [`ConfigError`].
pub fn load(
    file: Option<&Path>,
    environment: impl IntoIterator<Item = (String, String)>,
    overrides: &[String],
) -> Result<Config, ConfigError> {
    let mut table = Table::new();
    let mut origin = "config".to_owned();
    if let Some(path) = file {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.into(), source })?;
        origin = path.display().to_string();
        table = text.parse().map_err(|error: toml::de::Error| malformed(&origin, &error))?;
    }
    for (name, value) in environment {
        let Some(rest) = name.strip_prefix(PREFIX).filter(|rest| !NOT_SETTINGS.contains(rest)) else { continue };
        set(&mut table, &rest.to_ascii_lowercase().replace("__", "."), &value, &name)?;
    }
    for setting in overrides {
        let (path, value) = setting.split_once('=').ok_or_else(|| ConfigError::Malformed {
            origin: "--set".into(),
            what: format!("{setting:?} is not section.field=value"),
        })?;
        set(&mut table, path, value, "--set")?;
    }
    let config: Config = Value::Table(table).try_into().map_err(|error: toml::de::Error| malformed(&origin, &error))?;
    config.validate()
}

fn malformed(origin: &str, error: &toml::de::Error) -> ConfigError {
    ConfigError::Malformed { origin: origin.to_owned(), what: error.to_string().trim_end().to_owned() }
}

/// Sets `path` to `value`, read as TOML if it is, else as text.
fn set(table: &mut Table, path: &str, value: &str, origin: &str) -> Result<(), ConfigError> {
    let parsed = format!("value = {value}").parse::<Table>().ok().and_then(|mut table| table.remove("value"));
    let value = parsed.unwrap_or_else(|| Value::String(value.to_owned()));
    let (sections, field) = path.rsplit_once('.').map_or((None, path), |(sections, field)| (Some(sections), field));
    let mut place = table;
    for section in sections.into_iter().flat_map(|sections| sections.split('.')) {
        let next = place.entry(section).or_insert_with(|| Value::Table(Table::new()));
        place = next.as_table_mut().ok_or_else(|| ConfigError::Malformed {
            origin: origin.to_owned(),
            what: format!("{section} in {path} is a field, not a section"),
        })?;
    }
    place.insert(field.to_owned(), value);
    Ok(())
}

fn check(field: &'static str, holds: bool, value: impl ToString, bounds: &str) -> Result<(), ConfigError> {
    let refused = || ConfigError::OutOfBounds { field, value: value.to_string(), bounds: bounds.to_owned() };
    if holds { Ok(()) } else { Err(refused()) }
}

fn size(field: &'static str, value: Size, least: Size, most: Size) -> Result<(), ConfigError> {
    check(field, (least..=most).contains(&value), value, &format!("{least} to {most}"))
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

impl Config {
    /// Checks every value.
    ///
    /// # Errors
    /// [`ConfigError::OutOfBounds`], [`ConfigError::Contradiction`].
    pub fn validate(self) -> Result<Self, ConfigError> {
        let seconds = self.shutdown_timeout.0.0.as_secs_f64();
        check("shutdown_timeout", (1.0..=600.0).contains(&seconds), self.shutdown_timeout.0, "1s to 10m")?;
        let replicas = &self.replicas;
        check("replicas.count", (1..=15).contains(&replicas.count), replicas.count, "1 to 15")?;
        let day = Duration::from_secs(24 * 3600);
        check("replicas.repair_grace", replicas.repair_grace.0 <= day, replicas.repair_grace, "0s to 24h")?;
        size("replicas.repair_bytes_per_second", replicas.repair_bytes_per_second, Size(0), Size(64 * GIB))?;
        check("replicas.hot_copies", replicas.hot_copies <= 14, replicas.hot_copies, "0 to 14")?;
        let reads = replicas.hot_reads_per_second;
        check("replicas.hot_reads_per_second", (1..=1_000_000).contains(&reads), reads, "1 to 1000000")?;
        check("replicas.hot_share", (0.0..=0.5).contains(&replicas.hot_share), replicas.hot_share, "0 to 0.5")?;
        let Labels { zone, rack, host } = &self.labels;
        let host = host.as_ref();
        for (field, label) in [("labels.zone", Some(zone)), ("labels.rack", Some(rack)), ("labels.host", host)] {
            let label = label.map_or("", String::as_str);
            check(field, label.len() <= 64 && !label.contains(char::is_control), label, "up to 64 printable bytes")?;
        }
        size("store.slice_bytes", self.store.slice_bytes, Size(64 * KIB), Size(16 * MIB))?;
        let chunked = self.store.slice_bytes.0.is_multiple_of(64 * KIB);
        check("store.slice_bytes", chunked, self.store.slice_bytes, "a multiple of 64KiB")?;
        size("store.scrub_bytes_per_second", self.store.scrub_bytes_per_second, Size(0), Size(16 * GIB))?;
        if let Some(capacity) = self.dram.capacity {
            size("dram.capacity", capacity, Size(16 * MIB), Size(64 * TIB))?;
        }
        let (low, high) = (self.dram.watermark_low, self.dram.watermark_high);
        check("dram.watermark_low", (0.1..high).contains(&low), low, &format!("0.1 to below watermark_high = {high}"))?;
        check("dram.watermark_high", high <= 0.99, high, "at most 0.99")?;
        size("nvme.region_bytes", self.nvme.region_bytes, Size(MIB), Size(256 * MIB))?;
        let paged = self.nvme.region_bytes.0.is_multiple_of(4 * KIB);
        check("nvme.region_bytes", paged, self.nvme.region_bytes, "a multiple of 4KiB")?;
        let fits = self.store.slice_bytes.0 + 128 * KIB <= self.nvme.region_bytes.0 || !self.nvme.enabled;
        check(
            "store.slice_bytes",
            fits,
            self.store.slice_bytes,
            "nvme.region_bytes less 128KiB, so that a record fits",
        )?;
        if let Some(capacity) = self.nvme.capacity {
            size("nvme.capacity", capacity, Size(8 * self.nvme.region_bytes.0 + MIB), Size(1024 * TIB))?;
        }
        check("nvme.queue_depth", (1..=1024).contains(&self.nvme.queue_depth), self.nvme.queue_depth, "1 to 1024")?;
        let (low, high) = (self.nvme.watermark_low, self.nvme.watermark_high);
        let bounds = format!("0.5 to below watermark_high = {high}");
        check("nvme.watermark_low", (0.5..high).contains(&low), low, &bounds)?;
        check("nvme.watermark_high", high <= 0.999, high, "at most 0.999")?;
        size("device.capacity", self.device.capacity, Size(MIB), Size(64 * TIB))?;
        size("limits.inflight_bytes", self.limits.inflight_bytes, Size(16 * MIB), Size(64 * GIB))?;
        let (connections, streams) = (self.limits.connections, self.limits.streams);
        check("limits.connections", (1..=1_000_000).contains(&connections), connections, "1 to 1000000")?;
        check("limits.streams", (1..=100_000).contains(&streams), streams, "1 to 100000")?;
        size("limits.lent_bytes", self.limits.lent_bytes, Size(64 * MIB), Size(64 * TIB))?;
        size("limits.lent_client_bytes", self.limits.lent_client_bytes, Size(64 * MIB), Size(64 * TIB))?;
        size("limits.max_object_bytes", self.limits.max_object_bytes, Size(1), Size(16 * GIB))?;
        self.check_exposure()?;
        let super::Engine { tls_certificate, tls_key, tls_authorities, tls_name, .. } = &self.engine;
        let given = [tls_certificate, tls_key, tls_authorities].iter().filter(|file| file.is_some()).count();
        if !matches!(given, 0 | 3) || (given == 0 && tls_name.is_some()) {
            return Err(ConfigError::Contradiction(
                "engine.tls_certificate, engine.tls_key and engine.tls_authorities belong together: set all three, or none, \
                 and engine.tls_name only with them"
                    .into(),
            ));
        }
        let voters = self.cluster.voters;
        check("cluster.voters", matches!(voters, 1 | 3 | 5 | 7), voters, "1, 3, 5 or 7")?;
        Ok(self)
    }

    /// Addresses that others can reach need a secret, or a written wish to do without.
    fn check_exposure(&self) -> Result<(), ConfigError> {
        let exposed = |listen: &SocketAddr| !listen.ip().is_loopback();
        let engine = self.engine_address().map(|listen| ("engine.listen", listen));
        let listeners = [("grpc.listen", self.grpc.listen), ("admin.listen", self.admin.listen)];
        for (field, listen) in listeners.into_iter().chain(engine).filter(|(_, listen)| exposed(listen)) {
            if self.cluster.secret_file.is_none() && !self.cluster.insecure {
                return Err(ConfigError::Contradiction(format!(
                    "{field} = {listen} can be reached from other machines: set cluster.secret_file (a file with 16 \
                     random bytes or more, mode 0600), or write cluster.insecure = true to let everybody in"
                )));
            }
        }
        Ok(())
    }
}
