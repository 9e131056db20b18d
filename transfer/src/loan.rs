//! Memory of this process that a node may read, and how it comes to it.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Instant;

use crate::engine::{Engine, RegionTicket};
use crate::handover::Lent;
use crate::memory::Memory;
use crate::slice::AccessRights;

/// Memory that a node may read until this is dropped.
#[derive(Debug)]
pub enum Loan {
    /// The node is on this host and maps it.
    Mapped(Lent),
    /// The node's engine reads it, by a device if there is one.
    Registered(Registered),
}

/// Memory that is registered until this is dropped.
#[derive(Debug)]
pub struct Registered {
    /// There until the drop.
    engine: Option<Engine>,
    ticket: RegionTicket,
    process: u32,
}

impl Loan {
    /// To the node on this host that listens at `socket`.
    ///
    /// # Errors
    /// Those of [`Lent::new`].
    pub fn by_socket(socket: &Path, memory: &Memory) -> io::Result<Self> {
        Lent::new(socket, memory).map(Self::Mapped)
    }

    /// To whoever is told the ticket.
    ///
    /// # Errors
    /// Those of [`Engine::register`].
    pub fn by_engine(engine: &Engine, memory: &Memory) -> io::Result<Self> {
        let ticket = engine.register(memory, AccessRights::READ, None).map_err(io::Error::other)?;
        let (engine, process) = (Some(engine.clone()), std::process::id());
        Ok(Self::Registered(Registered { engine, ticket, process }))
    }
}

impl Registered {
    /// What the node has to be told.
    #[must_use]
    pub fn ticket(&self) -> RegionTicket {
        self.ticket
    }

    /// What its engine asks of peers.
    #[must_use]
    pub fn admission(&self) -> [u8; 32] {
        self.engine.as_ref().map_or([0; 32], Engine::admission)
    }

    /// Where its engine listens; 0: nowhere.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.engine.as_ref().and_then(|engine| engine.addresses().first()).map_or(0, SocketAddr::port)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let engine = self.engine.take();
        // In a child it is the parent's: its locks may be held for ever, and its devices register for the parent.
        if self.process != std::process::id() {
            return std::mem::forget(engine);
        }
        // One that was closed has withdrawn it.
        let _withdrawn = engine.map(|engine| engine.unregister(self.ticket.region, Instant::now()));
    }
}
