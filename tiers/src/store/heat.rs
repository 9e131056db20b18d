//! The heat list: which replicas to bring back first after a restart, hottest first, and where they lay.
//!
//! A file of its own, replaced whole (written beside, synced, renamed); lost or damaged it costs the first phase of
//! recovery, never data. Format: `docs/src/formats/heat.md`.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Weak;
use std::time::Duration;

use tidepool_metadata::{DataType, Incarnation, NodeId, ObjectKey, ReplicaId, SliceHeader, TenantId, VersionId};

use super::index::{PerSlice, header_of};
use super::{Inner, alive};
use crate::nvme::Location;

const MAGIC: [u8; 8] = *b"TPHEAT\0\x02";
/// How many replicas are listed: what the first phase can bring back well within its half second.
const LISTED: usize = 4096;
/// How often the list is written.
const PERIOD: Duration = Duration::from_secs(5);

/// One hot replica: the header of its first slice, and where its slices lay on NVMe, in order; no place if they were
/// in DRAM only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hot {
    pub(super) header: SliceHeader,
    pub(super) locations: Vec<Location>,
}

/// Writes the list every few seconds until the store goes away.
pub(super) async fn run(store: Weak<Inner>) {
    let mut ticks = tokio::time::interval(PERIOD);
    loop {
        ticks.tick().await;
        let Some(inner) = alive(&store) else { return };
        // Before recovery is done the old list is the better one.
        if inner.recovery.is_finished() {
            let _ended = tokio::task::spawn_blocking(move || persist(&inner)).await;
        }
    }
}

/// Writes the list now. A failure is logged: it costs warmth after the next restart.
pub(super) fn persist(inner: &Inner) {
    let Some(path) = &inner.config.heat_file else { return };
    let hot = collect(inner);
    if let Err(error) = replace(path, &encode(&hot)) {
        tracing::warn!(path = %path.display(), %error, "heat list not written: the next start will be colder");
    }
}

fn collect(inner: &Inner) -> Vec<Hot> {
    let tables = inner.state.lock();
    let hottest = tables.resident.hottest(LISTED);
    let entries = hottest.into_iter().filter_map(|id| tables.index.get(id));
    entries
        .map(|entry| Hot {
            header: header_of(entry),
            locations: entry.nvme.as_ref().map(|places| PerSlice::as_slice(places).to_vec()).unwrap_or_default(),
        })
        .collect()
}

/// Reads the list; empty if there is none, or if it is damaged.
pub(super) fn load(path: &Path) -> Vec<Hot> {
    match fs::read(path) {
        Ok(bytes) => decode(&bytes).unwrap_or_else(|| {
            tracing::warn!(path = %path.display(), "heat list is damaged: starting without it");
            Vec::new()
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "heat list not readable: starting without it");
            Vec::new()
        }
    }
}

fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let beside = path.with_extension("part");
    let mut file = File::create(&beside)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&beside, path)
}

fn encode(hot: &[Hot]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    for Hot { header, locations } in hot {
        let SliceHeader { version, replica, .. } = header;
        let key = header.key.as_bytes();
        #[expect(clippy::cast_possible_truncation, reason = "at most 16,384 slices and 1,024 bytes of key")]
        let lengths = [locations.len() as u32, key.len() as u32];
        let narrow = [
            header.tenant.0,
            version.node.0,
            version.incarnation.0,
            replica.node.0,
            replica.incarnation.0,
            header.slice_bytes,
            header.data_type as u32,
        ];
        narrow.iter().chain(&lengths).for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
        let wide = [version.sequence, replica.sequence, header.commit_index, header.object_length];
        wide.iter().for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
        locations.iter().for_each(|location| out.extend_from_slice(&location.to_bytes()));
        out.extend_from_slice(key);
    }
    let checksum = crc32fast::hash(&out);
    out.extend_from_slice(&checksum.to_le_bytes());
    out
}

fn decode(bytes: &[u8]) -> Option<Vec<Hot>> {
    let (body, checksum) = bytes.split_last_chunk::<4>()?;
    if crc32fast::hash(body) != u32::from_le_bytes(*checksum) {
        return None;
    }
    let mut rest = body.strip_prefix(&MAGIC)?;
    let mut hot = Vec::new();
    while !rest.is_empty() {
        let mut narrow = [0; 9];
        for number in &mut narrow {
            *number = u32::from_le_bytes(take(&mut rest)?);
        }
        let [
            tenant,
            version_node,
            version_life,
            replica_node,
            replica_life,
            slice_bytes,
            data_type,
            places,
            key_length,
        ] = narrow;
        let mut wide = [0; 4];
        for number in &mut wide {
            *number = u64::from_le_bytes(take(&mut rest)?);
        }
        let [version_sequence, replica_sequence, commit_index, object_length] = wide;
        let mut locations = Vec::new();
        for _ in 0..places {
            locations.push(Location::from_bytes(take(&mut rest)?));
        }
        let key = ObjectKey::new(rest.split_off(..key_length as usize)?).ok()?;
        let (node, incarnation) = (NodeId(version_node), Incarnation(version_life));
        let version = VersionId { node, incarnation, sequence: version_sequence };
        let (node, incarnation) = (NodeId(replica_node), Incarnation(replica_life));
        let replica = ReplicaId { node, incarnation, sequence: replica_sequence };
        let header = SliceHeader {
            tenant: TenantId(tenant),
            key,
            version,
            replica,
            object_length,
            slice_bytes: (slice_bytes > 0).then_some(slice_bytes)?,
            slice_index: 0,
            slice_length: 0,
            checksum: 0,
            data_type: DataType::from_number(u8::try_from(data_type).ok()?)?,
            commit_index,
        };
        hot.push(Hot { header, locations });
    }
    Some(hot)
}

/// Reads a heat list of these bytes behind the magic, whose checksum is made to hold: for its fuzz target.
#[cfg(fuzzing)]
pub fn decode_heat_list(bytes: &[u8]) {
    let mut file = [&MAGIC, bytes].concat();
    file.extend(crc32fast::hash(&file).to_le_bytes());
    if let Some(hot) = decode(&file) {
        assert_eq!(encode(&hot), file);
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = rest.split_first_chunk::<N>()?;
    *rest = tail;
    Some(*head)
}
