//! One process: its calls, its blocks, and the rules.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};

use rustc_hash::FxHashMap;

use crate::model::{
    Access, AccessKind, AllocationId, DeviceId, DevicePtr, Frame, Name, Nanos, Pool, Tgid, Tid,
};

use super::profile::{Mark, Profile, Stamp, Stretch, Timeline};
use super::{Config, EXAMPLES, Finding, Group, Moment, Pattern, PoolReport, Rules};

const POOLS: usize = Pool::ALL.len();

/// Places of allocation that are told apart, for each pool and device. Names come from the target.
const SITES_MAX: usize = 4096;

/// Blocks of one size that are remembered as possibly redundant: the latest.
const REUSABLE_MAX: usize = 16;

/// Sizes for which they are.
const SIZES_MAX: usize = 4096;

/// Patterns whose time begins with the allocation, and those whose time begins with an access.
const SINCE_ALLOC: [Pattern; 2] = [Pattern::EarlyAllocation, Pattern::UnusedAllocation];
const SINCE_ACCESS: [Pattern; 3] = [Pattern::LateDeallocation, Pattern::TemporaryIdleness, Pattern::Leak];

#[derive(Debug)]
pub(super) struct Process {
    tgid: Tgid,
    config: Config,
    /// Calls so far, by the pool that they may touch.
    calls: [u64; POOLS],
    /// Operators begun so far.
    operators: u64,
    /// The last call, by pool, in which a block was allocated or freed, and that is over.
    last_alloc: [u64; POOLS],
    last_free: [u64; POOLS],
    threads: FxHashMap<Tid, Thread>,
    regions: Vec<Region>,
    blocks: Blocks,
    initialising: FxHashMap<Name, bool>,
    /// The time of the last event.
    pub now: Nanos,
}

#[derive(Debug, Default)]
struct Thread {
    op: Option<Name>,
    open: Option<Operator>,
    /// The operator that ended last, until its thread does something else: accesses reported now are its own.
    ended: Option<Operator>,
}

#[derive(Debug, Clone, Copy)]
struct Operator {
    number: u64,
    calls: [u64; POOLS],
    allocated: [bool; POOLS],
    freed: [bool; POOLS],
}

/// When something happened, as the rules count.
#[derive(Debug, Clone, Copy)]
struct At {
    call: u64,
    /// Operators begun before: without the one that it belongs to, and with it.
    before: u64,
    operators: u64,
    time: Nanos,
    /// On the timeline of the block, once that is known.
    stamp: Option<Stamp>,
}

impl At {
    fn stamped(self, stamp: Stamp) -> Self {
        At { stamp: Some(stamp), ..self }
    }

    fn moment(self) -> Moment {
        Moment { call: self.call, timestamp_ns: self.time }
    }
}

/// Operators begun after one thing and before another.
fn operators_between(from: At, to: At) -> u64 {
    to.before.saturating_sub(from.operators)
}

/// One pool on one device.
#[derive(Debug)]
struct Region {
    pool: Pool,
    device: Option<DeviceId>,
    timeline: Timeline,
    /// Without anything that was found.
    without: Profile,
    blocks: u64,
    accesses: u64,
    sites: Vec<Site>,
    by_origin: FxHashMap<Origin, u32>,
    reusable: FxHashMap<u64, VecDeque<Reusable>>,
}

/// Where blocks are allocated: the line of the program, where that is known, who called it, and the operator around it.
type Origin = (Option<Frame>, Option<Frame>, Option<Name>);

/// Blocks allocated at one place.
#[derive(Debug)]
struct Site {
    origin: Origin,
    groups: [Tally; Pattern::ALL.len()],
}

/// Findings of one pattern of a site.
#[derive(Debug, Default)]
struct Tally {
    profile: Profile,
    findings: u64,
    largest: u64,
    operators: Option<(u64, u64)>,
    wasted: u64,
    /// Costliest first.
    examples: Vec<(Finding, Option<Stretch>)>,
}

/// A block that may prove redundant, when one that was done with before it was allocated is freed.
#[derive(Debug)]
struct Reusable {
    number: u64,
    id: Option<AllocationId>,
    ptr: DevicePtr,
    site: u32,
    alloc: At,
    allocated: Mark,
    freed: Option<(Mark, At, Option<Stretch>)>,
}

