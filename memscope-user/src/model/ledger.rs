//! The books: what every process holds, event by event.

use std::collections::BTreeMap;

use rustc_hash::{FxHashMap, FxHashSet};

use super::block::Blocks;
use super::extents::{self, FreeSpace};
use super::labels::Labels;
use super::segments::{Candidate, Growth, Pending, Unclaimed};
use super::steps::{Boundary, StepRule, Steps, StepsFrom};
use super::{
    Alloc, AllocationId, Block, DeviceId, DevicePtr, Driver, Event, EventKind, Free, Module, Name, Pool,
    Stack, StepId, Tgid, Tid, Totals,
};

pub use super::block::BlockRef;

/// Everything known of all processes. Fed with events in order, by [`Ledger::apply`].
#[derive(Debug, Default)]
pub struct Ledger {
    rule: StepRule,
    steps_from: StepsFrom,
    processes: Vec<Process>,
    /// Index of the latest process with this id.
    index: FxHashMap<Tgid, usize>,
}

/// What an event changed.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// No block and no step.
    Nothing,
    Allocated {
        block: BlockRef,
        /// The block that lived at this address before: its free was lost, or not to be seen.
        replaced: Option<Block>,
    },
    /// The pool reported a block again that it had reported before (a workspace: on reserving, on use).
    Reported(BlockRef),
    Freed(Block),
    /// The block that was used, where it is known.
    Used(Option<BlockRef>),
    /// A block that was allocated before attach, or whose allocation was lost.
    UnknownFree {
        pool: Pool,
        device: Option<DeviceId>,
        /// Bytes, where the event says.
        size: Option<u64>,
    },
    Failed {
        device: Option<DeviceId>,
    },
    /// The end of a step, the beginning of one, or both at once.
    Step {
        ended: Option<StepId>,
        began: Option<StepId>,
    },
    /// The steps so far were none: all that there is was there before the first step.
    StepsRetracted,
    /// A device took back what the driver had given; `blocks` are no longer in the ledger.
    Reset {
        device: DeviceId,
        blocks: Vec<Block>,
    },
    /// The process told CANN that it has finished. What it still frees is tidied up, not used.
    Finalized,
    /// The process is over; `blocks` were alive and are no longer in the ledger.
    Ended {
        how: Ending,
        blocks: Vec<Block>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    Exit,
    Exec,
}

impl Ledger {
    pub fn new(rule: StepRule) -> Self {
        Ledger { rule, ..Ledger::default() }
    }

    pub fn with_steps_from(mut self, steps_from: StepsFrom) -> Self {
        self.steps_from = steps_from;
        self
    }

    pub fn steps_from(&self) -> StepsFrom {
        self.steps_from
    }

    /// All processes that had an event, in order of their first; those that ended too. A process that
    /// replaces its program (`exec`) is another one from there on.
    pub fn processes(&self) -> &[Process] {
        &self.processes
    }

    /// The process that has or had this id last.
    pub fn process(&self, tgid: Tgid) -> Option<&Process> {
        self.index.get(&tgid).and_then(|index| self.processes.get(*index))
    }

    /// The number of a process, by its position, among those under its id that used memory, from 1: a process that replaces
    /// its program is another one. Dumps have no others.
    pub fn program(&self, position: usize) -> u32 {
        let tgid = self.processes.get(position).map(|process| process.tgid);
        let before = self.processes.iter().take(position);
        let used_memory = |process: &&Process| process.devices().iter().any(DeviceMemory::was_used);
        1 + before.filter(|process| Some(process.tgid) == tgid).filter(used_memory).count() as u32
    }

    /// Where [`Ledger::process`] is in [`Ledger::processes`].
    pub fn position(&self, tgid: Tgid) -> Option<usize> {
        self.index.get(&tgid).copied()
    }

    pub fn apply(&mut self, event: &Event) -> Change {
        let index = match self.index.get(&event.tgid) {
            Some(index) if self.processes[*index].ended.is_none() => *index,
            _ => {
                self.processes.push(Process::new(event.tgid));
                self.index.insert(event.tgid, self.processes.len() - 1);
                self.processes.len() - 1
            }
        };
        self.processes[index].apply(event, &self.rule, self.steps_from)
    }
}

