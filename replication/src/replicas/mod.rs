//! How many copies an object has, and where: decisions, without I/O.
//!
//! [`placement`] says which nodes are to get copies, [`repair`] what the holder of a copy is to do about the others, [`task`]
//! what is to be done next for a copy or move that somebody asked for. All are functions of what the catalog knows. Who carries them out is the node's business.

pub mod placement;
pub mod repair;
pub mod task;
