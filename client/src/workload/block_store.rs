//! What a replay needs of a store.

use std::future::Future;

use bytes::Bytes;

use crate::{Client, Error, PutOptions, StoredIn};

/// A block that the store had.
#[derive(Clone, Debug)]
pub struct FoundBlock {
    /// Its bytes.
    pub value: Bytes,
    /// Where it was.
    pub tier: StoredIn,
}

/// A store of blocks under a replay.
pub trait BlockStore: Send + Sync + 'static {
    /// What goes wrong in it.
    type Error: std::fmt::Display + Send;

    /// The block of that key, or `None` if the store does not have it.
    fn read(&self, key: Vec<u8>) -> impl Future<Output = Result<Option<FoundBlock>, Self::Error>> + Send;

    /// Stores a block. A block that is there already is no error.
    fn store(&self, key: Vec<u8>, value: Bytes) -> impl Future<Output = Result<(), Self::Error>> + Send;
}

impl BlockStore for Client {
    type Error = Error;

    async fn read(&self, key: Vec<u8>) -> Result<Option<FoundBlock>, Error> {
        let found = self.get(key).await?;
        Ok(found.map(|object| FoundBlock { value: object.value, tier: object.info.tier }))
    }

    async fn store(&self, key: Vec<u8>, value: Bytes) -> Result<(), Error> {
        let options = PutOptions { data_type: crate::DataType::KvCache, ..PutOptions::default() };
        self.put(key, value, &options).await.map(drop)
    }
}

/// The key of a block in the store. The block's size is part of it, so that replays with different sizes don't meet.
#[must_use]
pub fn block_key(hash_id: u64, block_bytes: usize) -> Vec<u8> {
    format!("trace/{block_bytes}/{hash_id:016x}").into_bytes()
}
