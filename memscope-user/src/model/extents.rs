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
}

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
            while let Some((block, size)) = blocks.next_if(|(block, _)| *block < end) {
                space.add(block.min(end).saturating_sub(at));
                at = at.max(block.saturating_add(size));
            }
            reached = reached.max(at);
            space.add(end.saturating_sub(at));
        }
        space
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
        }
    }
}