pub(super) struct Allocation {
    pub pool: Pool,
    pub device: Option<DeviceId>,
    pub id: Option<AllocationId>,
    pub ptr: DevicePtr,
    /// Bytes.
    pub size: u64,
    /// The line of the program, where that is known.
    pub place: Option<Frame>,
    /// Who called it.
    pub caller: Option<Frame>,
}

#[derive(Debug)]
struct Block {
    /// Unique within the process.
    number: u64,
    region: u32,
    site: u32,
    id: Option<AllocationId>,
    ptr: DevicePtr,
    size: u64,
    alloc: At,
    /// The last access. By the rules of msMemScope, an allocation outside of operators is one: it knows `torch.empty` as
    /// an operator that writes to the block, for which nothing is called that could be seen from outside.
    used: Option<At>,
    /// An access has been seen.
    accessed: bool,
    /// The first access by another call than the allocation's has been.
    begun: bool,
    /// Initialised, and not accessed since: where, how much and when.
    initialised: Option<(DevicePtr, u64, At)>,
    /// A pool has cut blocks out of it. It is as they are.
    is_segment: bool,
    since_alloc: SinceAlloc,
    since_access: SinceAccess,
}

/// In the profiles of the block's site, by pattern, and in that of its region. `None` where nothing is looked for.
#[derive(Debug, Clone, Copy)]
struct Marks<const PATTERNS: usize> {
    of_site: [Option<Mark>; PATTERNS],
    of_region: Option<Mark>,
}

impl<const PATTERNS: usize> Marks<PATTERNS> {
    const NONE: Self = Marks { of_site: [None; PATTERNS], of_region: None };

    fn take(&mut self) -> Self {
        std::mem::replace(self, Self::NONE)
    }
}

type SinceAlloc = Marks<{ SINCE_ALLOC.len() }>;
type SinceAccess = Marks<{ SINCE_ACCESS.len() }>;

/// The live blocks, by id and by address.
#[derive(Debug, Default)]
struct Blocks {
    slots: Vec<Option<Block>>,
    vacant: Vec<u32>,
    by_id: FxHashMap<AllocationId, u32>,
    by_ptr: [BTreeMap<DevicePtr, u32>; POOLS],
    last_number: u64,
}

impl Blocks {
    fn insert(&mut self, pool: Pool, block: Block) {
        let (id, ptr) = (block.id, block.ptr);
        let slot = match self.vacant.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(block);
                slot
            }
            None => {
                self.slots.push(Some(block));
                (self.slots.len() - 1) as u32
            }
        };
        if let Some(id) = id {
            self.by_id.insert(id, slot);
        }
        self.by_ptr[pool as usize].insert(ptr, slot);
    }

    fn get(&self, slot: u32) -> Option<&Block> {
        self.slots.get(slot as usize)?.as_ref()
    }

    fn get_mut(&mut self, slot: u32) -> Option<&mut Block> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    /// By its id, else by its address.
    fn find_exactly(&self, pool: Pool, id: Option<AllocationId>, ptr: DevicePtr) -> Option<u32> {
        id.and_then(|id| self.by_id.get(&id)).or_else(|| self.by_ptr[pool as usize].get(&ptr)).copied()
    }

    /// By its id, else by an address in it.
    fn find(&self, pool: Option<Pool>, id: Option<AllocationId>, ptr: DevicePtr) -> Option<u32> {
        if let Some(slot) = id.and_then(|id| self.by_id.get(&id)) {
            return Some(*slot);
        }
        let within = |pool: &Pool| {
            let (_, slot) = self.by_ptr[*pool as usize].range(..=ptr).next_back()?;
            let block = self.get(*slot)?;
            (ptr.0 - block.ptr.0 < block.size.max(1)).then_some(*slot)
        };
        match pool {
            Some(pool) => within(&pool),
            // Pools nest: the driver's blocks are around those of the others.
            None => Pool::ALL.iter().rev().find_map(within),
        }
    }

    fn remove(&mut self, pool: Pool, slot: u32) -> Option<Block> {
        let block = self.slots.get_mut(slot as usize)?.take()?;
        self.vacant.push(slot);
        if let Some(id) = block.id
            && self.by_id.get(&id) == Some(&slot)
        {
            self.by_id.remove(&id);
        }
        let by_ptr = &mut self.by_ptr[pool as usize];
        if by_ptr.get(&block.ptr) == Some(&slot) {
            by_ptr.remove(&block.ptr);
        }
        Some(block)
    }
}