/// What is known of one process.
#[derive(Debug)]
pub struct Process {
    pub tgid: Tgid,
    ended: Option<Ending>,
    finalized: bool,
    last_id: AllocationId,
    kernels: u64,
    blocks: Blocks,
    devices: Vec<DeviceMemory>,
    only_device: OnlyDevice,
    threads: FxHashMap<Tid, Thread>,
    steps: Steps,
    labels: Labels,
    unclaimed: Unclaimed,
    /// Where physical memory is mapped, with the bytes there: by address, to the handle.
    mapped: BTreeMap<DevicePtr, (u64, DevicePtr)>,
    unknown_frees: [Count; Pool::ALL.len()],
    lost_frees: [Count; Pool::ALL.len()],
}

#[derive(Debug, Default)]
struct Thread {
    op: Option<Name>,
    device: Option<DeviceId>,
    pending: Pending,
}

/// The one device that a process was seen to use, as long as it is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OnlyDevice {
    NoneYet,
    One(DeviceId),
    Several,
}

/// A number of blocks and their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Count {
    pub blocks: u64,
    pub bytes: u64,
}

impl Count {
    pub fn add(&mut self, bytes: u64) {
        self.blocks += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// The memory of a process on one device.
#[derive(Debug, Clone, Default)]
pub struct DeviceMemory {
    /// `None`: host memory, and what could not be placed.
    pub device: Option<DeviceId>,
    pools: [PoolUse; Pool::ALL.len()],
    pub driver: DriverUse,
    /// How things stood when the device was reset for the last time with anything on it.
    before_reset: Option<Box<DeviceMemory>>,
}

/// One pool of a process on one device. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolUse {
    /// Of blocks whose allocation was seen.
    pub live_bytes: u64,
    pub peak_bytes: u64,
    pub blocks: u64,
    /// The allocator's own totals as it reported them last, less the segments that it has given back since: they
    /// include what was there before attach.
    pub totals: Option<Totals>,
    /// The largest `totals.allocated`.
    pub peak_allocated: u64,
}

impl PoolUse {
    /// Bytes handed out: the allocator's own figure where there is one.
    pub fn used(&self) -> u64 {
        self.totals.map_or(self.live_bytes, |totals| totals.allocated)
    }

    pub fn was_used(&self) -> bool {
        self.peak_bytes > 0 || self.totals.is_some()
    }
}

/// What the driver's live bytes on a device are for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DriverUse {
    /// By owner module, as far as it is known. Pools' segments are part of [`Module::APP`].
    pub modules: Vec<(Option<Module>, u64)>,
    /// Bytes of driver blocks that are segments, by pool.
    segments: [u64; Pool::ALL.len()],
}

impl DriverUse {
    pub fn segments_of(&self, pool: Pool) -> u64 {
        self.segments[pool as usize]
    }

    fn module(&mut self, block: &Block) -> &mut u64 {
        let module = block.module();
        let at = match self.modules.iter().position(|(known, _)| *known == module) {
            Some(at) => at,
            None => {
                self.modules.push((module, 0));
                self.modules.len() - 1
            }
        };
        &mut self.modules[at].1
    }
}

impl DeviceMemory {
    fn new(device: Option<DeviceId>) -> Self {
        DeviceMemory { device, ..DeviceMemory::default() }
    }

    pub fn pool(&self, pool: Pool) -> &PoolUse {
        &self.pools[pool as usize]
    }

    /// Whether any pool had a block there.
    pub fn was_used(&self) -> bool {
        Pool::ALL.into_iter().any(|pool| self.pool(pool).was_used())
    }

    /// As it stands, or, when a reset has emptied it, as it stood before.
    pub fn while_used(&self) -> &DeviceMemory {
        match &self.before_reset {
            Some(before) if self.pool(Pool::Hal).blocks == 0 => before,
            _ => self,
        }
    }

