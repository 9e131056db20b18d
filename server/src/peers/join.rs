//! A node without a catalog becomes a learner of a group that is there: one that will vote, or a guest.

use std::time::Duration;

use tidepool_metadata::ErrorKind;
use tidepool_replication::{Lane, MemberId, Members};
use tokio::time::Instant;

use super::AddressBook;
use super::dial::{connect, unreachable_node};
use super::handshake::{Myself, Secret, foreign_cluster, foreign_epoch, unknown_protocol};
use super::wire::{Join, from_caller, from_node};
use crate::error::Error;

/// How long a node tries to get in.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long one attempt may take: a committed change of members, and an election perhaps.
const ATTEMPT: Duration = Duration::from_secs(7);
/// The pause between rounds over all addresses.
const PAUSE: Duration = Duration::from_millis(200);

/// The group that a node has become part of.
pub(crate) struct Group {
    pub(crate) cluster: u64,
    pub(crate) epoch: u32,
    pub(crate) members: Members,
    /// What this node is in it.
    pub(crate) member: MemberId,
}

/// The group that a node comes from, which it joins anew.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Former {
    pub(crate) cluster: u64,
    /// Of its last catalog: what it holds may be newer than all that an older one knows.
    pub(crate) epoch: u32,
}

/// Asks the nodes at `addresses` in turn until one lets this node in, as a guest if it is to be one.
///
/// # Errors
/// A secret or protocol that does not fit, another cluster than the former one, `REMOVED`, at once; `JOIN` after a minute without success, with the last reason.
pub(crate) async fn join(
    addresses: &[String],
    myself: &Myself,
    guest: bool,
    former: Option<Former>,
    secret: &Secret,
    book: &AddressBook,
) -> Result<Group, Error> {
    let end = Instant::now() + PATIENCE;
    loop {
        let mut last = None;
        for address in addresses {
            let attempt = tokio::time::timeout(ATTEMPT, ask(address, myself, guest, former, secret, book)).await;
            match attempt.unwrap_or_else(|_| Err(unreachable_node(address, "no answer in time"))) {
                Ok(group) => return Ok(group),
                Err(error)
                    if matches!(error.reason(), "FOREIGN_SECRET" | "PEER_PROTOCOL" | "FOREIGN_CLUSTER" | "REMOVED") =>
                {
                    return Err(error);
                }
                Err(error) => {
                    tracing::info!(address, %error, "not let in yet");
                    last = Some(error);
                }
            }
        }
        if Instant::now() >= end {
            let why = last.map_or_else(|| "no address was given".to_owned(), |error| error.to_string());
            let message = format!("no node of cluster.join = {addresses:?} let this node in: {why}");
            return Err(Error::new(ErrorKind::Unavailable, "JOIN", message).field("cluster.join"));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn ask(
    address: &str,
    myself: &Myself,
    guest: bool,
    former: Option<Former>,
    secret: &Secret,
    book: &AddressBook,
) -> Result<Group, Error> {
    let mut connection = connect(address, myself, secret, Lane::Call.number()).await?;
    if let Some(Former { cluster, epoch }) = former {
        let found = &connection.welcome;
        if found.cluster != cluster {
            return Err(foreign_cluster(found.cluster, cluster));
        }
        if found.epoch < epoch {
            return Err(foreign_epoch(found.epoch, epoch));
        }
    }
    let part = from_caller::Part::Join(Join { life: myself.incarnation.0, guest });
    connection.say(part).await.map_err(|error| unreachable_node(address, &error.to_string()))?;
    let joined = loop {
        match connection.reply(address).await? {
            from_node::Part::Peers(peers) => book.learn_all(&peers.known),
            from_node::Part::Joined(joined) => break joined,
            _ => return Err(unknown_protocol("answer to a join")),
        }
    };
    let members = Members::decode(&joined.members).ok_or_else(|| unknown_protocol("list of members"))?;
    let kind = if guest { MemberId::guest } else { MemberId::new };
    let member = kind(myself.node, myself.incarnation.0);
    Ok(Group { cluster: connection.welcome.cluster, epoch: connection.welcome.epoch, members, member })
}
