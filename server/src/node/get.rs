//! Gets: locate, open the replica here, read verified bytes.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tidepool_client::ObjectStream;
use tidepool_metadata::catalog::{Located, ObjectLocation, Presence};
use tidepool_metadata::{ObjectKey, TenantId, VersionId, checksum};
use tidepool_replication::{CatalogError, CatalogHandle, Read};
use tidepool_tiers::StoreError;
use tidepool_tiers::store::{ByteRange, Hold, ObjectReader as StoreReader};

use super::copies::{Arriving, Next};
use super::{Freshness, NodeService, ObjectDescription, ObjectName, RangeRequest, error, remote};
use crate::error::Error;

/// How often a location that went stale between the catalog and the store is looked up again.
const LOOKUPS: usize = 4;

/// Gives out the bytes of one object, or of a range of it, in order.
pub struct ObjectReader {
    description: ObjectDescription,
    source: Source,
    /// Bytes given out.
    given: u64,
    /// Where else it is.
    others: Option<Others>,
}

/// Other copies of what is being read.
struct Others {
    service: NodeService,
    name: ObjectName,
    location: Box<ObjectLocation>,
    offset: u64,
    /// How often one of them may still be tried.
    tries: usize,
}

/// What a get opens.
pub(crate) enum Opened {
    /// The bytes, from here or by way of this node.
    Here(ObjectReader),
    /// Other nodes hold it, at these addresses.
    Elsewhere(Box<ObjectLocation>, Vec<String>),
}

/// Where the bytes come from.
enum Source {
    Here(Box<StoreReader>),
    /// Another node.
    There(Box<ObjectStream>),
    /// A put that goes on here.
    Arriving(NodeService, Arc<Arriving>),
}

impl NodeService {
    /// Opens an object for reading.
    ///
    /// # Errors
    /// `NOT_FOUND`, `RECOVERING`, `UNAVAILABLE`, `BAD_RANGE`; those of the catalog.
    pub async fn get(
        &self,
        name: &ObjectName,
        range: RangeRequest,
        freshness: Freshness,
    ) -> Result<ObjectReader, Error> {
        match self.get_or_refer(name, range, freshness, false).await? {
            Opened::Here(reader) => Ok(reader),
            Opened::Elsewhere(..) => Err(error::unexpected("an object here")),
        }
    }

    /// As [`NodeService::get`]; if the caller `may` be referred to other nodes, it is where only they hold the object.
    pub(crate) async fn get_or_refer(
        &self,
        name: &ObjectName,
        range: RangeRequest,
        freshness: Freshness,
        may_refer: bool,
    ) -> Result<Opened, Error> {
        let mut read = read_of(freshness);
        let mut versions = HashSet::new();
        for _ in 0..LOOKUPS {
            let catalog = self.catalog().await?;
            let mut located = locate(catalog, name, read).await?;
            if matches!(located, Located::Missing) && freshness.allow_unconfirmed && read != Read::Linearizable {
                read = Read::Linearizable;
                let confirmed = CatalogHandle::soon(locate(catalog, name, read)).await?;
                located = confirmed.ok_or_else(|| error::unconfirmed(name))?;
            }
            let location = match located {
                Located::Missing if read == Read::Linearizable => {
                    self.inner.store.count_miss();
                    return Err(error::not_found(name));
                }
                // A miss of a read that may lag is confirmed before it is reported.
                Located::Missing => {
                    read = Read::Linearizable;
                    continue;
                }
                Located::Recovering => return Err(error::recovering(name)),
                Located::Found(location) => location,
            };
            versions.insert(location.version);
            let here = location.replicas.iter().any(|copy| copy.replica.node == self.inner.node);
            if !here && may_refer {
                let addresses = self.inner.remotes.addresses(&location);
                if !addresses.is_empty() {
                    return Ok(Opened::Elsewhere(location, addresses));
                }
            }
            if !here {
                match self.open_elsewhere(name, &location, range).await? {
                    Some(stream) => return Ok(Opened::Here(self.elsewhere(name, location, stream, range))),
                    // The location may be old; if it is not, its nodes do not serve now.
                    None if read == Read::Linearizable => return Err(error::unavailable(name)),
                    None => read = Read::Linearizable,
                }
                continue;
            }
            let opened = self.inner.store.open(name.tenant, &name.key, location.version).await;
            if let Ok(Some(reader)) = opened {
                self.inner.hot.note_read(name.tenant, [&name.key]);
                let mut reader = ObjectReader::new(&location, reader, range)?;
                reader.others = self.others(name, location, range.offset);
                return Ok(Opened::Here(reader));
            }
            // What this node can't give now, another one may.
            if let Some(stream) = self.open_elsewhere(name, &location, range).await? {
                return Ok(Opened::Here(self.elsewhere(name, location, stream, range)));
            }
            match opened {
                Ok(_) => read = Read::Linearizable,
                Err(StoreError::Recovering) => return Err(error::recovering(name)),
                Err(StoreError::Corrupt { .. }) => return Err(error::not_found(name)),
                Err(error) => return Err(error.into()),
            }
            if location.presence == Presence::Recovering {
                return Err(error::recovering(name));
            }
        }
        // Replaced each time between the catalog and the store is not missing.
        Err(if versions.len() > 1 { error::unavailable(name) } else { error::not_found(name) })
    }