    fn enter(&mut self, block: &Block) {
        let pool = &mut self.pools[block.pool as usize];
        pool.blocks += 1;
        pool.live_bytes = pool.live_bytes.saturating_add(block.size);
        pool.peak_bytes = pool.peak_bytes.max(pool.live_bytes);
        if block.pool == Pool::Hal {
            let bytes = self.driver.module(block);
            *bytes = bytes.saturating_add(block.size);
        }
    }

    fn leave(&mut self, block: &Block) {
        let pool = &mut self.pools[block.pool as usize];
        pool.blocks -= 1;
        pool.live_bytes = pool.live_bytes.saturating_sub(block.size);
        if block.pool == Pool::Hal {
            let bytes = self.driver.module(block);
            *bytes = bytes.saturating_sub(block.size);
            if let Some(pool) = block.segment_of {
                let bytes = &mut self.driver.segments[pool as usize];
                *bytes = bytes.saturating_sub(block.size);
                // A pool that gives segments back (`empty_cache`) says so with its next block only.
                if let Some(totals) = &mut self.pools[pool as usize].totals {
                    let asked = block.driver.map_or(block.size, |driver| driver.asked);
                    totals.reserved = totals.reserved.saturating_sub(asked);
                }
            }
        }
    }

    fn report(&mut self, pool: Pool, totals: Totals) -> Growth {
        let pool = &mut self.pools[pool as usize];
        pool.peak_allocated = pool.peak_allocated.max(totals.allocated);
        match pool.totals.replace(totals) {
            Some(before) => Growth::By(totals.reserved.saturating_sub(before.reserved)),
            None => Growth::AtMost(totals.reserved),
        }
    }
}

impl Process {
    fn new(tgid: Tgid) -> Self {
        Process {
            tgid,
            ended: None,
            finalized: false,
            last_id: AllocationId(0),
            kernels: 0,
            blocks: Blocks::default(),
            devices: Vec::new(),
            only_device: OnlyDevice::NoneYet,
            threads: FxHashMap::default(),
            steps: Steps::default(),
            labels: Labels::default(),
            unclaimed: Unclaimed::default(),
            mapped: BTreeMap::new(),
            unknown_frees: Default::default(),
            lost_frees: Default::default(),
        }
    }

    /// How it ended, if it did: then there are no blocks any more, and all else is as it was at the end.
    pub fn ended(&self) -> Option<Ending> {
        self.ended
    }

    /// Whether it told CANN that it has finished.
    pub fn finalized(&self) -> bool {
        self.finalized
    }

    /// The id of the block allocated last; 0 before the first.
    pub fn last_id(&self) -> AllocationId {
        self.last_id
    }

    /// Kernels launched so far.
    pub fn kernels(&self) -> u64 {
        self.kernels
    }

    pub fn steps(&self) -> &Steps {
        &self.steps
    }

    /// Live blocks, in no order.
    pub fn blocks(&self) -> impl Iterator<Item = &Block> {
        self.blocks.iter()
    }

    pub fn block(&self, at: BlockRef) -> Option<&Block> {
        self.blocks.get(at)
    }

    pub fn find(&self, pool: Pool, ptr: DevicePtr) -> Option<&Block> {
        self.blocks.get(self.blocks.find(pool, ptr)?)
    }

    /// Devices on which anything was allocated or reported, in order of appearance.
    pub fn devices(&self) -> &[DeviceMemory] {
        &self.devices
    }

    pub fn device(&self, device: Option<DeviceId>) -> Option<&DeviceMemory> {
        self.devices.iter().find(|memory| memory.device == device)
    }

    /// Frees of blocks that were allocated before attach, or whose allocation was lost. Bytes count where the
    /// frees said.
    pub fn unknown_frees(&self, pool: Pool) -> Count {
        self.unknown_frees[pool as usize]
    }

    /// Blocks whose address was handed out again before their free was seen.
    pub fn lost_frees(&self, pool: Pool) -> Count {
        self.lost_frees[pool as usize]
    }

    /// What the program calls memory that a thread allocates now: the texts of the ranges in which it is, without those
    /// that are steps, then what functions of frameworks on the stack say; from the outermost, joined with `@`.
    pub fn label(&self, tid: Tid, stack: Option<&Stack>) -> Option<Name> {
        match (self.labels.of(tid), stack.and_then(Stack::label)) {
            (Some(ranges), Some(functions)) => Some(format!("{ranges}@{functions}").into()),
            (ranges, functions) => ranges.or(functions).cloned(),
        }
    }

