//! Which driver blocks are segments of which pool.
//!
//! A framework's pool takes segments from the driver and cuts blocks out of them. A segment stays alive by
//! design, so it must not be held against the program. Two signs tell it from memory that the program took
//! for itself:
//! - the pool's own reserved total grows right after the driver's allocation, on the same thread;
//! - a block of the pool lies in it.

use std::collections::BTreeMap;

use super::{AllocationId, DevicePtr};

/// Driver sizes exceed what was asked by at most one huge page.
const GRANULE: u64 = 2 << 20;

/// Allocations of one thread that are remembered until its next pool event. An expandable segment grows by
/// many small pieces at a time.
const PENDING_MAX: usize = 4096;

/// A driver block that may be a pool's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Candidate {
    pub id: AllocationId,
    pub ptr: DevicePtr,
    /// Bytes of the block.
    pub size: u64,
    /// Bytes asked of the runtime, where known: what a pool adds to its total.
    pub asked: u64,
    /// A handle: no address can lie in it.
    pub create: bool,
}

/// The driver allocations of a thread since its last pool event.
#[derive(Debug, Default)]
pub(super) struct Pending(Vec<Candidate>);

impl Pending {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn push(&mut self, candidate: Candidate) {
        if self.0.len() < PENDING_MAX {
            self.0.push(candidate);
        }
    }

    /// The allocations that explain a pool's growth by `growth` bytes, the latest first. Forgets the rest.
    pub fn explain(&mut self, growth: Growth, mut found: impl FnMut(Candidate)) {
        let (mut left, handles_only) = match growth {
            Growth::By(bytes) => (bytes, false),
            // The total was not known before: addresses will tell, except for handles.
            Growth::AtMost(bytes) => (bytes, true),
        };
        for candidate in self.0.drain(..).rev() {
            if left == 0 {
                break;
            }
            if candidate.asked <= left.saturating_add(GRANULE) && (candidate.create || !handles_only) {
                left = left.saturating_sub(candidate.asked);
                found(candidate);
            }
        }
    }
}

/// By how much a pool's reserved total grew with an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Growth {
    By(u64),
    /// The first total that was seen.
    AtMost(u64),
}

/// Driver blocks that no pool has claimed yet, by address, with the bytes there. Handles are there while mapped.
#[derive(Debug, Default)]
pub(super) struct Unclaimed(BTreeMap<DevicePtr, (u64, Candidate)>);

impl Unclaimed {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn insert(&mut self, candidate: Candidate) {
        if !candidate.create {
            self.0.insert(candidate.ptr, (candidate.size, candidate));
        }
    }

    /// A handle's memory, or `size` bytes of it, got an address.
    pub fn map(&mut self, at: DevicePtr, size: u64, candidate: Candidate) {
        self.0.insert(at, (size, candidate));
    }

    pub fn unmap(&mut self, at: DevicePtr) {
        self.0.remove(&at);
    }

    /// The block is claimed, or gone.
    pub fn remove(&mut self, ptr: DevicePtr, create: bool) {
        if create {
            self.0.retain(|_, (_, candidate)| candidate.ptr != ptr);
        } else {
            self.0.remove(&ptr);
        }
    }

    /// The block in which an address lies.
    pub fn containing(&self, ptr: DevicePtr) -> Option<Candidate> {
        let (start, (size, candidate)) = self.0.range(..=ptr).next_back()?;
        (ptr.0 - start.0 < *size).then_some(*candidate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(id: u64, size: u64) -> Candidate {
        Candidate { id: AllocationId(id), ptr: DevicePtr(0x1000_0000 * id), size, asked: size, create: false }
    }

    fn explained(sizes: &[u64], growth: Growth) -> Vec<u64> {
        let mut pending = Pending::default();
        for (index, size) in sizes.iter().enumerate() {
            pending.push(candidate(index as u64 + 1, *size));
        }
        let mut ids = Vec::new();
        pending.explain(growth, |found| ids.push(found.id.0));
        assert!(pending.is_empty(), "what was not explained is not carried over");
        ids
    }

    #[test]
    fn growth_is_explained_by_the_latest_allocations() {
        assert_eq!(explained(&[64 << 20, 20 << 20], Growth::By(20 << 20)), [2]);
        assert_eq!(explained(&[2 << 20, 2 << 20, 2 << 20], Growth::By(6 << 20)), [3, 2, 1]);
        assert_eq!(explained(&[20 << 20], Growth::By(0)), [0; 0]);
        assert_eq!(
            explained(&[20 << 20, 64 << 20], Growth::By(20 << 20)),
            [1],
            "64 MiB can not be in 20 MiB"
        );
    }

    #[test]
    fn a_driver_block_may_exceed_what_was_asked_by_a_granule() {
        assert_eq!(explained(&[(20 << 20) + 32], Growth::By(20 << 20)), [1]);
    }

    #[test]
    fn an_unknown_growth_explains_handles_only() {
        assert_eq!(explained(&[20 << 20], Growth::AtMost(1 << 40)), [0; 0]);
        let mut pending = Pending::default();
        pending.push(Candidate { create: true, ..candidate(7, 2 << 20) });
        let mut ids = Vec::new();
        pending.explain(Growth::AtMost(1 << 40), |found| ids.push(found.id.0));
        assert_eq!(ids, [7]);
    }

    #[test]
    fn an_address_lies_in_its_block_only() {
        let mut unclaimed = Unclaimed::default();
        unclaimed.insert(candidate(1, 0x100));
        assert_eq!(unclaimed.containing(DevicePtr(0x1000_00ff)).map(|c| c.id), Some(AllocationId(1)));
        assert_eq!(unclaimed.containing(DevicePtr(0x1000_0100)), None);
        assert_eq!(unclaimed.containing(DevicePtr(0x0fff_ffff)), None);
    }

    #[test]
    fn a_handle_is_found_by_the_addresses_it_is_mapped_at() {
        let mut unclaimed = Unclaimed::default();
        let handle = Candidate { create: true, ..candidate(7, 0x4000) };
        unclaimed.insert(handle);
        assert_eq!(unclaimed.containing(handle.ptr), None, "a handle is no address");
        unclaimed.map(DevicePtr(0x9000), 0x2000, handle);
        unclaimed.map(DevicePtr(0xf000), 0x2000, handle);
        assert_eq!(unclaimed.containing(DevicePtr(0xafff)), Some(handle));
        assert_eq!(unclaimed.containing(DevicePtr(0xb000)), None);
        unclaimed.unmap(DevicePtr(0x9000));
        assert_eq!(unclaimed.containing(DevicePtr(0xafff)), None);
        unclaimed.remove(handle.ptr, true);
        assert!(unclaimed.is_empty());
    }
}