    /// Opens exactly that version, without asking the catalog: for callers that hold a location. Served from the first
    /// phase of recovery on. May be answered for a short time after the version was replaced or removed; and to nodes that get
    /// copies, whole, while its put still goes on.
    ///
    /// # Errors
    /// `NOT_FOUND`, `RECOVERING`, `UNAVAILABLE`, `BAD_RANGE`.
    pub async fn get_version(
        &self,
        name: &ObjectName,
        version: VersionId,
        range: RangeRequest,
    ) -> Result<ObjectReader, Error> {
        if range == RangeRequest::default()
            && let Some(arriving) = self.arriving(name, version)
        {
            return Ok(ObjectReader::arriving(self.clone(), arriving));
        }
        let reader = self.open_version(name, version, range).await?;
        self.inner.hot.note_asked(name.tenant, &name.key, version);
        Ok(reader)
    }

    /// Counts reads that other processes on this host did by themselves.
    pub(crate) fn note_local_reads(&self, tenant: TenantId, keys: &[ObjectKey]) {
        self.inner.store.note_local_reads(tenant, keys);
        self.inner.hot.note_read(tenant, keys);
    }

    async fn open_version(
        &self,
        name: &ObjectName,
        version: VersionId,
        range: RangeRequest,
    ) -> Result<ObjectReader, Error> {
        match self.inner.store.open(name.tenant, &name.key, version).await {
            Ok(Some(reader)) => ObjectReader::of_version(version, reader, range),
            Ok(None) | Err(StoreError::Corrupt { .. }) => Err(error::not_found(name)),
            Err(StoreError::Recovering) => Err(error::recovering(name)),
            Err(error) => Err(error.into()),
        }
    }

    fn elsewhere(
        &self,
        name: &ObjectName,
        location: Box<ObjectLocation>,
        stream: ObjectStream,
        range: RangeRequest,
    ) -> ObjectReader {
        let mut reader = ObjectReader::elsewhere(&location, stream, range);
        reader.others = self.others(name, location, range.offset);
        reader
    }

    /// The other copies, if there are several.
    fn others(&self, name: &ObjectName, location: Box<ObjectLocation>, offset: u64) -> Option<Others> {
        let tries = location.replicas.len().saturating_sub(1);
        (tries > 0).then(|| Others { service: self.clone(), name: name.clone(), location, offset, tries })
    }

    /// Whether objects can be read; grants leases to those that can, if one is asked for.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn exists_with_lease(
        &self,
        tenant: TenantId,
        keys: Vec<ObjectKey>,
        lease: Duration,
    ) -> Result<Vec<Presence>, Error> {
        let (_, presence) = self.catalog().await?.exists_with_lease(tenant, keys, lease).await?;
        Ok(presence)
    }

    /// As [`NodeService::exists_with_lease`], without; what is no key names no object.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn exists<K: AsRef<[u8]> + Sync>(
        &self,
        tenant: TenantId,
        keys: &[K],
        freshness: Freshness,
    ) -> Result<Vec<Presence>, Error> {
        let (_, presence) = self.catalog().await?.exists(tenant, keys, read_of(freshness)).await?;
        Ok(presence)
    }

    /// As [`NodeService::exists`]; a miss that the leader does not confirm soon is `None`.
    ///
    /// # Errors
    /// Those of the catalog.
    pub async fn exists_or_unconfirmed<K: AsRef<[u8]> + Sync>(
        &self,
        tenant: TenantId,
        keys: &[K],
        freshness: Freshness,
    ) -> Result<Vec<Option<Presence>>, Error> {
        let catalog = self.catalog().await?;
        let (_, presence) = catalog.exists_or_unconfirmed(tenant, keys, read_of(freshness)).await?;
        Ok(presence)
    }
}

async fn locate(catalog: &CatalogHandle, name: &ObjectName, read: Read) -> Result<Located, CatalogError> {
    let (_, mut located) = catalog.locate(name.tenant, vec![name.key.clone()], None, read).await?;
    located.pop().ok_or(CatalogError::Unexpected { expected: "a location" })
}

pub(super) fn read_of(freshness: Freshness) -> Read {
    if freshness.fresh { Read::Linearizable } else { Read::AtLeast(freshness.seen) }
}

impl ObjectReader {
    fn new(location: &ObjectLocation, reader: StoreReader, range: RangeRequest) -> Result<Self, Error> {
        let mut opened = Self::of_version(location.version, reader, range)?;
        let description = &mut opened.description;
        description.checksum = (description.range_length == location.length).then(|| whole_checksum(location));
        description.group.clone_from(&location.group);
        Ok(opened)
    }

