//! Addresses of servers, and channels to them.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tonic::transport::{Channel, Endpoint};

use crate::builder::ClientSettings;
use crate::error::Error;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerAddress {
    /// `host:port`.
    Tcp(String),
    /// A unix socket.
    Unix(PathBuf),
}

impl FromStr for ServerAddress {
    type Err = Error;

    /// Takes `host:port`, `http://host:port` and `unix:/path`.
    fn from_str(text: &str) -> Result<Self, Error> {
        let refuse = |why| Err(Error::Endpoint { endpoint: text.to_owned(), why });
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.starts_with('/') {
                Ok(Self::Unix(path.into()))
            } else {
                refuse("the path is not absolute")
            };
        }
        if text.starts_with("https://") {
            return refuse("TLS is not supported yet");
        }
        let authority = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
        match authority.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() && !authority.contains('/') => {
                Ok(Self::Tcp(authority.to_owned()))
            }
            _ => refuse("there is no port in it"),
        }
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(authority) => f.write_str(authority),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl ServerAddress {
    /// A channel that connects on first use, and again whenever the connection is lost; after `patience` without a sign of
    /// life during a call it counts as lost. Needs a tokio runtime.
    pub(crate) fn channel(&self, settings: &ClientSettings, patience: Duration) -> Result<Channel, Error> {
        let uri = match self {
            Self::Tcp(authority) => format!("http://{authority}"),
            Self::Unix(path) => format!("unix:{}", path.display()),
        };
        let endpoint = Endpoint::from_shared(uri)
            .map_err(|_| Error::Endpoint { endpoint: self.to_string(), why: "it is no address" })?;
        Ok(endpoint
            .connect_timeout(settings.connect_timeout)
            .initial_stream_window_size(settings.stream_window_bytes)
            .initial_connection_window_size(settings.connection_window_bytes)
            .max_frame_size(settings.frame_bytes)
            .http2_keep_alive_interval(patience)
            .keep_alive_timeout(patience)
            .tcp_nodelay(true)
            .connect_lazy())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_understood() {
        let parse = |text: &str| text.parse::<ServerAddress>().ok();
        assert_eq!(parse("127.0.0.1:7420"), Some(ServerAddress::Tcp("127.0.0.1:7420".into())));
        assert_eq!(parse("http://[::1]:7420/"), Some(ServerAddress::Tcp("[::1]:7420".into())));
        assert_eq!(parse("unix:/run/tidepool.sock"), Some(ServerAddress::Unix("/run/tidepool.sock".into())));
        assert_eq!(parse("unix:///run/tidepool.sock"), Some(ServerAddress::Unix("/run/tidepool.sock".into())));
    }

    #[test]
    fn what_is_no_address_is_refused_with_words() {
        for text in ["", "localhost", "host:port", "https://host:1", "unix:relative", "host:70000", ":7420", "h/x:1"] {
            let error = text.parse::<ServerAddress>().expect_err(text);
            assert!(error.to_string().contains("give host:port"), "{error}");
        }
    }
}