/// The ends of the time for which a block was held for nothing.
struct Span {
    from: At,
    to: At,
    call_between: Option<u64>,
}

impl Process {
    pub fn new(tgid: Tgid, config: &Config) -> Self {
        Process {
            tgid,
            config: config.clone(),
            calls: [0; POOLS],
            operators: 0,
            last_alloc: [0; POOLS],
            last_free: [0; POOLS],
            threads: FxHashMap::default(),
            regions: Vec::new(),
            blocks: Blocks::default(),
            initialising: FxHashMap::default(),
            now: Nanos(0),
        }
    }

    pub fn begin_operator(&mut self, tid: Tid, name: &Name) {
        self.end_operator(tid);
        self.operators += 1;
        self.calls.iter_mut().for_each(|calls| *calls += 1);
        let thread = self.threads.entry(tid).or_default();
        thread.op = Some(name.clone());
        thread.ended = None;
        thread.open = Some(Operator {
            number: self.operators,
            calls: self.calls,
            allocated: [false; POOLS],
            freed: [false; POOLS],
        });
    }

    pub fn end_operator(&mut self, tid: Tid) {
        let Some(thread) = self.threads.get_mut(&tid) else { return };
        let Some(operator) = thread.open.take() else { return };
        for pool in 0..POOLS {
            if operator.allocated[pool] {
                self.last_alloc[pool] = self.last_alloc[pool].max(operator.calls[pool]);
            }
            if operator.freed[pool] {
                self.last_free[pool] = self.last_free[pool].max(operator.calls[pool]);
            }
        }
        thread.ended = Some(operator);
    }

    /// The call that an event on this pool belongs to.
    fn at(&mut self, pool: Pool, tid: Tid, access_by: Option<&Name>) -> At {
        let time = self.now;
        let thread = self.threads.entry(tid).or_default();
        if access_by.is_none() || access_by != thread.op.as_ref() {
            thread.ended = None;
        }
        let operator = thread.open.or(thread.ended);
        match operator {
            Some(operator) => At {
                call: operator.calls[pool as usize],
                before: operator.number - 1,
                operators: operator.number,
                time,
                stamp: None,
            },
            None => {
                self.calls[pool as usize] += 1;
                let call = self.calls[pool as usize];
                At { call, before: self.operators, operators: self.operators, time, stamp: None }
            }
        }
    }

    pub fn alloc(&mut self, allocation: Allocation, tid: Tid) {
        let Allocation { pool, device, id, ptr, size, place, caller } = allocation;
        // The free of what was there has not been seen.
        if let Some(slot) = self.blocks.by_ptr[pool as usize].get(&ptr).copied() {
            self.forget(slot);
        }
        let at = self.at(pool, tid, None);
        let thread = self.threads.entry(tid).or_default();
        let op = thread.op.clone();
        let in_operator = thread.open.is_some();
        match &mut thread.open {
            Some(operator) => operator.allocated[pool as usize] = true,
            None => self.last_alloc[pool as usize] = self.last_alloc[pool as usize].max(at.call),
        }

        let region_index = self.region(pool, device);
        let region = &mut self.regions[region_index as usize];
        let at = at.stamped(region.timeline.next());
        region.blocks += 1;
        let site = region.site((place, caller, op));
        self.blocks.last_number += 1;
        let mut block = Block {
            number: self.blocks.last_number,
            region: region_index,
            site,
            id,
            ptr,
            size,
            alloc: at,
            used: None,
            accessed: false,
            begun: false,
            initialised: None,
            is_segment: false,
            since_alloc: Marks::NONE,
            since_access: Marks::NONE,
        };
        if size >= self.config.min_bytes {
            region.mark_alloc(&mut block, &self.config);
            if matches!(self.config.rules, Rules::Memscope { .. }) && !in_operator {
                block.used = Some(at);
                block.since_access = region.mark(site, SINCE_ACCESS, &self.config);
            }
        }
        region.timeline.add(size);
        self.blocks.insert(pool, block);
        // msMemScope makes no such difference.
        if matches!(self.config.rules, Rules::Drgpum { .. })
            && pool != Pool::Hal
            && let Some(slot) = self.blocks.find(Some(Pool::Hal), None, ptr)
            && let Some(around) = self.blocks.get_mut(slot)
        {
            around.is_segment = true;
        }
    }

