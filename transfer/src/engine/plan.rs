//! A batch in the making: its requests are checked, and cut into groups for the rails that take them.

use std::sync::Arc;
use std::time::Instant;

use super::{BatchOptions, Inner};
use crate::batch::{Batch, BatchState, Group, Piece};
use crate::error::TransferError;
use crate::peer::{Peer, Segment};
use crate::region::RegionUse;
use crate::slice::{Direction, RegionId, Request, SegmentId, check_range};
use crate::transport::{Limits, TransportKind};

/// A batch and who takes which part of it.
pub(super) struct Prepared {
    pub(super) batch: Batch,
    pub(super) posts: Vec<Post>,
}

/// What the rails to one peer are given.
pub(super) struct Post {
    pub(super) peer: Arc<Peer>,
    pub(super) groups: Vec<Group>,
}

impl Post {
    pub(super) fn post(self) {
        self.peer.rails.submit(self.groups);
    }
}

impl Inner {
    /// Checks everything that can be checked here, and cuts the requests into groups for their links.
    pub(super) fn prepare(&self, requests: &[Request], options: BatchOptions) -> Result<Prepared, TransferError> {
        self.check_open()?;
        let limit = self.settings.batch_requests;
        if requests.len() > limit {
            return Err(TransferError::Full { what: "requests of a batch", limit });
        }
        let notification = options.notification;
        let maximum = self.settings.message_bytes as u64;
        if let Some(length) = notification.as_ref().map(|bytes| bytes.len() as u64).filter(|length| *length > maximum) {
            return Err(TransferError::Length { what: "notification", length, minimum: 0, maximum });
        }
        let mut plan = Plan { engine: self, uses: Vec::new(), segments: Vec::new(), ways: Vec::new() };
        for (index, request) in requests.iter().enumerate() {
            plan.add(index, request, options.transport)?;
        }
        let Plan { uses, segments, ways, .. } = plan;
        let mut pieces = Vec::with_capacity(ways.iter().map(|way| way.pieces.len()).sum());
        let runs: Vec<_> = ways
            .into_iter()
            .map(|way| {
                let start = pieces.len();
                pieces.extend(way.pieces);
                (Arc::clone(&segments[way.segment].peer), way.rails, way.limits, start..pieces.len())
            })
            .collect();
        let deadline = options.deadline.unwrap_or_else(|| Instant::now() + self.settings.deadline);
        let peers = if notification.is_some() { distinct_peers(&segments) } else { Vec::new() };
        let state = Arc::new(BatchState::new(requests.len(), pieces, uses, segments, deadline, options.priority));
        let batch = Batch { notification: Arc::default(), state };
        self.enter(&batch.state)?;
        if let Some(notification) = notification {
            self.notify_at_the_end(&batch, peers, notification);
        }
        let mut posts: Vec<Post> = Vec::with_capacity(runs.len());
        for (peer, rails, limits, run) in runs {
            let groups = Group::cut(&batch.state, run, limits.group_pieces, limits.group_bytes, rails);
            match posts.iter_mut().find(|post| Arc::ptr_eq(&post.peer, &peer)) {
                Some(post) => post.groups.extend(groups),
                None => posts.push(Post { peer, groups }),
            }
        }
        Ok(Prepared { batch, posts })
    }
}

/// A batch in the making.
struct Plan<'a> {
    engine: &'a Inner,
    uses: Vec<RegionUse>,
    segments: Vec<Arc<Segment>>,
    ways: Vec<Way>,
}

/// What may take the same rails.
struct Way {
    rails: u64,
    /// Of the rails that it begins with.
    limits: Limits,
    direction: Direction,
    segment: usize,
    /// Place of a region that the rails reach.
    region: usize,
    id: SegmentId,
    pieces: Vec<Piece>,
}

impl Plan<'_> {
    fn add(&mut self, index: usize, request: &Request, kind: Option<TransportKind>) -> Result<(), TransferError> {
        let of_slice = |source| TransferError::Slice { request: index, source };
        let region = self.region(request.local.region)?;
        let memory = self.uses[region].region().memory().ok_or(TransferError::NotMemory { request: index })?;
        request.local.check(memory.len()).map_err(of_slice)?;
        let is_read = request.direction == Direction::Read;
        if is_read && !memory.is_writable() {
            return Err(TransferError::NoRight { request: index });
        }
        let way = self.way(index, request, region, kind)?;
        let way = &mut self.ways[way];
        let info = &self.segments[way.segment].info;
        check_range(request.remote.offset, request.local.length, info.length).map_err(of_slice)?;
        let whole = Piece {
            direction: request.direction,
            request: index as u32,
            region: region as u32,
            segment: way.segment as u32,
            local_offset: request.local.offset,
            remote_offset: request.remote.offset,
            length: request.local.length,
        };
        way.pieces.extend(whole.cut(way.limits.piece_bytes));
        Ok(())
    }

    /// Place of a region's use; neighbours in a batch mostly share one.
    fn region(&mut self, id: RegionId) -> Result<usize, TransferError> {
        if let Some(place) = self.uses.iter().rposition(|used| used.region().id == id) {
            return Ok(place);
        }
        let unknown = || TransferError::UnknownRegion(id);
        let region = self.engine.context.regions.get(id).ok_or_else(unknown)?;
        self.uses.push(RegionUse::begin(&region).ok_or_else(unknown)?);
        Ok(self.uses.len() - 1)
    }

    /// Place of the way that a request takes.
    fn way(
        &mut self,
        index: usize,
        request: &Request,
        region: usize,
        kind: Option<TransportKind>,
    ) -> Result<usize, TransferError> {
        let (id, direction) = (request.remote.segment, request.direction);
        let (local, segments) = (self.uses[region].region(), &self.segments);
        let known = self.ways.iter().rposition(|way| {
            let is_reached = || {
                let segment = &segments[way.segment];
                segment.peer.rails.reach(Some(local), segment, direction, kind) == way.rails
            };
            way.id == id && way.direction == direction && (way.region == region || is_reached())
        });
        if let Some(place) = known {
            self.ways[place].region = region;
            return Ok(place);
        }
        let segment = self.engine.segments.read().get(id.0).map(Arc::clone);
        let segment = segment.ok_or(TransferError::UnknownSegment(id))?;
        let rights = segment.info.rights;
        if !(if direction == Direction::Read { rights.remote_read } else { rights.remote_write }) {
            return Err(TransferError::NoRight { request: index });
        }
        let rails = segment.peer.rails.reach(Some(local), &segment, direction, kind);
        let first = segment.peer.rails.first(rails).ok_or(TransferError::NoWay { request: index })?;
        let limits = segment.peer.rails.limits(first);
        self.segments.push(segment);
        let segment = self.segments.len() - 1;
        self.ways.push(Way { rails, limits, direction, segment, region, id, pieces: Vec::new() });
        Ok(self.ways.len() - 1)
    }
}

fn distinct_peers(segments: &[Arc<Segment>]) -> Vec<Arc<Peer>> {
    let mut peers: Vec<Arc<Peer>> = Vec::new();
    for segment in segments {
        if !peers.iter().any(|peer| Arc::ptr_eq(peer, &segment.peer)) {
            peers.push(Arc::clone(&segment.peer));
        }
    }
    peers
}
