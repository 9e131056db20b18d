//! How a node comes to memory of this client, and where in it values lie.

use std::io;
use std::path::PathBuf;

use bytes::Bytes;
use tidepool_metadata::proto;
use tidepool_transfer::{Engine, Loan, Memory};

/// How a node comes to memory.
#[derive(Clone)]
pub(super) enum Means {
    /// It is on this host, takes memory at this socket, and maps it.
    Socket(PathBuf),
    /// Its engine reads it from this one, by a device.
    Device(Engine),
}

impl Means {
    pub(super) fn lend(&self, memory: &Memory) -> io::Result<Loan> {
        match self {
            Self::Socket(socket) => Loan::by_socket(socket, memory),
            Self::Device(engine) => Loan::by_engine(engine, memory),
        }
    }
}

/// CRC-32 of each.
pub(super) fn checksums(values: &[Bytes]) -> Vec<u32> {
    values.iter().map(|value| crc32fast::hash(value)).collect()
}

/// Says where in lent memory the values of a message lie, and their checksums to a node that reads them from afar. One that copies
/// them takes its own, of what it copied: there is no way between on which bytes could change, and the next put's bytes are
/// kept away from it by other means (`withdrawals`; a staging slot without an answer is not used again).
pub(super) fn say(message: &mut proto::PutItemsRequest, loan: &Loan, offsets: Vec<u64>, values: &[Bytes]) {
    match loan {
        Loan::Mapped(lent) => {
            let id = lent.id().to_le_bytes().to_vec().into();
            message.memory = Some(proto::LentMemory { id, offsets, withdrawals: None });
        }
        Loan::Registered(registered) => {
            message.checksums = checksums(values);
            let ticket = registered.ticket();
            message.readable = Some(proto::ReadableMemory {
                port: registered.port().into(),
                region: ticket.region.0,
                key: ticket.key.0.to_le_bytes().to_vec().into(),
                length: ticket.length,
                offsets,
                admission: Bytes::copy_from_slice(&registered.admission()),
            });
        }
    }
}
