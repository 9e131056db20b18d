//! Values in memory that the node on this host can be lent ([`Lendable`]): a put says where they lie, and the node copies
//! them from there to where they stay.

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use tidepool_metadata::proto;
use tidepool_transfer::{Borrower, Lendable, Lent};

/// What is lent to one node.
pub(super) struct Lending {
    /// None: the node is elsewhere.
    socket: Option<PathBuf>,
    borrower: Borrower,
}

/// Values that the node can copy. Their memory stays what it is until this is dropped, after the node has answered.
pub(super) struct Placed {
    memory: Lendable,
    lent: Arc<Lent>,
    /// Where they lie, for the node.
    pub(super) place: proto::LentMemory,
}

impl Lending {
    pub(super) fn new(socket: Option<PathBuf>) -> Self {
        Self { socket, borrower: Borrower::new() }
    }

    /// Where the values lie. `None`: not in one memory that the node has, or could be lent now.
    pub(super) fn place(&self, values: &[Bytes]) -> Option<Placed> {
        let socket = self.socket.as_ref()?;
        let memory = Lendable::of(values.iter().find(|value| !value.is_empty())?)?;
        // A value of no bytes lies anywhere.
        let offset = |value: &Bytes| if value.is_empty() { Some(0) } else { memory.offset_of(value) };
        let offsets = values.iter().map(offset).collect::<Option<_>>()?;
        let lent = memory.lend(self.borrower, socket)?;
        let id = lent.id().to_le_bytes().to_vec().into();
        Some(Placed { place: proto::LentMemory { id, offsets }, memory, lent })
    }
}

impl Placed {
    /// The node has it no more: it restarted. It is lent anew with the next values.
    pub(super) fn forget(&self) {
        self.memory.forget(&self.lent);
    }
}

impl Drop for Lending {
    fn drop(&mut self) {
        self.borrower.end();
    }
}
