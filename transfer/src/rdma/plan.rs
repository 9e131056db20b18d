//! Pieces as work requests. Pure.
//!
//! A piece is cut where a registered part ends, here or at the peer. Neighbours whose bytes follow each other in one part
//! of the peer's memory become one work request with several local ranges; ranges that follow each other become one.

use crate::batch::Piece;

/// Some bytes of a region here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LocalExtent {
    /// Place of the region in its batch.
    pub(crate) region: u32,
    /// From the region's start.
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// Some bytes of a part of the peer's region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemoteExtent {
    pub(crate) address: u64,
    pub(crate) rkey: u32,
    pub(crate) length: u64,
}

/// Bounds of one work request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkLimits {
    /// Local ranges.
    pub(crate) ranges: usize,
    pub(crate) bytes: u64,
}

/// One work request in the making.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlannedWork {
    pub(crate) address: u64,
    pub(crate) rkey: u32,
    pub(crate) bytes: u64,
    /// How many of the plan's extents are its own.
    pub(crate) extents: usize,
    /// Pieces that are done when this is.
    pub(crate) pieces: u32,
}

/// Plans `pieces`. `part_end(region, offset)` says how many bytes from there on lie in one part here, `remote` where a
/// range begins at the peer; `None` of either: it can't be reached.
pub(crate) fn plan(
    pieces: &[Piece],
    limits: WorkLimits,
    part_left: impl Fn(&Piece, u64) -> Option<u64>,
    remote: impl Fn(&Piece, u64, u64) -> Option<RemoteExtent>,
) -> Option<(Vec<PlannedWork>, Vec<LocalExtent>)> {
    let mut works: Vec<PlannedWork> = Vec::with_capacity(pieces.len());
    let mut extents: Vec<LocalExtent> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let mut done = 0;
        while done < piece.length {
            let offset = piece.local_offset.checked_add(done)?;
            let length = (piece.length - done).min(part_left(piece, offset)?).min(limits.bytes);
            let there = remote(piece, piece.remote_offset.checked_add(done)?, length)?;
            let here = LocalExtent { region: piece.region, offset, length: there.length };
            if here.length == 0 || here.length > length {
                return None;
            }
            add(&mut works, &mut extents, limits, here, there, |last| {
                part_left(piece, last.offset).is_some_and(|left| left >= last.length + here.length)
            });
            done += here.length;
        }
        works.last_mut()?.pieces += 1;
    }
    Some((works, extents))
}