    /// What is free in the segments that a pool has on a device, as far as they were seen. `None` without any, and where
    /// it is not known at what addresses they are (dumps of msMemScope do not say where physical memory is mapped).
    pub fn free_space(&self, pool: Pool, device: Option<DeviceId>) -> Option<FreeSpace> {
        let segments =
            || self.blocks.iter().filter(|block| block.segment_of == Some(pool) && block.device == device);
        let is_handle = |block: &Block| block.driver.is_some_and(|driver| driver.create);
        let mut stretches: Vec<_> =
            segments().filter(|block| !is_handle(block)).map(|block| (block.ptr.0, block.size)).collect();
        let handles: FxHashSet<DevicePtr> =
            segments().filter(|block| is_handle(block)).map(|block| block.ptr).collect();
        let pieces: Vec<_> = self
            .mapped
            .iter()
            .filter(|(_, (_, handle))| handles.contains(handle))
            .map(|(at, (size, _))| (at.0, *size))
            .collect();
        if pieces.len() < handles.len() {
            return None;
        }
        stretches.extend(extents::joined(pieces));
        let blocks = self.blocks.iter().filter(|block| block.pool == pool && block.device == device);
        let blocks = blocks.map(|block| (block.ptr.0, block.size)).collect();
        (!stretches.is_empty()).then(|| FreeSpace::of(stretches, blocks))
    }

    /// The device that an event of this thread is about, when the event does not say.
    pub fn current_device(&self, tid: Tid) -> Option<DeviceId> {
        self.threads.get(&tid).and_then(|thread| thread.device).or(match self.only_device {
            OnlyDevice::One(device) => Some(device),
            OnlyDevice::NoneYet | OnlyDevice::Several => None,
        })
    }

    /// The operator in progress on a thread, else its last one.
    pub fn current_op(&self, tid: Tid) -> Option<&Name> {
        self.threads.get(&tid)?.op.as_ref()
    }

    fn apply(&mut self, event: &Event, rule: &StepRule, steps_from: StepsFrom) -> Change {
        match &event.kind {
            EventKind::RangeBegin { range, text, .. } if !rule.begins_step(&event.kind) => {
                self.labels.begin(event.tid, *range, text);
            }
            EventKind::RangeEnd { range: Some(range) } => self.labels.end(*range),
            _ => {}
        }
        match &event.kind {
            EventKind::Alloc(alloc) => self.alloc(event, alloc),
            EventKind::Free(free) => self.free(event, free),
            EventKind::AllocFailed(failed) => {
                Change::Failed { device: self.place(failed.pool, failed.device, event.tid) }
            }
            EventKind::Map { ptr, size, handle } => {
                self.map(*ptr, *size, *handle);
                Change::Nothing
            }
            EventKind::Unmap { ptr } => {
                self.unclaimed.unmap(*ptr);
                self.mapped.remove(ptr);
                Change::Nothing
            }
            EventKind::Op { name } => {
                self.threads.entry(event.tid).or_default().op = Some(name.clone());
                Change::Nothing
            }
            EventKind::Launch { .. } => {
                self.kernels += 1;
                Change::Nothing
            }
            EventKind::Mark { .. }
            | EventKind::RangeBegin { .. }
            | EventKind::RangeEnd { .. }
            | EventKind::StepInferred(_) => match self.steps.observe(event, rule, steps_from) {
                Boundary { ended: None, began: None } => Change::Nothing,
                Boundary { ended, began } => Change::Step { ended, began },
            },
            EventKind::Access(access) => Change::Used(self.blocks.containing(access.pool, access.ptr)),
            EventKind::StepsRetracted => {
                self.steps = Steps::default();
                self.blocks.iter_mut().for_each(|block| block.step = StepId(0));
                Change::StepsRetracted
            }
            EventKind::DeviceSet { device } => {
                self.meet(*device);
                self.threads.entry(event.tid).or_default().device = Some(*device);
                Change::Nothing
            }
            EventKind::DeviceReset { device } => self.reset(*device),
            EventKind::AclInit => {
                self.finalized = false;
                Change::Nothing
            }
            EventKind::AclFinalize => {
                self.finalized = true;
                Change::Finalized
            }
            EventKind::Exec => self.end(Ending::Exec),
            EventKind::Exit => self.end(Ending::Exit),
        }
    }