    pub fn access(
        &mut self,
        access: &Access,
        id: Option<AllocationId>,
        tid: Tid,
        found: &mut dyn FnMut(&Finding),
    ) {
        let slot = self.blocks.find(access.pool, id, access.ptr);
        let known = slot.and_then(|slot| self.blocks.get(slot));
        let pool = known.map(|block| self.regions[block.region as usize].pool).or(access.pool);
        let Some(pool) = pool else { return };
        let at = self.at(pool, tid, access.op.as_ref());
        let initialises = access.kind == AccessKind::Write
            && matches!(self.config.rules, Rules::Drgpum { .. })
            && self.initialises(access.op.as_ref());
        let Some(block) = slot.and_then(|slot| self.blocks.get_mut(slot)) else { return };
        let region = &mut self.regions[block.region as usize];
        region.accesses += 1;
        if block.size < self.config.min_bytes {
            return;
        }
        let mut judge = Judge { tgid: self.tgid, config: &self.config, region, found };
        let at = at.stamped(judge.region.timeline.now());
        judge.access(block, at, self.last_free[pool as usize]);
        if matches!(self.config.rules, Rules::Drgpum { .. }) {
            judge.write(block, access, at, initialises);
        }
    }

    pub fn free(
        &mut self,
        pool: Pool,
        id: Option<AllocationId>,
        ptr: DevicePtr,
        tid: Tid,
        found: &mut dyn FnMut(&Finding),
    ) {
        let at = self.at(pool, tid, None);
        let last_alloc = self.last_alloc[pool as usize];
        match &mut self.threads.entry(tid).or_default().open {
            Some(operator) => operator.freed[pool as usize] = true,
            None => self.last_free[pool as usize] = self.last_free[pool as usize].max(at.call),
        }
        let Some(block) = self.blocks.find_exactly(pool, id, ptr).and_then(|slot| self.remove(slot)) else {
            return;
        };
        let region = &mut self.regions[block.region as usize];
        region.timeline.remove(block.size);
        if block.size >= self.config.min_bytes {
            let mut judge = Judge { tgid: self.tgid, config: &self.config, region, found };
            let at = at.stamped(judge.region.timeline.now());
            judge.free(block, at, last_alloc);
        }
    }

    /// The block was there until its process or its device was given up.
    pub fn never_freed(
        &mut self,
        pool: Pool,
        id: Option<AllocationId>,
        ptr: DevicePtr,
        found: &mut dyn FnMut(&Finding),
    ) {
        if let Some(slot) = self.blocks.find_exactly(pool, id, ptr) {
            self.end_block(slot, found);
        }
    }

    /// Judges the blocks that are left.
    pub fn end(&mut self, found: &mut dyn FnMut(&Finding)) {
        let mut left: Vec<(u64, u32)> = self
            .blocks
            .slots
            .iter()
            .enumerate()
            .filter_map(|(slot, block)| block.as_ref().map(|block| (block.number, slot as u32)))
            .collect();
        left.sort_unstable();
        for (_, slot) in left {
            self.end_block(slot, found);
        }
    }

    fn end_block(&mut self, slot: u32, found: &mut dyn FnMut(&Finding)) {
        let Some(block) = self.remove(slot) else { return };
        let region = &mut self.regions[block.region as usize];
        let call = self.calls[region.pool as usize];
        let (before, operators, time) = (self.operators, self.operators, self.now);
        region.timeline.remove(block.size);
        if block.size >= self.config.min_bytes {
            let at = At { call, before, operators, time, stamp: Some(region.timeline.now()) };
            let mut judge = Judge { tgid: self.tgid, config: &self.config, region, found };
            judge.end(block, at);
        }
    }

