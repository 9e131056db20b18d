//! What `setup` is told, and the client that comes of it.

use std::str::FromStr;
use std::time::Duration;

use tidepool_client::{Client, ClientBuilder, ClientSettings, ErrorKind};
use tokio::time::Instant;

use crate::code::{self, INTERNAL_ERROR, INVALID_PARAMS, NOT_SUPPORTED};

const DEFAULT_MASTER: &str = "127.0.0.1:50051";
/// How often a node that can't be reached is tried, and the time from one attempt's begin to the next.
const ATTEMPTS: u32 = 20;
const ATTEMPT: Duration = Duration::from_secs(1);
/// What a node that answers slowly is given, at least. Other attempts may be left out for it.
const PATIENCE: Duration = Duration::from_secs(5);
const DEADLINE_MS: u64 = 30_000;

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}

fn number<T: FromStr>(name: &str, default: T) -> T {
    variable(name).and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Refuses transports that bytes can't take here.
pub(crate) fn check_protocol(protocol: &str) -> Result<(), i32> {
    match protocol.trim().to_ascii_lowercase().as_str() {
        "" | "tcp" | "rpc_only" | "local" | "p2p" => Ok(()),
        "rdma" if may_fall_back() => {
            tracing::warn!("protocol rdma is not available: tcp and shared memory are used, as MC_FORCE_TCP allows");
            Ok(())
        }
        "rdma" => {
            tracing::error!("protocol rdma is not available; set MC_FORCE_TCP=1 to allow tcp and shared memory");
            Err(INVALID_PARAMS)
        }
        other => {
            tracing::error!(protocol = other, "this protocol is not known; give tcp or rdma");
            Err(INVALID_PARAMS)
        }
    }
}

fn may_fall_back() -> bool {
    let allowed = variable("MC_FORCE_TCP").unwrap_or_default().to_ascii_lowercase();
    matches!(allowed.as_str(), "1" | "true" | "yes" | "on")
}

/// The address of the node that is named as master.
pub(crate) fn endpoint(master: &str) -> Result<String, i32> {
    let master = master.trim();
    match master.split_once("://") {
        Some((scheme, _)) if !matches!(scheme, "http" | "unix") => {
            tracing::error!(master, "name the address of a node: {scheme} is not used here");
            Err(NOT_SUPPORTED)
        }
        _ if master.is_empty() => Ok(DEFAULT_MASTER.to_owned()),
        _ => Ok(master.to_owned()),
    }
}

/// Connects to the node, as the environment says.
pub(crate) async fn connect(endpoint: String) -> Result<Client, i32> {
    let deadline = Duration::from_millis(number("MC_RPC_TIMEOUT_MS", DEADLINE_MS).max(1));
    let same_host = variable("TIDEPOOL_SAME_HOST").is_none_or(|value| value != "0");
    let settings = ClientSettings { deadline, same_host, ..ClientSettings::default() };
    let mut builder = Client::builder().endpoint(&endpoint).settings(settings);
    if let Some(path) = variable("TIDEPOOL_TOKEN_FILE") {
        builder = builder.token_file(path.as_ref()).map_err(|error| {
            tracing::error!(path, %error, "read the token");
            INVALID_PARAMS
        })?;
    }
    reach(&endpoint, builder, number("MC_STORE_CLIENT_SETUP_RETRIES", ATTEMPTS)).await
}

/// Asks again while nothing answers, a second for each attempt.
async fn reach(endpoint: &str, builder: ClientBuilder, attempts: u32) -> Result<Client, i32> {
    let until = Instant::now() + (ATTEMPT * attempts).max(PATIENCE);
    let mut next = Instant::now();
    for attempt in 1..=attempts.max(1) {
        tokio::time::sleep_until(next).await;
        let began = Instant::now();
        if began >= until {
            break;
        }
        next = until.min(began + ATTEMPT);
        let connected = tokio::time::timeout_at(until.min(began + PATIENCE), builder.clone().connect()).await;
        match connected {
            Ok(Ok(client)) => return Ok(client),
            Ok(Err(error)) if !matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Deadline) => {
                tracing::error!(endpoint, %error, "the node refuses");
                return Err(code::of(&error));
            }
            Ok(Err(error)) => tracing::warn!(endpoint, attempt, attempts, %error, "the node does not answer"),
            Err(_) => tracing::warn!(endpoint, attempt, attempts, "the node does not answer"),
        }
    }
    Err(INTERNAL_ERROR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_master_is_a_node_and_no_directory_of_them() {
        assert_eq!(endpoint(" host:7420 ").as_deref(), Ok("host:7420"));
        assert_eq!(endpoint("").as_deref(), Ok(DEFAULT_MASTER));
        assert_eq!(endpoint("unix:///run/tidepool.sock").as_deref(), Ok("unix:///run/tidepool.sock"));
        assert_eq!(endpoint("etcd://host:2379"), Err(NOT_SUPPORTED));
        assert_eq!(check_protocol("TCP"), Ok(()));
        assert_eq!(check_protocol("ascend"), Err(INVALID_PARAMS));
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_says_nothing_is_given_up_in_time() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let endpoint = silent.local_addr().expect("is bound").to_string();
        for (attempts, seconds) in [(20, 20), (2, 5)] {
            let began = Instant::now();
            let builder = Client::builder().endpoint(&endpoint);
            assert!(matches!(reach(&endpoint, builder, attempts).await, Err(INTERNAL_ERROR)));
            // Of a clock that goes only while everybody waits; it counts in milliseconds.
            assert!(
                began.elapsed() <= Duration::from_secs(seconds) + Duration::from_millis(5),
                "{:?}",
                began.elapsed()
            );
        }
    }
}