    fn alloc(&mut self, event: &Event, alloc: &Alloc) -> Change {
        let device = self.place(alloc.pool, alloc.device, event.tid);
        let memory = self.devices.iter().position(|memory| memory.device == device).unwrap_or_else(|| {
            self.devices.push(DeviceMemory::new(device));
            self.devices.len() - 1
        });
        let growth = alloc.totals.map(|totals| self.devices[memory].report(alloc.pool, totals));
        if alloc.pool == Pool::PtaWorkspace
            && let Some(block) = self.report_again(alloc)
        {
            return Change::Reported(block);
        }

        let thread = self.threads.entry(event.tid).or_default();
        self.last_id.0 += 1;
        let block = Block {
            id: self.last_id,
            pool: alloc.pool,
            device,
            ptr: alloc.ptr,
            size: alloc.size,
            time: event.time,
            tid: event.tid,
            step: self.steps.current(),
            op: thread.op.clone(),
            kernel_index: self.kernels,
            driver: alloc.driver.as_ref().map(|driver| Driver {
                module: driver.module.map(Module),
                create: driver.create,
                api: driver.api.map(|(name, _)| name),
                asked: driver.api.map_or(alloc.size, |(_, asked)| asked),
            }),
            segment_of: None,
            stack: alloc.stack.clone(),
        };
        let candidate = (alloc.pool == Pool::Hal && block.belongs_to_program()).then(|| Candidate {
            id: block.id,
            ptr: block.ptr,
            size: block.size,
            asked: block.driver.map_or(block.size, |driver| driver.asked),
            create: alloc.driver.as_ref().is_some_and(|driver| driver.create),
        });
        if let Some(candidate) = candidate {
            thread.pending.push(candidate);
        }

        let (at, replaced) = self.blocks.insert(block);
        if let Some(old) = &replaced {
            self.lost_frees[old.pool as usize].add(old.size);
            self.left(old);
        }
        if let Some(block) = self.blocks.get(at) {
            self.devices[memory].enter(block);
        }
        if let Some(candidate) = candidate {
            self.unclaimed.insert(candidate);
        }
        if !is_driver(alloc.pool) {
            self.claim_segments(event.tid, alloc, growth);
        }
        Change::Allocated { block: at, replaced }
    }

    /// From now on a pool's blocks can lie in the memory of this handle.
    fn map(&mut self, at: DevicePtr, size: u64, handle: DevicePtr) {
        self.mapped.insert(at, (size, handle));
        if let Some(block) = self.blocks.find(Pool::Hal, handle).and_then(|block| self.blocks.get(block))
            && block.belongs_to_program()
        {
            let candidate =
                Candidate { id: block.id, ptr: handle, size: block.size, asked: block.size, create: true };
            self.unclaimed.map(at, size, candidate);
        }
    }

    /// A workspace is reported when it is reserved and when it is used: the second report may be of its used
    /// part only.
    fn report_again(&mut self, alloc: &Alloc) -> Option<BlockRef> {
        let at = self.blocks.find(alloc.pool, alloc.ptr)?;
        let block = self.blocks.get_mut(at)?;
        let memory = self.devices.iter_mut().find(|memory| memory.device == block.device)?;
        if alloc.size > block.size {
            memory.leave(block);
            block.size = alloc.size;
            memory.enter(block);
        }
        Some(at)
    }

    fn claim_segments(&mut self, tid: Tid, alloc: &Alloc, growth: Option<Growth>) {
        if let Some(thread) = self.threads.get_mut(&tid)
            && !thread.pending.is_empty()
        {
            let mut pending = std::mem::take(&mut thread.pending);
            pending.explain(growth.unwrap_or(Growth::By(0)), |candidate| self.claim(candidate, alloc.pool));
        }
        if !self.unclaimed.is_empty()
            && let Some(candidate) = self.unclaimed.containing(alloc.ptr)
        {
            self.claim(candidate, alloc.pool);
        }
    }