    fn remove(&mut self, slot: u32) -> Option<Block> {
        let pool = self.regions[self.blocks.get(slot)?.region as usize].pool;
        self.blocks.remove(pool, slot)
    }

    fn forget(&mut self, slot: u32) {
        if let Some(mut block) = self.remove(slot) {
            let region = &mut self.regions[block.region as usize];
            region.timeline.remove(block.size);
            region.release_all(&mut block);
        }
    }

    fn region(&mut self, pool: Pool, device: Option<DeviceId>) -> u32 {
        let known = self.regions.iter().position(|region| region.pool == pool && region.device == device);
        let at = known.unwrap_or_else(|| {
            self.regions.push(Region {
                pool,
                device,
                timeline: Timeline::default(),
                without: Profile::default(),
                blocks: 0,
                accesses: 0,
                sites: Vec::new(),
                by_origin: FxHashMap::default(),
                reusable: FxHashMap::default(),
            });
            self.regions.len() - 1
        });
        at as u32
    }

    /// Whether the operator writes all of a block whatever was in it.
    fn initialises(&mut self, op: Option<&Name>) -> bool {
        let Some(op) = op else { return false };
        if let Some(known) = self.initialising.get(op) {
            return *known;
        }
        let lower = op.to_ascii_lowercase();
        let does = ["zero", "fill", "copy", "inplaceone", "ones", "memset", "memcpy"]
            .iter()
            .any(|word| lower.contains(word));
        if self.initialising.len() < SITES_MAX {
            self.initialising.insert(op.clone(), does);
        }
        does
    }

    pub fn report(&self) -> impl Iterator<Item = PoolReport> {
        let accessed = self.regions.iter().filter(|region| region.accesses > 0);
        accessed.map(|region| region.report(self.tgid, self.operators))
    }
}

#[cfg(test)]
impl Process {
    /// Spans of all profiles.
    pub fn spans(&self) -> usize {
        let of_sites = |region: &Region| -> usize {
            region.sites.iter().flat_map(|site| &site.groups).map(|tally| tally.profile.len()).sum()
        };
        self.regions.iter().map(|region| region.without.len() + of_sites(region)).sum()
    }
}

impl Region {
    fn site(&mut self, origin: Origin) -> u32 {
        if let Some(site) = self.by_origin.get(&origin) {
            return *site;
        }
        let origin = if self.sites.len() < SITES_MAX { origin } else { Origin::default() };
        if let Some(site) = self.by_origin.get(&origin) {
            return *site;
        }
        let site = self.sites.len() as u32;
        self.sites.push(Site { origin: origin.clone(), groups: Default::default() });
        self.by_origin.insert(origin, site);
        site
    }

    /// Marks this moment for each of the patterns that is looked for.
    fn mark<const N: usize>(&mut self, site: u32, patterns: [Pattern; N], config: &Config) -> Marks<N> {
        let Region { timeline, without, sites, .. } = self;
        let groups = &mut sites[site as usize].groups;
        let mut marks = Marks::NONE;
        for (mark, pattern) in marks.of_site.iter_mut().zip(patterns) {
            if config.looks_for(pattern) {
                *mark = Some(groups[pattern as usize].profile.mark(timeline));
                marks.of_region.get_or_insert_with(|| without.mark(timeline));
            }
        }
        marks
    }

    fn release<const N: usize>(&mut self, site: u32, patterns: [Pattern; N], marks: Marks<N>) {
        let groups = &mut self.sites[site as usize].groups;
        for (mark, pattern) in marks.of_site.into_iter().zip(patterns) {
            if let Some(mark) = mark {
                groups[pattern as usize].profile.release(mark);
            }
        }
        if let Some(mark) = marks.of_region {
            self.without.release(mark);
        }
    }

    fn release_all(&mut self, block: &mut Block) {
        self.release(block.site, SINCE_ALLOC, block.since_alloc.take());
        self.release(block.site, SINCE_ACCESS, block.since_access.take());
    }

