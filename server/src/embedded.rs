//! An instance in a client's process: it lends DRAM and NVMe to a cluster, and its own process reads what it holds from memory.
//!
//! It is a node like any other but for three things: it follows the catalog's log without ever voting, it has no admin
//! listener, and it goes for good with its process unless it has a data folder to come back to. What it listens on is
//! for the other nodes and for clients that they refer to it; on loopback unless told otherwise.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//!
//! use tidepool_server::Embedded;
//!
//! let settings = ["cluster.join=['10.0.0.5:7420']".to_owned(), "dram.capacity=4GiB".to_owned()];
//! let instance = Embedded::start(Embedded::config(&settings)?).await?;
//! let client = instance.client().build()?;
//! client.put("block/17", "bytes".into(), &Default::default()).await?;
//! instance.leave(Duration::from_secs(20)).await?;
//! # Ok(())
//! # }
//! ```
//!
//! Crash: the cluster takes a process that was killed for a node that is away; after `replicas.repair_grace` of the leader its
//! copies are struck out. A temporary folder that it left is removed by the next instance on the machine.

mod temporary;

use std::path::{Path, PathBuf};
use std::time::Duration;

use tidepool_client::{Client, ClientBuilder};
use tidepool_metadata::ErrorKind;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use self::temporary::Temporary;
use crate::auth::Auth;
use crate::config::{Config, ConfigError, load};
use crate::error::Error;
use crate::server::{Addresses, Server};

/// What is set if nobody says otherwise: no disk, little memory, ports of the system's choosing; its log need not survive
/// loss of power, since others have it.
const DEFAULTS: [&str; 4] =
    ["grpc.listen='127.0.0.1:0'", "nvme.enabled=false", "dram.capacity=256MiB", "catalog.durability=os"];

/// How long the cluster's catalog may take to answer an instance that was let in.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running instance. Dropped without [`Embedded::leave`] or [`Embedded::shutdown`] it serves nobody any more, and counts as a
/// process that was killed; what still runs of it, and its temporary folders, go with its runtime.
pub struct Embedded {
    server: Server,
    token: Option<String>,
    temporary: Option<Folders>,
}

/// Temporary folders, which go when they are told that nothing uses them, or with the runtime.
struct Folders {
    unused: oneshot::Sender<()>,
    keeper: JoinHandle<()>,
}

impl Folders {
    fn keep(folders: Vec<Temporary>) -> Self {
        let (unused, told) = oneshot::channel();
        let keeper = tokio::spawn(async move {
            let _folders = folders;
            if told.await.is_err() {
                // The instance was dropped, and may be running: the runtime ends this task.
                std::future::pending().await
            }
        });
        Self { unused, keeper }
    }

    async fn remove(self) {
        // It waits for this.
        let _told = self.unused.send(());
        let _removed = self.keeper.await;
    }
}

impl Embedded {
    /// Settings of an instance: those of a node (`section.field=value`, as `tidepool serve --set` takes them), with an
    /// instance's defaults: 256 MiB of DRAM, no NVMe, a free port of 127.0.0.1. Neither files nor the environment are read.
    ///
    /// # Errors
    /// As of a node's settings.
    pub fn config(settings: &[String]) -> Result<Config, ConfigError> {
        let all: Vec<String> = DEFAULTS.into_iter().map(str::to_owned).chain(settings.iter().cloned()).collect();
        load(None, [], &all)
    }

