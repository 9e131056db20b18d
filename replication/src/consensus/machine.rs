//! What a log of commands drives.

use std::num::NonZero;

use tidepool_metadata::catalog::{EntryContext, Rows};

/// A row of the image that changed: its key, and its bytes or `None` if it is gone.
pub type Change = (Vec<u8>, Option<Vec<u8>>);

/// A deterministic state machine with an image made of rows.
///
/// Two machines that applied the same commands at the same contexts are equal, on every host and in every build: no
/// clock, no randomness, no order of a hash table may show.
pub trait StateMachine: Send + Sync + 'static {
    /// What is applied.
    type Command: Send;
    /// What comes out.
    type Outcome: Send + 'static;
    /// Why bytes are no command or no image.
    type Error: std::error::Error + Send + Sync + 'static;

    /// The state before the first command.
    fn empty() -> Self;

    /// The state whose rows these are, read by so many threads: equal to the one that all changes were taken from.
    ///
    /// # Errors
    /// The rows are no state.
    fn load(rows: &impl Rows, threads: NonZero<usize>) -> Result<Self, Self::Error>
    where
        Self: Sized;

    /// Reads a command; runs beside readers of the state.
    ///
    /// # Errors
    /// The bytes are no command. That of a committed one ends the group.
    fn decode(bytes: &[u8]) -> Result<Self::Command, Self::Error>;

    /// Applies a command; holds up all readers. Indices never fall; commands of one entry have the same. The time never
    /// goes back.
    fn apply(&mut self, at: EntryContext, command: &Self::Command) -> Self::Outcome;

    /// The rows that changed since the last call, each once. Holds up all readers.
    fn take_changes(&mut self) -> Vec<Change>;
}