    fn of_version(version: VersionId, mut reader: StoreReader, range: RangeRequest) -> Result<Self, Error> {
        let object_length = reader.object_length();
        let range_length = range.length.unwrap_or_else(|| object_length.saturating_sub(range.offset));
        reader.select(ByteRange { offset: range.offset, length: range_length })?;
        let (data_type, tier) = (reader.data_type(), reader.tier().name());
        let description =
            ObjectDescription { object_length, range_length, data_type, group: None, checksum: None, tier, version };
        Ok(Self { description, source: Source::Here(Box::new(reader)), given: 0, others: None })
    }

    fn elsewhere(location: &ObjectLocation, stream: ObjectStream, range: RangeRequest) -> Self {
        let range_length = range.length.unwrap_or_else(|| location.length.saturating_sub(range.offset));
        let description = ObjectDescription {
            object_length: location.length,
            range_length,
            data_type: location.data_type,
            checksum: (range_length == location.length).then(|| whole_checksum(location)),
            group: location.group.clone(),
            tier: remote::tier_name(&stream),
            version: location.version,
        };
        Self { description, source: Source::There(Box::new(stream)), given: 0, others: None }
    }

    fn arriving(service: NodeService, arriving: Arc<Arriving>) -> Self {
        let description = ObjectDescription {
            object_length: arriving.length,
            range_length: arriving.length,
            data_type: arriving.data_type,
            checksum: None,
            group: None,
            tier: "dram",
            version: arriving.ids.0,
        };
        Self { description, source: Source::Arriving(service, arriving), given: 0, others: None }
    }

    /// Waits until the next bytes can be read, of a put that goes on: as long as that takes.
    pub(crate) async fn ready(&self) {
        if let Source::Arriving(_, arriving) = &self.source {
            arriving.beyond(self.given).await;
        }
    }

    /// Keeps the whole object where it is for `duration`, for a peer that reads it there; `None` if it is not in this node's DRAM.
    pub(crate) fn hold(&self, duration: Duration) -> Option<Hold> {
        match &self.source {
            Source::Here(reader) => reader.hold(duration),
            Source::There(_) | Source::Arriving(..) => None,
        }
    }

    /// What precedes the bytes.
    #[must_use]
    pub fn description(&self) -> &ObjectDescription {
        &self.description
    }

    /// The next verified bytes, at most 1 MiB, without a copy if they lie in DRAM; `None` at the end. If those of one copy can't
    /// be had, those of another are given.
    ///
    /// # Errors
    /// `CORRUPT` if the bytes of the last copy do not verify: nothing of them was given out, but what came before is to be
    /// discarded.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            let next = match &mut self.source {
                Source::Here(reader) => reader.next().await.map_err(Error::from),
                Source::There(stream) => stream.next().await.map_err(|error| remote::from_client(&error)),
                Source::Arriving(service, arriving) => match arriving.next(self.given).await? {
                    Next::Piece(piece) => Ok(Some(piece)),
                    Next::Sealed => {
                        let Arriving { name, ids: (version, _), .. } = &**arriving;
                        let range = RangeRequest { offset: self.given, length: None };
                        self.source = service.open_version(name, *version, range).await?.source;
                        continue;
                    }
                },
            };
            match next {
                Ok(piece) => {
                    self.given += piece.as_ref().map_or(0, |piece| piece.len() as u64);
                    return Ok(piece);
                }
                Err(error) => self.go_on_elsewhere(error).await?,
            }
        }
    }

    /// Has what is still missing come from another copy.
    async fn go_on_elsewhere(&mut self, failure: Error) -> Result<(), Error> {
        let Some(others) = self.others.as_mut().filter(|others| others.tries > 0) else { return Err(failure) };
        others.tries -= 1;
        let Others { service, name, location, offset, .. } = others;
        tracing::debug!(key = %name.key, %failure, "the rest is read from another copy");
        let length = Some(self.description.range_length - self.given);
        let range = RangeRequest { offset: *offset + self.given, length };
        match service.open_elsewhere(name, location, range).await {
            Ok(Some(stream)) => self.source = Source::There(Box::new(stream)),
            Ok(None) | Err(_) => return Err(failure),
        }
        Ok(())
    }

    /// All of the bytes in one buffer, for ranges known to be small.
    ///
    /// # Errors
    /// `NOT_FOUND` if the bytes are damaged: nothing was given out, and the copy is gone.
    pub async fn read_to_end(&mut self) -> Result<Bytes, Error> {
        if let Source::Here(reader) = &mut self.source {
            match reader.read_to_end().await {
                Ok(bytes) => return Ok(bytes),
                Err(error) => self.go_on_elsewhere(error.into()).await?,
            }
        }
        let mut bytes = BytesMut::new();
        while let Some(piece) = self.next().await? {
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes.freeze())
    }
}

/// CRC-32 of the object from those of its slices: no pass over the bytes.
pub(super) fn whole_checksum(location: &ObjectLocation) -> u32 {
    let mut rest = location.length;
    let slices = location.checksums.iter().enumerate();
    slices.fold(0, |whole, (index, &slice)| {
        let length = rest.min(u64::from(location.slice_bytes));
        rest -= length;
        if index == 0 { slice } else { checksum::combine(whole, slice, length) }
    })
}
