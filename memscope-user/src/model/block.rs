//! Blocks, and the store of those that are alive.

use std::{collections::BTreeMap, sync::Arc};

use rustc_hash::FxHashMap;

use super::{AllocationId, DeviceId, DevicePtr, Frame, Module, Name, Nanos, Pool, Stack, StepId, Tid};

/// One allocation of a pool, from its allocation to its free.
#[derive(Debug, Clone, PartialEq)]
pub struct Block {
    pub id: AllocationId,
    pub pool: Pool,
    /// `None` for host memory, and where neither the event nor the thread said.
    pub device: Option<DeviceId>,
    pub ptr: DevicePtr,
    /// Bytes.
    pub size: u64,
    pub time: Nanos,
    pub tid: Tid,
    /// The step that was open, else the one that had ended last.
    pub step: StepId,
    /// The operator in progress on the thread, else the last one before.
    pub op: Option<Name>,
    /// Kernels that the process had launched before.
    pub kernel_index: u64,
    /// What the driver was told (driver pools only).
    pub driver: Option<Driver>,
    /// For a driver block: the pool that cuts it into blocks of its own.
    pub segment_of: Option<Pool>,
    /// Where in the program it was allocated, where that is known.
    pub stack: Option<Arc<Stack>>,
}

/// What the driver was told about a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Driver {
    pub module: Option<Module>,
    /// Physical memory without an address: the block's `ptr` is its handle.
    pub create: bool,
    /// The runtime function that was called above it.
    pub api: Option<&'static str>,
    /// Bytes asked of it; without one, the block's.
    pub asked: u64,
}

impl Block {
    /// The line of the program that wanted it, where that is known.
    pub fn place(&self) -> Option<&Frame> {
        self.stack.as_ref()?.place()
    }

    /// Who asked the driver for it, where that is known.
    pub fn module(&self) -> Option<Module> {
        self.driver.and_then(|driver| driver.module)
    }

    /// Whether freeing this block is up to the program, or to the framework on its behalf.
    pub fn belongs_to_program(&self) -> bool {
        self.segment_of.is_none() && self.module().is_none_or(Module::belongs_to_program)
    }
}

/// Where a live block is in [`Blocks`]. Good until the block is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRef(u32);

/// The live blocks of a process by pool and address.
///
/// Blocks lie in one vector and the maps hold indices, so that a map that has just grown wastes few bytes.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    slots: Vec<Option<Block>>,
    vacant: Vec<u32>,
    by_ptr: [FxHashMap<DevicePtr, u32>; Pool::ALL.len()],
    /// In order of address: kept as soon as it is asked in which block an address lies.
    ordered: Option<Box<[BTreeMap<DevicePtr, u32>; Pool::ALL.len()]>>,
}

impl Blocks {
    /// Adds a block, in place of the one that its key already names.
    pub fn insert(&mut self, block: Block) -> (BlockRef, Option<Block>) {
        let (pool, ptr) = (block.pool, block.ptr);
        let slot = match self.vacant.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(block);
                slot
            }
            None => {
                if self.slots.len() == self.slots.capacity() {
                    // Doubling would waste up to a block per block.
                    self.slots.reserve_exact(self.slots.len() / 4 + 16);
                }
                self.slots.push(Some(block));
                (self.slots.len() - 1) as u32
            }
        };
        let old = self.by_ptr[pool as usize].insert(ptr, slot).and_then(|old| self.vacate(old));
        if let Some(ordered) = &mut self.ordered {
            ordered[pool as usize].insert(ptr, slot);
        }
        (BlockRef(slot), old)
    }

    pub fn remove(&mut self, pool: Pool, ptr: DevicePtr) -> Option<Block> {
        let slot = self.by_ptr[pool as usize].remove(&ptr)?;
        if let Some(ordered) = &mut self.ordered {
            ordered[pool as usize].remove(&ptr);
        }
        self.vacate(slot)
    }

    /// The block in which an address lies. Pools nest: what the driver gave is looked at after what was cut out of it.
    pub fn containing(&mut self, pool: Option<Pool>, ptr: DevicePtr) -> Option<BlockRef> {
        let by_ptr = &self.by_ptr;
        let ordered = self.ordered.get_or_insert_with(|| {
            let ordered = |at: usize| by_ptr[at].iter().map(|(ptr, slot)| (*ptr, *slot)).collect();
            Box::new(std::array::from_fn(ordered))
        });
        let within = |pool: &Pool| {
            let (_, slot) = ordered[*pool as usize].range(..=ptr).next_back()?;
            let block = self.slots.get(*slot as usize)?.as_ref()?;
            // The handle of physical memory is no address.
            let is_address = block.driver.is_none_or(|driver| !driver.create);
            (is_address && ptr.0 - block.ptr.0 < block.size.max(1)).then_some(BlockRef(*slot))
        };
        match &pool {
            Some(pool) => within(pool),
            None => Pool::ALL.iter().rev().find_map(within),
        }
    }

    pub fn find(&self, pool: Pool, ptr: DevicePtr) -> Option<BlockRef> {
        self.by_ptr[pool as usize].get(&ptr).copied().map(BlockRef)
    }

    pub fn get(&self, at: BlockRef) -> Option<&Block> {
        self.slots.get(at.0 as usize)?.as_ref()
    }

    pub fn get_mut(&mut self, at: BlockRef) -> Option<&mut Block> {
        self.slots.get_mut(at.0 as usize)?.as_mut()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Block> {
        self.slots.iter().flatten()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Block> {
        self.slots.iter_mut().flatten()
    }

    /// Takes out every block that `which` names, in order of allocation.
    pub fn take(&mut self, which: impl Fn(&Block) -> bool) -> Vec<Block> {
        let mut taken: Vec<Block> = Vec::new();
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if let Some(block) = slot.take_if(|block| which(block)) {
                self.by_ptr[block.pool as usize].remove(&block.ptr);
                if let Some(ordered) = &mut self.ordered {
                    ordered[block.pool as usize].remove(&block.ptr);
                }
                self.vacant.push(index as u32);
                taken.push(block);
            }
        }
        taken.sort_unstable_by_key(|block| block.id);
        taken
    }

    fn vacate(&mut self, slot: u32) -> Option<Block> {
        self.vacant.push(slot);
        self.slots[slot as usize].take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_small() {
        assert!(size_of::<Option<Block>>() <= 112, "{}", size_of::<Option<Block>>());
    }
}
