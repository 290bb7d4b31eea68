//! Bookkeeping of one address range: which parts are allocated, which are free.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// A range of addresses, handed out in address order (first fit), freed parts merged at once. It does not
/// touch the memory itself.
#[derive(Debug)]
pub struct Arena {
    range: Range<usize>,
    /// Start of each free part -> its length.
    free: BTreeMap<usize, usize>,
    /// Start of each allocation -> its length.
    live: HashMap<usize, usize>,
}

impl Arena {
    pub fn new(range: Range<usize>) -> Self {
        Self { free: BTreeMap::from([(range.start, range.len())]), live: HashMap::new(), range }
    }

    /// Allocates `length` > 0 bytes at a multiple of `align`; `None` when no free part is large enough.
    pub fn allocate(&mut self, length: usize, align: usize) -> Option<usize> {
        let (start, room, address) = self.free.iter().find_map(|(&start, &room)| {
            let address = start.next_multiple_of(align);
            (address - start + length <= room).then_some((start, room, address))
        })?;
        self.free.remove(&start);
        if address > start {
            self.free.insert(start, address - start);
        }
        let (end, limit) = (address + length, start + room);
        if limit > end {
            self.free.insert(end, limit - end);
        }
        self.live.insert(address, length);
        Some(address)
    }

    /// Ends the allocation at `address` and gives its length. Its range stays unavailable until
    /// [`Arena::recycle`], so that the caller can clear it first.
    pub fn take(&mut self, address: usize) -> Option<usize> {
        self.live.remove(&address)
    }

    /// Makes a range that was [taken](Arena::take) available again.
    pub fn recycle(&mut self, address: usize, length: usize) {
        let (mut start, mut end) = (address, address + length);
        if let Some((&before, &room)) = self.free.range(..address).next_back()
            && before + room == start
        {
            start = before;
        }
        if let Some(room) = self.free.remove(&end) {
            end += room;
        }
        self.free.insert(start, end - start);
    }

    /// Ends every allocation and gives their number.
    pub fn clear(&mut self) -> usize {
        let count = self.live.len();
        *self = Self::new(self.range.clone());
        count
    }
}

#[cfg(test)]
mod tests {
    use super::Arena;

    #[test]
    fn freed_neighbours_merge_and_are_handed_out_again() {
        let mut arena = Arena::new(0x1000..0x5000);
        let blocks: Vec<usize> = (0..4).map_while(|_| arena.allocate(0x1000, 0x1000)).collect();
        assert_eq!(blocks, [0x1000, 0x2000, 0x3000, 0x4000]);
        assert_eq!(arena.allocate(1, 1), None);
        for block in [0x2000, 0x4000, 0x3000] {
            assert_eq!(arena.take(block), Some(0x1000));
            arena.recycle(block, 0x1000);
        }
        assert_eq!(arena.allocate(0x3000, 0x1000), Some(0x2000));
        assert_eq!(arena.take(0x3000), None);
    }

    #[test]
    fn alignment_leaves_the_gap_usable() {
        let mut arena = Arena::new(0x1100..0x4000);
        assert_eq!(arena.allocate(0x1000, 0x1000), Some(0x2000));
        assert_eq!(arena.allocate(0xf00, 0x100), Some(0x1100));
    }
}
