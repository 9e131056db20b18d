//! Nodes that this client was referred to: they hold what the node that was asked does not.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tidepool_metadata::proto;
use tonic::transport::Channel;

use super::{Link, Native, Target, may_block};
use crate::builder::SILENCE_OF_MANY;
use crate::call::Client;
use crate::error::Error;
use crate::native::calls::Got;
use crate::types::ObjectInfo;

/// As many nodes as are remembered; of more, those that were learned before are learned again.
const MOST: usize = 256;

/// By the address of their gRPC, which says where their engine is.
#[derive(Default)]
pub(crate) struct Others(Mutex<HashMap<String, Arc<Other>>>);

struct Other {
    channel: Channel,
    native: Native,
}

/// Where an object is.
pub(crate) struct Elsewhere {
    /// Of nodes that hold it.
    pub(crate) addresses: Vec<String>,
    pub(crate) version: String,
}

impl Others {
    fn get(&self, address: &str, client: &Client) -> Result<Arc<Other>, Error> {
        let mut others = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(other) = others.get(address) {
            return Ok(Arc::clone(other));
        }
        let parsed: crate::ServerAddress = address.parse()?;
        let channel = parsed.channel(client.settings(), SILENCE_OF_MANY)?;
        if others.len() >= MOST {
            others.clear();
        }
        let other = Arc::new(Other { channel, native: Native::referred(parsed) });
        others.insert(address.to_owned(), Arc::clone(&other));
        Ok(other)
    }
}

impl Client {
    /// Reads exactly the version that is elsewhere into `target`. `None`: it could not be had there, so that the node that
    /// referred to it has to give it.
    pub(crate) async fn get_there(
        &self,
        elsewhere: &Elsewhere,
        message: &proto::GetRequest,
        target: &mut impl Target,
        deadline: Instant,
    ) -> Option<ObjectInfo> {
        let message = proto::GetRequest { version: elsewhere.version.clone(), may_refer: false, ..message.clone() };
        // What is received goes to the caller's buffer, which no other thread can borrow.
        for address in elsewhere.addresses.iter().filter(|_| may_block()) {
            let other = self.others().get(address, self).ok()?;
            let Some(link) = self.link(&other.native, &other.channel).await else { continue };
            self.count_native_call();
            match tokio::task::block_in_place(|| link.get(&message, target, deadline)) {
                Ok(Got::Whole(Some(info))) => return Some(info),
                Ok(_) => {}
                Err(error) => {
                    tracing::debug!(%error, address, "where the object is it can't be read");
                    if Link::is_lost(&error) {
                        other.native.close(&link);
                    }
                }
            }
        }
        None
    }
}