fn add(
    works: &mut Vec<PlannedWork>,
    extents: &mut Vec<LocalExtent>,
    limits: WorkLimits,
    here: LocalExtent,
    there: RemoteExtent,
    is_one_part: impl Fn(&LocalExtent) -> bool,
) {
    if let (Some(work), Some(last)) = (works.last_mut(), extents.last_mut())
        && work.rkey == there.rkey
        && work.address + work.bytes == there.address
        && work.bytes + here.length <= limits.bytes
    {
        let follows = last.region == here.region && last.offset + last.length == here.offset && is_one_part(last);
        if follows {
            last.length += here.length;
            work.bytes += here.length;
            return;
        }
        if work.extents < limits.ranges {
            extents.push(here);
            work.extents += 1;
            work.bytes += here.length;
            return;
        }
    }
    extents.push(here);
    works.push(PlannedWork { address: there.address, rkey: there.rkey, bytes: here.length, extents: 1, pieces: 0 });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::slice::Direction;

    const LIMITS: WorkLimits = WorkLimits { ranges: 3, bytes: 1 << 20 };

    fn piece(local_offset: u64, remote_offset: u64, length: u64) -> Piece {
        Piece { direction: Direction::Read, request: 0, region: 0, segment: 0, local_offset, remote_offset, length }
    }

    /// Parts of 10,000 bytes here and of 7,000 there, which lie apart.
    fn planned(pieces: &[Piece], limits: WorkLimits) -> (Vec<PlannedWork>, Vec<LocalExtent>) {
        let left = |_: &Piece, offset: u64| Some(10_000 - offset % 10_000);
        let remote = |_: &Piece, offset: u64, length: u64| {
            let (part, within) = (offset / 7_000, offset % 7_000);
            let address = part * 1_000_000 + within;
            Some(RemoteExtent { address, rkey: part as u32, length: length.min(7_000 - within) })
        };
        plan(pieces, limits, left, remote).expect("reachable")
    }

    #[test]
    fn scattered_pieces_of_one_remote_range_are_one_work() {
        let (works, extents) = planned(&[piece(0, 0, 10), piece(500, 10, 20), piece(520, 30, 5)], LIMITS);
        assert_eq!(works, [PlannedWork { address: 0, rkey: 0, bytes: 35, extents: 2, pieces: 3 }]);
        assert_eq!(
            extents.iter().map(|extent| (extent.offset, extent.length)).collect::<Vec<_>>(),
            [(0, 10), (500, 25)]
        );
    }

    #[test]
    fn a_work_ends_where_its_limits_or_the_remote_range_do() {
        let far = [piece(0, 0, 10), piece(100, 11, 10)];
        assert_eq!(planned(&far, LIMITS).0.len(), 2);
        let many: Vec<_> = (0..4).map(|index| piece(index * 100, index * 10, 10)).collect();
        let works: Vec<_> = planned(&many, LIMITS).0.iter().map(|work| (work.extents, work.pieces)).collect();
        assert_eq!(works, [(3, 3), (1, 1)]);
        let long = planned(&[piece(0, 0, 100)], WorkLimits { bytes: 40, ..LIMITS }).0;
        let works: Vec<_> = long.iter().map(|work| (work.bytes, work.pieces)).collect();
        assert_eq!(works, [(40, 0), (40, 0), (20, 1)]);
    }

    #[test]
    fn a_piece_is_cut_where_a_part_ends_on_either_side() {
        let (works, extents) = planned(&[piece(9_000, 6_000, 2_000)], LIMITS);
        assert_eq!(works.iter().map(|work| (work.rkey, work.bytes)).collect::<Vec<_>>(), [(0, 1_000), (1, 1_000)]);
        assert_eq!(extents.iter().map(|extent| extent.offset).collect::<Vec<_>>(), [9_000, 10_000]);
        // One remote range, but two parts here: two ranges of one work.
        let (works, extents) = planned(&[piece(9_990, 0, 20)], LIMITS);
        assert_eq!((works.len(), extents.len()), (1, 2));
    }

    proptest! {
        #[test]
        fn every_byte_is_planned_once(
            shapes in proptest::collection::vec((0_u64..60_000, 0_u64..60_000, 1_u64..20_000), 1..20), bytes in 1_u64..30_000,
        ) {
            let pieces: Vec<_> = shapes.into_iter().map(|(local, remote, length)| piece(local, remote, length)).collect();
            let limits = WorkLimits { ranges: 4, bytes };
            let (works, extents) = planned(&pieces, limits);
            let mut extents = extents.into_iter();
            let mut pairs = Vec::new();
            for work in &works {
                prop_assert!(work.bytes <= limits.bytes && (1..=limits.ranges).contains(&work.extents));
                let mut remote = u64::from(work.rkey) * 7_000 + work.address % 1_000_000;
                for extent in extents.by_ref().take(work.extents) {
                    prop_assert!(extent.offset / 10_000 == (extent.offset + extent.length - 1) / 10_000);
                    pairs.push((extent.offset, remote, extent.length));
                    remote += extent.length;
                }
                prop_assert!(remote <= (u64::from(work.rkey) + 1) * 7_000);
            }
            prop_assert_eq!(works.iter().map(|work| work.pieces as usize).sum::<usize>(), pieces.len());
            // Laid end to end, plan and pieces pair the same bytes.
            let flat = |pairs: &[(u64, u64, u64)]| -> Vec<(u64, u64)> {
                pairs.iter().flat_map(|(local, remote, length)| (0..*length).map(move |at| (local + at, remote + at))).collect()
            };
            let wanted: Vec<_> =
                pieces.iter().map(|piece| (piece.local_offset, piece.remote_offset, piece.length)).collect();
            prop_assert!(flat(&pairs) == flat(&wanted));
        }
    }
}
