//! Values in memory that the node can be lent ([`Lendable`]): a put says where they lie, and the node copies or reads them from
//! there to where they stay.

use std::sync::Arc;

use bytes::Bytes;
use tidepool_metadata::proto;
use tidepool_transfer::{Borrower, Lendable, Loan};

use super::means::{self, Means};

/// What is lent to one node.
pub(super) struct Lending {
    /// None: it is lent nothing.
    means: Option<Means>,
    borrower: Borrower,
}

/// Values that the node can copy. Their memory stays what it is until this is dropped, after the node has answered.
pub(super) struct Placed {
    memory: Lendable,
    loan: Arc<Loan>,
    offsets: Vec<u64>,
    withdrawals: u64,
}

impl Lending {
    pub(super) fn new(means: Option<Means>) -> Self {
        Self { means, borrower: Borrower::new() }
    }

    /// Where the values lie. `None`: not in one memory that the node has, or could be lent now.
    pub(super) fn place(&self, values: &[Bytes]) -> Option<Placed> {
        let means = self.means.as_ref()?;
        let memory = Lendable::of(values.iter().find(|value| !value.is_empty())?)?;
        // A value of no bytes lies anywhere.
        let offset = |value: &Bytes| if value.is_empty() { Some(0) } else { memory.offset_of(value) };
        let offsets = values.iter().map(offset).collect::<Option<_>>()?;
        let loan = memory.lend(self.borrower, |memory| means.lend(memory))?;
        let withdrawals = memory.withdrawals();
        Some(Placed { memory, loan, offsets, withdrawals })
    }
}

impl Placed {
    /// Says where they lie, for the node.
    pub(super) fn say(&self, message: &mut proto::PutItemsRequest, values: &[Bytes]) {
        means::say(message, &self.loan, self.offsets.clone(), values);
        if let Some(memory) = &mut message.memory {
            memory.withdrawals = Some(self.withdrawals);
        }
    }

    /// The node has not answered, and may be copying still: it keeps nothing of that.
    pub(super) fn withdraw(&self) {
        self.memory.withdraw();
    }

    /// The node has it no more: it restarted. It is lent anew with the next values.
    pub(super) fn forget(&self) {
        self.memory.forget(&self.loan);
    }
}

impl Drop for Lending {
    fn drop(&mut self) {
        self.borrower.end();
    }
}
