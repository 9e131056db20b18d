//! Settings of a client, and how one is made.

use std::path::Path;
use std::time::Duration;

use sha2::Digest as _;
use tidepool_metadata::TenantId;
use tidepool_transfer::Tls;
use tonic::metadata::AsciiMetadataValue;

use crate::call::{Client, Parts};
use crate::channels::Channels;
use crate::endpoint::ServerAddress;
use crate::error::Error;
use crate::local::LocalReads;
use crate::native::Native;

/// Largest HTTP/2 frame: the server's pieces of 1 MiB take one each.
const FRAME_BYTES: u32 = 1 << 20;
/// HTTP/2 knows no larger windows.
const LARGEST_WINDOW_BYTES: u32 = (1 << 31) - 1;

/// How long a connection may be silent during a call before it counts as lost: it is asked for a sign of life after as
/// long, so a frozen node costs twice that. With one node there is nowhere else to go.
pub(crate) const SILENCE_OF_MANY: Duration = Duration::from_secs(1);
const SILENCE_OF_ONE: Duration = Duration::from_secs(10);

/// Which nodes' memory a client reads itself, of objects from 64 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OneSidedReads {
    /// None: all bytes come with answers.
    Never,
    /// That of nodes on other hosts, where an RDMA device can.
    #[default]
    Rdma,
    /// All, by whatever the engine has. Without a device that is slower than asking: for tests and measurements.
    Always,
}

/// Settings of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientSettings {
    /// How long a call may take, repetitions included. Default 30 s; from 1 ms.
    pub deadline: Duration,
    /// How long a connection attempt may take. Default 2 s.
    pub connect_timeout: Duration,
    /// Connections; calls take turns. Default 4, 1 to 64. One connection is served by one task on either side, so
    /// more of them use more cores.
    pub connections: usize,
    /// Bytes that a peer may send on one stream unasked. Default 16 MiB; 64 KiB to 2 GiB - 1. Below the product of
    /// bandwidth and latency streams stall; what is above it can lie in memory.
    pub stream_window_bytes: u32,
    /// The same for all streams of a connection. Default 32 MiB, at least the stream's.
    pub connection_window_bytes: u32,
    /// Largest HTTP/2 frame. Default 1 MiB - 1; 16 KiB to 16 MiB - 1.
    pub frame_bytes: u32,
    /// Whether values go by the node's transfer engine, where it has one that can be reached, rather than by gRPC.
    pub native: bool,
    /// Certificates for the nodes' transfer engines: their TCP connections are encrypted, and must be. gRPC is not: it carries
    /// what the engines don't, and everything while a node's engine can't be reached.
    pub engine_tls: Option<Tls>,
    /// Whether a node on this host is reached by a unix socket and by shared memory, not by TCP.
    pub same_host: bool,
    /// Whether objects in the DRAM of a node on this host, if that is the only endpoint, are read without a call.
    /// Such a read may give an object for up to 5 s after somebody else replaced or removed it, unless
    /// [`crate::GetOptions::fresh`] is asked for; and its [`crate::ObjectInfo::group`] is empty.
    pub local_reads: bool,
    /// Whether an object that several other nodes hold is asked of a second one too, if the first takes longer to begin its answer
    /// than 95 of 100 gets of the quicker one do: at most every twentieth read. The answer that begins first is taken.
    pub hedged_reads: bool,
    /// Whether objects in the DRAM of a node on another host are read by a device, without a thread there.
    pub one_sided_reads: OneSidedReads,
    /// Whether a node on another host may read values of puts from this client's memory by a device: the client's engine listens
    /// for that, if there is one. Not where [`ClientSettings::one_sided_reads`] is `Never`.
    pub one_sided_puts: bool,
    /// Largest message that is taken. Default 64 MiB; from 1 MiB.
    pub message_bytes: usize,
    /// Values up to this long are put by one message, longer ones by a stream. Default 1 MiB, at most 4 MiB.
    pub unary_put_bytes: usize,
    /// How often a call is repeated where that can help. Default 5; 0 switches repetition off.
    pub retries: u32,
}

impl Default for ClientSettings {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(2),
            connections: 4,
            stream_window_bytes: 16 << 20,
            connection_window_bytes: 32 << 20,
            frame_bytes: FRAME_BYTES,
            native: true,
            engine_tls: None,
            same_host: true,
            local_reads: true,
            hedged_reads: true,
            one_sided_reads: OneSidedReads::Rdma,
            one_sided_puts: true,
            message_bytes: 64 << 20,
            unary_put_bytes: 1 << 20,
            retries: 5,
        }
    }
}

impl ClientSettings {
    fn validate(self) -> Result<Self, Error> {
        let refuse = |name, value: String, bounds| Err(Error::Setting { name, value, bounds });
        if self.deadline < Duration::from_millis(1) {
            return refuse("deadline", format!("{:?}", self.deadline), "give at least 1 ms");
        }
        if !(1..=64).contains(&self.connections) {
            return refuse("connections", self.connections.to_string(), "give 1 to 64");
        }
        if !(64 << 10..=LARGEST_WINDOW_BYTES).contains(&self.stream_window_bytes) {
            return refuse("stream_window_bytes", self.stream_window_bytes.to_string(), "give 65536 to 2147483647");
        }
        if !(self.stream_window_bytes..=LARGEST_WINDOW_BYTES).contains(&self.connection_window_bytes) {
            let bounds = "give stream_window_bytes to 2147483647";
            return refuse("connection_window_bytes", self.connection_window_bytes.to_string(), bounds);
        }
        if !(16 << 10..=(16 << 20) - 1).contains(&self.frame_bytes) {
            return refuse("frame_bytes", self.frame_bytes.to_string(), "give 16384 to 16777215");
        }
        if self.message_bytes < 1 << 20 {
            return refuse("message_bytes", self.message_bytes.to_string(), "give at least 1048576");
        }
        if self.unary_put_bytes > 4 << 20 {
            return refuse("unary_put_bytes", self.unary_put_bytes.to_string(), "give at most 4194304");
        }
        Ok(self)
    }
}