    /// Joins the cluster that `cluster.join` names, and has its catalog when this returns. Needs a tokio runtime of several
    /// threads, on which it goes on running.
    ///
    /// Without `data` the instance is a temporary one: its folder and its part of `nvme.path` are removed when it ends, and its
    /// DRAM is lost with the process.
    ///
    /// # Errors
    /// `BAD_CONFIG` without a cluster to join; `JOIN` if none of its nodes let the instance in within a minute; `PEER_PROTOCOL` if
    /// they are of another version; `NO_LEADER` if their catalog does not answer for a minute; those of [`Server::start`].
    pub async fn start(mut config: Config) -> Result<Self, Error> {
        if config.cluster.join.is_empty() {
            let message =
                "an embedded instance is part of a cluster: give cluster.join = the gRPC addresses of its nodes";
            return Err(Error::new(ErrorKind::Invalid, "BAD_CONFIG", message.into()).field("cluster.join"));
        }
        let mut temporary = Vec::new();
        if config.data.is_none() {
            let folder = make_temporary(&std::env::temp_dir(), "data")?;
            config.data = Some(folder.path().to_owned());
            config.dram.survive_restart = false;
            temporary.push(folder);
            if let Some(path) = config.nvme.path.as_mut().filter(|_| config.nvme.enabled) {
                let folder = make_temporary(path, "nvme.path")?;
                folder.path().clone_into(path);
                temporary.push(folder);
            }
        }
        let token = match &config.cluster.secret_file {
            Some(path) => std::str::from_utf8(Auth::from_file(path)?.secret()).ok().map(str::to_owned),
            None => None,
        };
        let server = Server::start_guest(config).await?;
        let ready = tokio::time::timeout(PATIENCE, server.ready()).await;
        let ready = ready.unwrap_or_else(|_| {
            let message = format!("the cluster let the instance in, and its catalog did not answer for {PATIENCE:?}");
            Err(Error::new(ErrorKind::Unavailable, "NO_LEADER", message))
        });
        if let Err(error) = ready {
            // It can stop only once the catalog answers, or its runtime ends.
            tokio::spawn(async move {
                server.shutdown().await;
                drop(temporary);
            });
            return Err(error);
        }
        let temporary = (!temporary.is_empty()).then(|| Folders::keep(temporary));
        Ok(Self { server, token, temporary })
    }

    /// A client by way of this instance: its puts stay here, and what is here it reads without a call. Any other client of the
    /// cluster finds all of it too.
    #[must_use]
    pub fn client(&self) -> ClientBuilder {
        let addresses = self.server.addresses();
        let endpoint = match &addresses.unix {
            Some(path) => format!("unix:{}", path.display()),
            None => addresses.grpc.to_string(),
        };
        let builder = Client::builder().endpoint(endpoint);
        match &self.token {
            Some(token) => builder.token(token),
            None => builder,
        }
    }

    /// Where other nodes reach it; it has no admin address.
    #[must_use]
    pub fn addresses(&self) -> &Addresses {
        self.server.addresses()
    }

    /// The server under it.
    #[must_use]
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Puts an NVMe tier into service that was detached: in `path` with that capacity, each as it was started with if not given.
    /// Answers how many records were found there and taken over. A folder that is given here stays when the instance goes.
    ///
    /// # Errors
    /// `BAD_CONFIG` if it was started without one; `NVME_UNUSABLE`; that one is attached already.
    pub async fn attach_nvme(&self, path: Option<PathBuf>, capacity_bytes: Option<u64>) -> Result<u64, Error> {
        self.server.disk().attach(path, capacity_bytes).await
    }

    /// Takes the NVMe tier out of service: what is only there answers *unavailable* until it is attached again.
    ///
    /// # Errors
    /// That there is none.
    pub async fn detach_nvme(&self) -> Result<(), Error> {
        self.server.disk().detach().await
    }

    /// Whether its folders go with it.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        self.temporary.is_some()
    }

    /// Ends the instance for good: what others take over within `hand_over` stays in the store; of the rest the copies here are
    /// forgotten, and objects that had no other one are gone. Answers how many copies were forgotten.
    ///
    /// # Errors
    /// Those of the catalog, if it could not be told: the instance has ended all the same, and counts as a node that is away.
    pub async fn leave(self, hand_over: Duration) -> Result<u64, Error> {
        let Self { server, temporary, .. } = self;
        let left = server.leave(hand_over).await;
        if let Some(folders) = temporary {
            folders.remove().await;
        }
        left
    }

    /// Stops it as a node is stopped that comes back: with a data folder, the next instance over it serves what this one held.
    /// A temporary one has nothing to come back to: it leaves without handing over.
    ///
    /// # Errors
    /// Of a temporary one, as [`Embedded::leave`].
    pub async fn shutdown(self) -> Result<(), Error> {
        if self.is_temporary() {
            return self.leave(Duration::ZERO).await.map(drop);
        }
        self.server.shutdown().await;
        Ok(())
    }
}

fn make_temporary(parent: &Path, field: &'static str) -> Result<Temporary, Error> {
    Temporary::new_in(parent).map_err(|error| {
        let message = format!("{field}: make a temporary folder in {}: {error}", parent.display());
        Error::new(ErrorKind::Invalid, "FOLDER_UNUSABLE", message).field(field)
    })
}
