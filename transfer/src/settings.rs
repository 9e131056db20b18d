//! What an engine can be told.

use std::time::Duration;

use crate::error::TransferError;
use crate::tls::Tls;

/// Settings of an engine. Every bound is a bound: what does not fit is refused, not queued elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Addresses to listen on, `host:port`; port 0 picks one. None: peers can't reach this engine. Default: none.
    pub listen: Vec<String>,
    /// Listen only if there is an RDMA device: for engines that peers have no other reason to reach. Default: false.
    pub listen_for_rdma_only: bool,
    /// Addresses that peers are told of, `host:port`: each is a rail to this engine. Default: those it listens on, without
    /// those that stand for all addresses of the host.
    pub advertise: Vec<String>,
    /// Proof that peers must bring, and that this engine brings: 32 bytes, for example a SHA-256 of the cluster's
    /// secret. It crosses the network as it is. Default: none.
    pub secret: Option<[u8; 32]>,
    /// Proof that peers must bring here, if that is not `secret`. Default: none.
    pub admission: Option<[u8; 32]>,
    /// TLS on TCP connections, both ways: peers must have it too. Unix sockets, shared memory and RDMA are not encrypted.
    /// Default: none.
    pub tls: Option<Tls>,
    /// Whether peers on this host are reached by shared memory and unix sockets. Default: true.
    pub same_host: bool,
    /// How RDMA devices are used.
    pub rdma: RdmaSettings,
    /// Data connections to a peer, 1 to 64. Default 4. More serve more threads at once.
    pub lanes: usize,
    /// Receive and send buffers of data connections in bytes, if the system allows that many (`net.core.rmem_max`);
    /// else the system's own tuning stays. 0: always the system's. Default 4 MiB.
    pub socket_buffer_bytes: usize,
    /// Large requests by TCP are cut into pieces of this many bytes, 4 KiB to 64 MiB. Default 1 MiB.
    pub piece_bytes: u64,
    /// Bytes on their way on one lane before answers are awaited, from one piece up. Default 4 MiB.
    pub window_bytes: u64,
    /// Most requests in a batch. Default 65,536.
    pub batch_requests: usize,
    /// Most batches that have not ended. Default 16,384.
    pub batches: usize,
    /// Most registered regions. Default 65,536.
    pub regions: usize,
    /// Most peers, and most open segments of all together. Default 65,536.
    pub segments: usize,
    /// Most connections that peers may hold to this engine. Default 1,024.
    pub connections: usize,
    /// Most messages to one peer without an answer. Default 1,024.
    pub messages: usize,
    /// Most bytes of a message, at most 16 MiB. Default 4 MiB.
    pub message_bytes: usize,
    /// Most notifications that nobody took yet; further ones are refused to their senders. Default 4,096.
    pub notifications: usize,
    /// A batch without a deadline of its own has this one. Default 30 s.
    pub deadline: Duration,
    /// For a connection to a peer, greetings included. Default 2 s.
    pub connect_timeout: Duration,
    /// A peer that owes something and moves no byte for this long is given up. Default 5 s.
    pub silence_timeout: Duration,
}

/// How RDMA devices are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaSettings {
    /// Whether they are used at all. Default: true; without devices, nothing comes of it.
    pub enabled: bool,
    /// Names of those to use, such as `mlx5_0`. Default: none, which stands for all.
    pub devices: Vec<String>,
    /// How the end of transfers is noticed. Default: by events.
    pub completion: Completion,
    /// Large requests are cut into pieces of this many bytes, 4 KiB to 64 MiB: what one device takes of them at a time, and what
    /// is done again elsewhere when it fails. Default 64 KiB.
    pub piece_bytes: u64,
    /// Most work requests on their way in a queue pair, 1 to 8,192, within the device's limit. Default 256.
    pub depth: u32,
    /// Most bytes of one registration, from 1 MiB up, within the device's limit: larger regions are registered in parts.
    /// Default 64 GiB.
    pub registration_bytes: u64,
}

/// How the end of RDMA transfers is noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// By looking again and again: the lowest latency, and a core for each thread that waits.
    Poll,
    /// By looking for 20 µs, then sleeping until the device tells.
    Event,
}

impl Default for RdmaSettings {
    fn default() -> Self {
        Self {
            enabled: true,
            devices: Vec::new(),
            completion: Completion::Event,
            piece_bytes: 64 << 10,
            depth: 256,
            registration_bytes: 64 << 30,
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            listen_for_rdma_only: false,
            advertise: Vec::new(),
            secret: None,
            admission: None,
            tls: None,
            same_host: true,
            rdma: RdmaSettings::default(),
            lanes: 4,
            socket_buffer_bytes: 4 << 20,
            piece_bytes: 1 << 20,
            window_bytes: 4 << 20,
            batch_requests: 65_536,
            batches: 16_384,
            regions: 65_536,
            segments: 65_536,
            connections: 1_024,
            messages: 1_024,
            message_bytes: 4 << 20,
            notifications: 4_096,
            deadline: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(2),
            silence_timeout: Duration::from_secs(5),
        }
    }
}

impl Settings {
    /// What peers must bring.
    pub(crate) fn admission(&self) -> [u8; 32] {
        self.admission.or(self.secret).unwrap_or_default()
    }

    /// Refuses what can't work.
    pub(crate) fn validate(self) -> Result<Self, TransferError> {
        let within = |what, value: u64, minimum: u64, maximum: u64| {
            if (minimum..=maximum).contains(&value) {
                Ok(())
            } else {
                Err(TransferError::Length { what, length: value, minimum, maximum })
            }
        };
        within("lanes", self.lanes as u64, 1, 64)?;
        within("piece_bytes", self.piece_bytes, 4096, 64 << 20)?;
        within("window_bytes", self.window_bytes, self.piece_bytes, 1 << 30)?;
        within("batch_requests", self.batch_requests as u64, 1, 1 << 24)?;
        within("rdma.piece_bytes", self.rdma.piece_bytes, 4096, 64 << 20)?;
        within("rdma.depth", u64::from(self.rdma.depth), 1, 8192)?;
        within("rdma.registration_bytes", self.rdma.registration_bytes, 1 << 20, 1 << 50)?;
        within("message_bytes", self.message_bytes as u64, 1, crate::wire::MESSAGE_MAX as u64)?;
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_bounds_are_refused() {
        assert!(Settings::default().validate().is_ok());
        assert!(Settings { lanes: 0, ..Settings::default() }.validate().is_err());
        assert!(Settings { window_bytes: 1 << 19, ..Settings::default() }.validate().is_err());
        assert!(Settings { message_bytes: (16 << 20) + 1, ..Settings::default() }.validate().is_err());
    }
}
