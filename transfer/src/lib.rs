//! How bytes move between registered memory: regions, batches, shared memory and TCP.
//!
//! An [`Engine`] registers memory, opens regions of peers, and carries batches of reads and writes between the two. It
//! knows nothing of objects, and decides nothing about where bytes should be. Messages between engines are there for
//! the control calls of who uses them.
//!
//! - Every request of a batch ends exactly once, with success or a [`Failure`]; so does every call, by its deadline.
//! - Handles are generational: one that is stale is an error. Memory lives until the last transfer on it has ended.
//! - Every queue, table and message has a bound; what exceeds it is refused.
//! - Threads block; there is no runtime. A caller that waits drives its connection itself, which is what gives the
//!   latency of a bare socket. A [`Batch`] is also a future.
//!
//! Pure: `wire` (frames), `batch` (what has ended), `rail` (health of a way), `schedule` (which way),
//! `slots`, `region` (who may). At the edge: `lend` and `memory` (all
//! unsafe code), `tcp`, `shm`, `serve`, `control`. The book's page on the engine has the model and the wire format.

mod addressed;
mod batch;
mod control;
mod engine;
mod error;
mod exchange;
#[cfg(feature = "faults")]
mod faulty;
mod file;
#[cfg(fuzzing)]
pub mod fuzzing;
mod handover;
mod landing;
mod lend;
mod lendable;
mod loan;
mod memory;
mod message;
mod notify;
mod peer;
mod pieces;
mod pool;
mod prober;
mod rail;
mod rails;
#[cfg(feature = "rdma")]
mod rdma;
#[cfg(not(feature = "rdma"))]
#[path = "no_rdma.rs"]
mod rdma;
mod region;
mod schedule;
mod segment;
mod serve;
mod settings;
mod shm;
mod slice;
mod slots;
mod spin;
mod stream;
mod tcp;
mod tls;
pub mod topology;
mod transport;
mod wire;

pub use addressed::{AddressedEngine, AddressedError, AddressedRange};
pub use batch::{Batch, Outcome};
pub use engine::{BatchOptions, Engine, RegionTicket, Totals, WeakEngine};
pub use error::{Failure, Kind, SliceError, TransferError};
pub use exchange::{Answer, Answered};
#[cfg(feature = "faults")]
pub use faulty::Faults;
pub use handover::{LendOffer, Lent, REFUSED, TAKEN, take_offer};
pub use landing::{Landed, Landing, Reading};
pub use lendable::{Borrower, Lendable, LendableMemory, withdraw_all};
pub use loan::{Loan, Registered};
pub use memory::{Memory, PeerMapping};
pub use message::{Handler, Reply, Responder};
pub use pieces::Pieces;
pub use rails::RailStatus;
#[cfg(feature = "rdma")]
pub use rdma::{NoRdma, RdmaPort, rdma_ports};
pub use schedule::Priority;
pub use segment::{KeptBytes, PIECE_BYTES, StoreSegment, give_segment, map_segment};
pub use settings::{Completion, RdmaSettings, Settings};
pub use slice::{AccessRights, Direction, PeerId, RegionId, RegionKey, RemoteSlice, Request, SegmentId, Slice};
pub use tls::Tls;
pub use transport::TransportKind;
