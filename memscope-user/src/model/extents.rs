//! Free memory within the segments of a pool, by address.

use serde::Serialize;

/// What is free in a pool's segments: in how many pieces, and how large one block could be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct FreeSpace {
    /// Of segments whose allocation was seen.
    pub segments: u64,
    pub segment_bytes: u64,
    pub free_bytes: u64,
    /// Bytes in one piece.
    pub largest_free: u64,
    pub pieces: u64,
    /// Segments without a block: what emptying the cache would give back.
    pub empty_segments: u64,
    pub empty_bytes: u64,
    /// Segments that blocks keep although these are less than a quarter of them.
    pub sparse_segments: u64,
    pub sparse_bytes: u64,
    /// Bytes of these blocks.
    pub sparse_used: u64,
}

/// Less of a segment than one in so many bytes is little.
const SPARSE: u64 = 4;

/// A stretch of addresses: its first, and the bytes.
pub(super) type Stretch = (u64, u64);

impl FreeSpace {
    /// Of segments, each a stretch of its own, and the blocks in them. Overlaps and blocks outside do no harm.
    pub(super) fn of(mut segments: Vec<Stretch>, mut blocks: Vec<Stretch>) -> Self {
        segments.sort_unstable();
        // A block without bytes divides nothing.
        blocks.retain(|(_, size)| *size > 0);
        blocks.sort_unstable();
        let mut space = FreeSpace::default();
        let mut blocks = blocks.into_iter().peekable();
        // The end of the blocks so far.
        let mut reached = 0;
        for (start, size) in segments {
            space.segments += 1;
            space.segment_bytes = space.segment_bytes.saturating_add(size);
            let end = start.saturating_add(size);
            let mut at = start.max(reached);
            let free_before = space.free_bytes;
            while let Some((block, size)) = blocks.next_if(|(block, _)| *block < end) {
                space.add(block.min(end).saturating_sub(at));
                at = at.max(block.saturating_add(size));
            }
            reached = reached.max(at);
            space.add(end.saturating_sub(at));
            space.judge(size, size.saturating_sub(space.free_bytes - free_before));
        }
        space
    }

    fn judge(&mut self, size: u64, used: u64) {
        if used == 0 {
            self.empty_segments += 1;
            self.empty_bytes = self.empty_bytes.saturating_add(size);
        } else if used < size / SPARSE {
            self.sparse_segments += 1;
            self.sparse_bytes = self.sparse_bytes.saturating_add(size);
            self.sparse_used = self.sparse_used.saturating_add(used);
        }
    }

    fn add(&mut self, bytes: u64) {
        self.pieces += u64::from(bytes > 0);
        self.free_bytes = self.free_bytes.saturating_add(bytes);
        self.largest_free = self.largest_free.max(bytes);
    }
}

/// Joins stretches that follow on one another: memory that was mapped piece by piece into one range.
pub(super) fn joined(mut stretches: Vec<Stretch>) -> Vec<Stretch> {
    stretches.sort_unstable();
    let mut joined: Vec<Stretch> = Vec::new();
    for (start, size) in stretches {
        match joined.last_mut() {
            Some((first, bytes)) if first.saturating_add(*bytes) == start => {
                *bytes = bytes.saturating_add(size)
            }
            _ => joined.push((start, size)),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_follows_on_is_one() {
        assert_eq!(joined(vec![(20, 10), (0, 10), (10, 10), (40, 5)]), [(0, 30), (40, 5)]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Against a map of every byte.
        #[test]
        fn free_pieces_are_those_of_a_map_of_bytes(
            segments in prop::collection::vec(1..40u64, 0..5),
            blocks in prop::collection::vec((0..250u64, 0..30u64), 0..12),
        ) {
            // Segments with a gap of one byte between them, which belongs to nobody.
            let mut at = 3;
            let segments: Vec<Stretch> = segments
                .into_iter()
                .map(|size| {
                    let segment = (at, size);
                    at += size + 1;
                    segment
                })
                .collect();
            let mut map = vec![b'-'; 400];
            segments.iter().for_each(|(start, size)| map[*start as usize..][..*size as usize].fill(b'f'));
            blocks.iter().for_each(|(start, size)| map[*start as usize..][..*size as usize].fill(b'-'));
            let used_of = |(start, size): &Stretch| {
                map[*start as usize..][..*size as usize].iter().filter(|byte| **byte == b'-').count() as u64
            };
            let used: Vec<(u64, u64)> = segments.iter().map(|segment| (segment.1, used_of(segment))).collect();
            let pieces: Vec<u64> = map
                .split(|byte| *byte == b'-')
                .filter(|piece| !piece.is_empty())
                .map(|piece| piece.len() as u64)
                .collect();
            let space = FreeSpace::of(segments.clone(), blocks);
            prop_assert_eq!(space.free_bytes, pieces.iter().sum::<u64>());
            prop_assert_eq!(space.largest_free, pieces.iter().copied().max().unwrap_or(0));
            prop_assert_eq!(space.pieces, pieces.len() as u64);
            prop_assert_eq!(space.segments, segments.len() as u64);
            let empty = used.iter().filter(|(_, used)| *used == 0);
            prop_assert_eq!(space.empty_bytes, empty.map(|(size, _)| size).sum::<u64>());
            let sparse: Vec<_> = used.iter().filter(|(size, used)| *used > 0 && *used < size / 4).collect();
            prop_assert_eq!(space.sparse_segments, sparse.len() as u64);
            prop_assert_eq!(space.sparse_bytes, sparse.iter().map(|(size, _)| size).sum::<u64>());
            prop_assert_eq!(space.sparse_used, sparse.iter().map(|(_, used)| used).sum::<u64>());
        }
    }
}