    fn mark_alloc(&mut self, block: &mut Block, config: &Config) {
        block.since_alloc = self.mark(block.site, SINCE_ALLOC, config);
        let Region { timeline, sites, reusable, .. } = self;
        if !config.looks_for(Pattern::RedundantAllocation) {
            return;
        }
        if reusable.len() >= SIZES_MAX && !reusable.contains_key(&block.size) {
            return;
        }
        let alike = reusable.entry(block.size).or_default();
        if alike.len() == REUSABLE_MAX
            && let Some(oldest) = alike.pop_front()
        {
            oldest.release(sites);
        }
        let group = &mut sites[block.site as usize].groups[Pattern::RedundantAllocation as usize];
        alike.push_back(Reusable {
            number: block.number,
            id: block.id,
            ptr: block.ptr,
            site: block.site,
            alloc: block.alloc,
            allocated: group.profile.mark(timeline),
            freed: None,
        });
    }

    fn report(&self, pid: Tgid, operators: u64) -> PoolReport {
        let peak_bytes = self.timeline.peak();
        let mut groups: Vec<Group> = self
            .sites
            .iter()
            .flat_map(|site| {
                site.groups.iter().zip(Pattern::ALL).map(move |(group, pattern)| (site, pattern, group))
            })
            .filter(|(.., tally)| tally.findings > 0)
            .map(|(site, pattern, tally)| {
                let peak_without = tally.profile.peak(&self.timeline);
                let (operators_min, operators_max) = tally.operators.unwrap_or_default();
                Group {
                    pattern,
                    op: site.origin.2.clone(),
                    place: site.origin.0.clone(),
                    caller: site.origin.1.clone(),
                    findings: tally.findings,
                    largest: tally.largest,
                    operators_min,
                    operators_max,
                    wasted: tally.wasted,
                    peak_without,
                    saved_at_peak: peak_bytes.saturating_sub(peak_without),
                    examples: tally
                        .examples
                        .iter()
                        .map(|(finding, stretch)| self.example(finding, *stretch))
                        .collect(),
                }
            })
            .collect();
        groups.sort_by(|a, b| {
            let key = |group: &Group| (Reverse(group.saved_at_peak), Reverse(group.wasted), group.pattern);
            key(a).cmp(&key(b)).then_with(|| (&a.op, &a.place, &a.caller).cmp(&(&b.op, &b.place, &b.caller)))
        });
        PoolReport {
            pid,
            pool: self.pool,
            device: self.device,
            operators,
            blocks: self.blocks,
            accesses: self.accesses,
            peak_bytes,
            peak_without: self.without.peak(&self.timeline),
            groups,
        }
    }
}

impl Region {
    /// A finding with the peak as it would be without it.
    fn example(&self, finding: &Finding, stretch: Option<Stretch>) -> Finding {
        let peak_without = stretch.map(|stretch| self.timeline.peak_without(stretch, finding.size));
        Finding { peak_without, ..finding.clone() }
    }

    fn stretch(&self, from: At, to: At) -> Option<Stretch> {
        Some(self.timeline.stretch(from.stamp?, to.stamp?))
    }
}

impl Reusable {
    fn release(self, sites: &mut [Site]) {
        let profile = &mut sites[self.site as usize].groups[Pattern::RedundantAllocation as usize].profile;
        profile.release(self.allocated);
        if let Some((mark, ..)) = self.freed {
            profile.release(mark);
        }
    }
}

/// The rules, applied to one event of a block.
struct Judge<'a> {
    tgid: Tgid,
    config: &'a Config,
    region: &'a mut Region,
    found: &'a mut dyn FnMut(&Finding),
}