/// Makes a [`Client`].
#[derive(Clone, Debug, Default)]
pub struct ClientBuilder {
    endpoints: Vec<String>,
    token: Option<String>,
    tenant: String,
    settings: ClientSettings,
}

impl ClientBuilder {
    /// Adds a server: `host:port`, `http://host:port` or `unix:/path`. Connections are spread over all that are given: any
    /// node of a cluster serves all of it. One that can't be reached, or says nothing, is passed over for a while.
    #[must_use]
    pub fn endpoint(mut self, endpoint: impl Into<String>) -> Self {
        self.endpoints.push(endpoint.into());
        self
    }

    /// Sends `token` with every call. White space around it is cut off, so that the text of a file serves.
    #[must_use]
    pub fn token(mut self, token: impl AsRef<str>) -> Self {
        self.token = Some(token.as_ref().trim().to_owned());
        self
    }

    /// Sends the token in the file `path`.
    ///
    /// # Errors
    /// The system's, if the file can't be read.
    pub fn token_file(self, path: &Path) -> std::io::Result<Self> {
        Ok(self.token(std::fs::read_to_string(path)?))
    }

    /// Whose objects calls mean. Default: the tenant of callers that name none.
    #[must_use]
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.tenant = tenant.into();
        self
    }

    /// How long a call may take, repetitions included.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.settings.deadline = deadline;
        self
    }

    /// How many connections are used.
    #[must_use]
    pub fn connections(mut self, connections: usize) -> Self {
        self.settings.connections = connections;
        self
    }

    /// Replaces all settings.
    #[must_use]
    pub fn settings(mut self, settings: ClientSettings) -> Self {
        self.settings = settings;
        self
    }

    /// A client that connects on first use. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Endpoint`], [`Error::Setting`].
    pub fn build(self) -> Result<Client, Error> {
        let settings = self.settings.validate()?;
        let addresses = match self.endpoints.as_slice() {
            [] => vec![ServerAddress::Tcp("127.0.0.1:7420".into())],
            endpoints => endpoints.iter().map(|endpoint| endpoint.parse()).collect::<Result<_, _>>()?,
        };
        // Known before the node is asked. Which number another tenant's name has, only the node knows.
        let local = match &addresses[..] {
            [ServerAddress::Unix(path)] if settings.local_reads && settings.same_host && self.tenant.is_empty() => {
                Some(LocalReads::new(path.with_file_name("segment.sock"), TenantId::DEFAULT, None))
            }
            _ => None,
        };
        // Where there is another node to go to, a silent one is not waited for: it may be frozen, its connections open.
        let patience = if addresses.len() > 1 { SILENCE_OF_MANY } else { SILENCE_OF_ONE };
        let places = (0..addresses.len()).cycle().take(settings.connections.max(addresses.len()));
        let channels = places.map(|place| Ok((place, addresses[place].channel(&settings, patience)?)));
        let channels = Channels::new(channels.collect::<Result<_, Error>>()?, addresses.len());
        let natives = addresses.into_iter().map(Native::new).collect();
        let secret = self.token.as_ref().map(|token| sha2::Sha256::digest(token).into());
        let authorization = self.token.map(|token| {
            let mut value = AsciiMetadataValue::try_from(format!("Bearer {token}")).map_err(|_| Error::Setting {
                name: "token",
                value: "(not shown)".into(),
                bounds: "give visible ASCII characters",
            })?;
            value.set_sensitive(true);
            Ok::<_, Error>(value)
        });
        let parts =
            Parts { channels, natives, authorization: authorization.transpose()?, secret, tenant: self.tenant, local };
        Ok(Client::new(parts, settings))
    }

    /// A client that has reached its server.
    ///
    /// # Errors
    /// As [`ClientBuilder::build`], and those of [`Client::server_info`].
    pub async fn connect(self) -> Result<Client, Error> {
        let client = self.build()?;
        client.server_info().await?;
        Ok(client)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_bounds_are_refused_by_name() {
        let refused = |change: fn(&mut ClientSettings)| {
            let mut settings = ClientSettings::default();
            change(&mut settings);
            match settings.validate() {
                Err(Error::Setting { name, .. }) => name,
                other => panic!("not refused: {other:?}"),
            }
        };
        assert!(ClientSettings::default().validate().is_ok());
        assert_eq!(refused(|settings| settings.deadline = Duration::ZERO), "deadline");
        assert_eq!(refused(|settings| settings.connections = 0), "connections");
        assert_eq!(refused(|settings| settings.stream_window_bytes = 1), "stream_window_bytes");
        assert_eq!(refused(|settings| settings.connection_window_bytes = 1 << 20), "connection_window_bytes");
        assert_eq!(refused(|settings| settings.frame_bytes = 1 << 24), "frame_bytes");
        assert_eq!(refused(|settings| settings.message_bytes = 1), "message_bytes");
        assert_eq!(refused(|settings| settings.unary_put_bytes = 5 << 20), "unary_put_bytes");
    }
}