    fn claim(&mut self, candidate: Candidate, pool: Pool) {
        if let Some(at) = self.blocks.find(Pool::Hal, candidate.ptr)
            && let Some(block) = self.blocks.get_mut(at)
            && block.id == candidate.id
            && block.segment_of.is_none()
        {
            block.segment_of = Some(pool);
            self.unclaimed.remove(candidate.ptr, candidate.create);
            if let Some(memory) = self.devices.iter_mut().find(|memory| memory.device == block.device) {
                let bytes = &mut memory.driver.segments[pool as usize];
                *bytes = bytes.saturating_add(block.size);
            }
        }
    }

    fn free(&mut self, event: &Event, free: &Free) -> Change {
        let block = self.blocks.remove(free.pool, free.ptr).or_else(|| {
            // The driver frees by address alone, host memory and device memory alike.
            match free.pool {
                Pool::Hal => self.blocks.remove(Pool::Host, free.ptr),
                Pool::Host => self.blocks.remove(Pool::Hal, free.ptr),
                _ => None,
            }
        });
        let device = match &block {
            Some(block) => block.device,
            None => self.place(free.pool, free.device, event.tid),
        };
        if let Some(totals) = free.totals {
            let at = free.device.or(device);
            match self.devices.iter_mut().find(|memory| memory.device == at) {
                Some(memory) => memory.report(free.pool, totals),
                None => {
                    self.devices.push(DeviceMemory::new(at));
                    let last = self.devices.len() - 1;
                    self.devices[last].report(free.pool, totals)
                }
            };
        }
        match block {
            Some(block) => {
                self.left(&block);
                Change::Freed(block)
            }
            None => {
                self.unknown_frees[free.pool as usize].add(free.size.unwrap_or(0));
                Change::UnknownFree { pool: free.pool, device, size: free.size }
            }
        }
    }

    /// Takes a block that is no longer in the store off the sums.
    fn left(&mut self, block: &Block) {
        if let Some(memory) = self.devices.iter_mut().find(|memory| memory.device == block.device) {
            memory.leave(block);
        }
        if block.pool == Pool::Hal {
            self.unclaimed.remove(block.ptr, block.driver.is_some_and(|driver| driver.create));
        }
    }

    fn reset(&mut self, device: DeviceId) -> Change {
        let blocks = self.blocks.take(|block| block.pool == Pool::Hal && block.device == Some(device));
        if !blocks.is_empty()
            && let Some(memory) = self.devices.iter_mut().find(|memory| memory.device == Some(device))
        {
            memory.before_reset = None;
            memory.before_reset = Some(Box::new(memory.clone()));
        }
        for block in &blocks {
            self.left(block);
        }
        Change::Reset { device, blocks }
    }

    fn end(&mut self, how: Ending) -> Change {
        self.ended = Some(how);
        self.threads = FxHashMap::default();
        self.unclaimed = Unclaimed::default();
        self.mapped = BTreeMap::new();
        let blocks = self.blocks.take(|_| true);
        self.blocks = Blocks::default();
        Change::Ended { how, blocks }
    }

    /// The device of an event. Host memory is on none.
    fn place(&mut self, pool: Pool, said: Option<DeviceId>, tid: Tid) -> Option<DeviceId> {
        match said {
            Some(device) => self.meet(device),
            None if pool == Pool::Host => {}
            None => return self.current_device(tid),
        }
        said
    }

    fn meet(&mut self, device: DeviceId) {
        self.only_device = match self.only_device {
            OnlyDevice::NoneYet => OnlyDevice::One(device),
            OnlyDevice::One(known) if known == device => self.only_device,
            _ => OnlyDevice::Several,
        };
    }
}

/// Whether the pool is the driver itself: the others take their segments from it.
fn is_driver(pool: Pool) -> bool {
    matches!(pool, Pool::Hal | Pool::Host)
}

#[cfg(test)]
mod tests;