impl Judge<'_> {
    fn access(&mut self, block: &mut Block, at: At, last_free: u64) {
        // First of all: what is found to be wasted until now does not reach past this mark.
        let now = self.region.mark(block.site, SINCE_ACCESS, self.config);
        if let Some(used) = block.used {
            let idle = match self.config.rules {
                Rules::Memscope { idle } => at.call.saturating_sub(used.call) > idle,
                Rules::Drgpum { idle, .. } => operators_between(used, at) >= idle.max(1),
            };
            if idle {
                self.since_access(
                    block,
                    Pattern::TemporaryIdleness,
                    Span { from: used, to: at, call_between: None },
                );
            }
        }
        if !block.begun {
            let early = match self.config.rules {
                // The allocating call's own accesses do not count.
                Rules::Memscope { .. } if at.call == block.alloc.call => None,
                Rules::Memscope { .. } => {
                    block.begun = true;
                    (block.alloc.call < last_free && last_free < at.call).then_some(Some(last_free))
                }
                Rules::Drgpum { early, .. } => {
                    block.begun = true;
                    (operators_between(block.alloc, at) >= early.max(1)).then_some(None)
                }
            };
            if let Some(call_between) = early {
                let span = Span { from: block.alloc, to: at, call_between };
                self.since_alloc(block, Pattern::EarlyAllocation, span);
            }
            if block.begun {
                self.region.release(block.site, SINCE_ALLOC, block.since_alloc.take());
            }
        }
        block.used = Some(at);
        block.accessed = true;
        self.region.release(block.site, SINCE_ACCESS, std::mem::replace(&mut block.since_access, now));
    }

    fn write(&mut self, block: &mut Block, access: &Access, at: At, initialises: bool) {
        let written = (access.ptr, access.size);
        if let Some((ptr, size, first)) = block.initialised
            && initialises
            && written == (ptr, size)
            && first.call != at.call
            && self.config.looks_for(Pattern::DeadWrite)
        {
            self.tell(block, Pattern::DeadWrite, Span { from: first, to: at, call_between: None });
        }
        block.initialised = initialises.then_some((access.ptr, access.size, at));
    }

    fn free(&mut self, mut block: Block, at: At, last_alloc: u64) {
        match block.used {
            // Without any access to its pool, not having seen one says nothing.
            _ if self.region.accesses == 0 => {}
            Some(used) => {
                let late = match self.config.rules {
                    Rules::Memscope { .. } => {
                        (used.call < last_alloc && last_alloc < at.call).then_some(Some(last_alloc))
                    }
                    Rules::Drgpum { late, .. } => {
                        (operators_between(used, at) >= late.max(1)).then_some(None)
                    }
                };
                if let Some(call_between) = late {
                    let span = Span { from: used, to: at, call_between };
                    self.since_access(&block, Pattern::LateDeallocation, span);
                }
                if !block.is_segment {
                    self.reuse(&block, used, at);
                }
            }
            None => self.unused(&block, at),
        }
        self.leave(&mut block, at);
    }

    fn end(&mut self, mut block: Block, at: At) {
        match block.used {
            _ if self.region.accesses == 0 => {}
            // In use when the trace ended, it is none.
            Some(from) if operators_between(from, at) == 0 => {}
            Some(from) => {
                self.since_access(&block, Pattern::Leak, Span { from, to: at, call_between: None });
            }
            None => self.unused(&block, at),
        }
        self.leave(&mut block, at);
    }

    fn unused(&mut self, block: &Block, at: At) {
        let span = Span { from: block.alloc, to: at, call_between: None };
        self.since_alloc(block, Pattern::UnusedAllocation, span);
    }

    /// Looks for a block that was allocated when this one was done with.
    fn reuse(&mut self, block: &Block, used: At, at: At) {
        let Region { reusable, sites, timeline, .. } = &mut *self.region;
        let Some(alike) = reusable.get_mut(&block.size) else { return };
        let Some(found) = alike.iter().position(|other| other.alloc.call > used.call) else { return };
        let Some(other) = alike.remove(found) else { return };
        let profile = &mut sites[other.site as usize].groups[Pattern::RedundantAllocation as usize].profile;
        profile.waste(other.allocated, block.size, timeline);
        let (mut to, mut stretch) =
            (at, other.alloc.stamp.zip(at.stamp).map(|(from, to)| timeline.stretch(from, to)));
        if let Some((freed, when, whole)) = other.freed {
            profile.restore(freed, block.size, timeline);
            (to, stretch) = (when, whole);
        }
        let finding = Finding {
            pattern: Pattern::RedundantAllocation,
            pid: self.tgid,
            pool: self.region.pool,
            device: self.region.device,
            allocation_id: other.id,
            ptr: other.ptr,
            size: block.size,
            op: None,
            place: None,
            caller: None,
            from: other.alloc.moment(),
            to: to.moment(),
            from_allocation: true,
            call_between: None,
            operators: operators_between(other.alloc, to),
            wasted: 0,
            instead_of: block.id,
            peak_without: None,
        };
        let site = other.site;
        other.release(&mut self.region.sites);
        self.report(site, finding, stretch);
    }

    /// The block is no longer: its marks go, but for what may yet prove redundant.
    fn leave(&mut self, block: &mut Block, at: At) {
        self.region.release_all(block);
        let Region { reusable, sites, timeline, .. } = &mut *self.region;
        if let Some(alike) = reusable.get_mut(&block.size)
            && let Some(own) = alike.iter_mut().find(|own| own.number == block.number)
        {
            let group = &mut sites[own.site as usize].groups[Pattern::RedundantAllocation as usize];
            let whole = own.alloc.stamp.zip(at.stamp).map(|(from, to)| timeline.stretch(from, to));
            own.freed = Some((group.profile.mark(timeline), at, whole));
        }
    }

    fn since_alloc(&mut self, block: &Block, pattern: Pattern, span: Span) {
        self.waste(block, pattern, span, SINCE_ALLOC, block.since_alloc);
    }

    fn since_access(&mut self, block: &Block, pattern: Pattern, span: Span) {
        self.waste(block, pattern, span, SINCE_ACCESS, block.since_access);
    }

    fn waste<const N: usize>(
        &mut self,
        block: &Block,
        pattern: Pattern,
        span: Span,
        patterns: [Pattern; N],
        marks: Marks<N>,
    ) {
        let mark = patterns.iter().position(|known| *known == pattern).and_then(|at| marks.of_site[at]);
        // No mark: the pattern is not looked for.
        let (Some(mark), Some(of_region), false) = (mark, marks.of_region, block.is_segment) else { return };
        let Region { timeline, sites, without, .. } = &mut *self.region;
        sites[block.site as usize].groups[pattern as usize].profile.waste(mark, block.size, timeline);
        without.waste(of_region, block.size, timeline);
        self.tell(block, pattern, span);
    }

    fn tell(&mut self, block: &Block, pattern: Pattern, span: Span) {
        let Span { from, to, call_between } = span;
        let finding = Finding {
            pattern,
            pid: self.tgid,
            pool: self.region.pool,
            device: self.region.device,
            allocation_id: block.id,
            ptr: block.ptr,
            size: block.size,
            op: None,
            place: None,
            caller: None,
            from: from.moment(),
            to: to.moment(),
            from_allocation: pattern == Pattern::EarlyAllocation || !block.accessed,
            call_between,
            operators: operators_between(from, to),
            wasted: 0,
            instead_of: None,
            peak_without: None,
        };
        let stretch = self.region.stretch(from, to).filter(|_| pattern != Pattern::DeadWrite);
        self.report(block.site, finding, stretch);
    }

    fn report(&mut self, site: u32, mut finding: Finding, stretch: Option<Stretch>) {
        let site = &mut self.region.sites[site as usize];
        (finding.place, finding.caller, finding.op) = site.origin.clone();
        finding.wasted = finding.size.saturating_mul(finding.operators);
        (self.found)(&finding);
        let group = &mut site.groups[finding.pattern as usize];
        group.findings += 1;
        group.largest = group.largest.max(finding.size);
        group.wasted = group.wasted.saturating_add(finding.wasted);
        let (min, max) = group.operators.unwrap_or((finding.operators, finding.operators));
        group.operators = Some((min.min(finding.operators), max.max(finding.operators)));
        let cost = |finding: &Finding| Reverse((finding.wasted, finding.size));
        let place = group.examples.partition_point(|(known, _)| cost(known) <= cost(&finding));
        if place < EXAMPLES {
            group.examples.truncate(EXAMPLES - 1);
            group.examples.insert(place, (finding, stretch));
        }
    }
}
