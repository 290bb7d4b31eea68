//! What changed, and whose it is: per operator and per owner what it allocated and freed and how much of the peak it
//! held, and which blocks one side has and the other has not, by the line of the program and by size and operator.
//!
//! A process counts until it tells CANN that it has finished: what it frees after that is tidied up.
//!
//! A [`Profiler`] reads a dump once and profiles one or two parts of it: the whole, or a step. [`difference`] compares
//! two profiles, of one dump or of two.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use rustc_hash::FxHashMap;
use serde::Serialize;

use super::lines;
use crate::dump::Row;
use crate::dump::read::NumberedRow;
use crate::model::{
    AllocationId, Block, Change, Count, DeviceId, EventKind, Frame, Ledger, Module, Name, Pool, Process,
    StepId, StepRule, StepsFrom, Tgid,
};
use crate::report::units;

/// Groups of like blocks told apart by size. Beyond, blocks of all sizes of an operator are one group, so that memory
/// stays bounded when no two blocks are alike.
const GROUPS_BY_SIZE: usize = 1 << 17;

/// A part of a dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    Whole,
    /// That step of every process: from its beginning to the beginning of the next.
    Step(StepId),
}

/// Pools lie in the driver's memory: their bytes must not be added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Layer {
    /// What frameworks hand out.
    Pools,
    /// What the driver hands out.
    Driver,
    Host,
}

impl From<Pool> for Layer {
    fn from(pool: Pool) -> Self {
        match pool {
            Pool::Hal => Layer::Driver,
            Pool::Host => Layer::Host,
            Pool::Pta | Pool::PtaWorkspace | Pool::Atb | Pool::Mindspore => Layer::Pools,
        }
    }
}

/// Memory of one device at one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Memory {
    pub layer: Layer,
    /// `None`: host memory, and what could not be placed.
    pub device: Option<DeviceId>,
}

/// What one side did with one memory.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Use {
    /// Times an operator ran.
    pub calls: u64,
    pub allocated: Count,
    pub freed: Count,
    /// Bytes that were allocated by it, then or before, and alive when the memory was fullest.
    pub at_peak: u64,
}

impl Use {
    /// Bytes by which it made the memory fuller.
    pub fn net(&self) -> i64 {
        signed(self.allocated.bytes).saturating_sub(signed(self.freed.bytes))
    }
}

/// What became of the blocks that one side allocated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Fates {
    pub allocated: Count,
    /// Of these, not freed before the side ended.
    pub kept: Count,
    /// Of these, not freed at all.
    pub never_freed: Count,
}

impl Fates {
    fn add(&mut self, other: Fates) {
        for (count, more) in [
            (&mut self.allocated, other.allocated),
            (&mut self.kept, other.kept),
            (&mut self.never_freed, other.never_freed),
        ] {
            count.blocks += more.blocks;
            count.bytes = count.bytes.saturating_add(more.bytes);
        }
    }
}

/// Blocks that are alike.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct Like {
    pub pool: Pool,
    /// The operator in progress when they were allocated, else the last one before; `None`: none, or several.
    pub op: Option<Name>,
    /// Bytes of each; `None`: of several sizes.
    pub size: Option<u64>,
}

/// Blocks that are alike, by the line of the program that allocated them, where that is known.
type Group = (Like, Option<Frame>);

#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    pub side: Side,
    memories: BTreeMap<Memory, MemoryProfile>,
}

#[derive(Debug, Clone, Default, PartialEq)]
struct MemoryProfile {
    /// Of all operators; `at_peak` is the peak itself.
    total: Use,
    ops: FxHashMap<Option<Name>, Use>,
    owners: FxHashMap<Name, Use>,
    blocks: FxHashMap<Group, Fates>,
}

/// Profiles parts of a dump. Takes its rows in order of time.
#[derive(Debug)]
pub struct Profiler {
    ledger: Ledger,
    sides: Vec<ProfiledSide>,
    memories: FxHashMap<Memory, u32>,
    /// Bytes alive in each memory.
    live: Vec<u64>,
    labels: FxHashMap<(u32, Label), u32>,
    accounts: Vec<Account>,
    groups: FxHashMap<(u32, Group), u32>,
    blocks: FxHashMap<(Tgid, AllocationId), Tracked>,
}

#[derive(Debug)]
struct ProfiledSide {
    side: Side,
    /// For each memory.
    totals: Vec<Totals>,
    /// For each account.
    uses: Vec<SideUse>,
    /// For each group.
    fates: Vec<Fates>,
}

#[derive(Debug, Clone, Default)]
struct Totals {
    allocated: Count,
    freed: Count,
    peak: u64,
    /// Counts the peaks: what accounts remember is of the last one.
    peaks: u64,
}

/// Who bytes are counted for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Label {
    Op(Option<Name>),
    Owner(Name),
}

#[derive(Debug)]
struct Account {
    memory: u32,
    label: Label,
    live: u64,
}

#[derive(Debug, Clone, Default)]
struct SideUse {
    calls: u64,
    allocated: Count,
    freed: Count,
    /// Growth since the peak of this number: so that a new peak costs nothing to note.
    growth: i64,
    since_peak: u64,
}

#[derive(Debug, Clone, Copy)]
struct Tracked {
    memory: u32,
    op: u32,
    owner: u32,
    group: u32,
    size: u64,
    /// Whether each side allocated it.
    of_side: [bool; 2],
}

impl ProfiledSide {
    fn allocated(&mut self, by: &Tracked, count: Count) {
        let add = |to: &mut Count| {
            to.blocks += count.blocks;
            to.bytes = to.bytes.saturating_add(count.bytes);
        };
        add(&mut self.totals[by.memory as usize].allocated);
        add(&mut self.uses[by.op as usize].allocated);
        add(&mut self.uses[by.owner as usize].allocated);
        let Fates { allocated, kept, never_freed } = &mut self.fates[by.group as usize];
        [allocated, kept, never_freed].into_iter().for_each(add);
    }
}

impl Profiler {
    /// Profiles up to two parts.
    pub fn new(rule: StepRule, sides: [Option<Side>; 2]) -> Self {
        let sides = sides.into_iter().flatten();
        let new = |side| ProfiledSide { side, totals: Vec::new(), uses: Vec::new(), fates: Vec::new() };
        Profiler {
            ledger: Ledger::new(rule),
            sides: sides.map(new).collect(),
            memories: FxHashMap::default(),
            live: Vec::new(),
            labels: FxHashMap::default(),
            accounts: Vec::new(),
            groups: FxHashMap::default(),
            blocks: FxHashMap::default(),
        }
    }

    /// Counts other steps than those that are marked, or inferred and put between the rows.
    pub fn with_steps_from(self, from: StepsFrom) -> Self {
        Profiler { ledger: self.ledger.with_steps_from(from), ..self }
    }

    /// The last step of the process that has most; 0: none has any.
    pub fn last_step(&self) -> StepId {
        let last = self.ledger.processes().iter().map(|process| process.steps().current());
        last.max().unwrap_or_default()
    }

    pub fn observe(&mut self, numbered: &NumberedRow) {
        let row = &numbered.row;
        let Some(event) = row.event() else { return };
        let change = self.ledger.apply(&event);
        if self.ledger.process(row.tgid).is_some_and(Process::finalized) {
            return self.tidy_up(row.tgid, &change);
        }
        if let EventKind::Op { name } = &event.kind {
            let memory = self.memory(Memory { layer: Layer::Pools, device: row.device });
            let account = self.account(memory, Label::Op(Some(name.clone())));
            for side in self.active(row.tgid) {
                self.sides[side].uses[account as usize].calls += 1;
            }
            return;
        }
        match change {
            Change::Allocated { block, replaced } => {
                if let Some(replaced) = replaced {
                    self.end(row.tgid, &replaced, None);
                }
                let process = self.ledger.process(row.tgid);
                if let Some(block) = process.and_then(|process| process.block(block)).cloned() {
                    self.begin(row, &block);
                }
            }
            Change::Reported(block) => {
                let process = self.ledger.process(row.tgid);
                if let Some(block) = process.and_then(|process| process.block(block)) {
                    let (id, size) = (block.id, block.size);
                    self.resize(row.tgid, id, size);
                }
            }
            Change::Freed(block) => {
                let process = self.ledger.process(row.tgid);
                let op = process.and_then(|process| process.current_op(row.tid)).cloned();
                self.end(row.tgid, &block, Some(op));
            }
            Change::Reset { blocks, .. } | Change::Ended { blocks, .. } => {
                blocks.iter().for_each(|block| self.end(row.tgid, block, None));
            }
            // A step is as full as it begins, even when nothing happens in it.
            Change::Step { .. } => {
                (0..self.live.len() as u32).for_each(|memory| self.note_peak(row.tgid, memory));
            }
            _ => {}
        }
    }

    /// Blocks of a process that has finished: gone, and freed by nobody.
    fn tidy_up(&mut self, tgid: Tgid, change: &Change) {
        match change {
            Change::Freed(block) => self.end(tgid, block, None),
            Change::Reset { blocks, .. } | Change::Ended { blocks, .. } => {
                blocks.iter().for_each(|block| self.end(tgid, block, None));
            }
            _ => {}
        }
    }

    /// The sides that what a process does now belongs to.
    fn active(&self, tgid: Tgid) -> impl Iterator<Item = usize> + use<> {
        let step = self.ledger.process(tgid).map(|process| process.steps().current());
        let mut active = [false; 2];
        for (active, side) in active.iter_mut().zip(&self.sides) {
            *active = match side.side {
                Side::Whole => true,
                Side::Step(which) => step == Some(which),
            };
        }
        (0..active.len()).filter(move |side| active[*side])
    }

    fn begin(&mut self, row: &Row, block: &Block) {
        let memory = self.memory(Memory { layer: block.pool.into(), device: block.device });
        let op = self.account(memory, Label::Op(block.op.clone()));
        let owner = self.account(memory, Label::Owner(owner_of(row, block)));
        let group = self.group(memory, block);
        let mut tracked = Tracked { memory, op, owner, group, size: block.size, of_side: [false; 2] };
        for side in self.active(row.tgid) {
            tracked.of_side[side] = true;
            self.sides[side].allocated(&tracked, Count { blocks: 1, bytes: block.size });
        }
        self.blocks.insert((row.tgid, block.id), tracked);
        self.grow(memory, [op, owner], signed(block.size));
        self.note_peak(row.tgid, memory);
    }

    /// A block that was reported again, and is larger than it was said to be.
    fn resize(&mut self, tgid: Tgid, id: AllocationId, size: u64) {
        let Some(tracked) = self.blocks.get_mut(&(tgid, id)) else { return };
        let bytes = size.saturating_sub(tracked.size);
        tracked.size += bytes;
        let tracked = *tracked;
        for (side, _) in self.sides.iter_mut().zip(tracked.of_side).filter(|(_, of_side)| *of_side) {
            side.allocated(&tracked, Count { blocks: 0, bytes });
        }
        self.grow(tracked.memory, [tracked.op, tracked.owner], signed(bytes));
        self.note_peak(tgid, tracked.memory);
    }

    /// The end of a block: freed during an operator, or gone without a free of its own.
    fn end(&mut self, tgid: Tgid, block: &Block, freed_by: Option<Option<Name>>) {
        let Some(tracked) = self.blocks.remove(&(tgid, block.id)) else { return };
        let Tracked { memory, op, owner, group, size, of_side } = tracked;
        if let Some(by) = freed_by {
            let by = self.account(memory, Label::Op(by));
            let mut active = [false; 2];
            for side in self.active(tgid) {
                active[side] = true;
                let ProfiledSide { totals, uses, .. } = &mut self.sides[side];
                totals[memory as usize].freed.add(size);
                uses[by as usize].freed.add(size);
                uses[owner as usize].freed.add(size);
            }
            for ((side, of_side), active) in self.sides.iter_mut().zip(of_side).zip(active) {
                let fates = &mut side.fates[group as usize];
                if of_side {
                    take(&mut fates.never_freed, size);
                }
                if of_side && active {
                    take(&mut fates.kept, size);
                }
            }
        }
        self.grow(memory, [op, owner], signed(size).saturating_neg());
    }

    /// Changes the live bytes of a memory, and of two accounts of it.
    fn grow(&mut self, memory: u32, accounts: [u32; 2], growth: i64) {
        let live = &mut self.live[memory as usize];
        *live = live.saturating_add_signed(growth);
        for account in accounts {
            let live = &mut self.accounts[account as usize].live;
            *live = live.saturating_add_signed(growth);
            for side in &mut self.sides {
                let peaks = side.totals[memory as usize].peaks;
                let of_side = &mut side.uses[account as usize];
                if of_side.since_peak != peaks {
                    (of_side.growth, of_side.since_peak) = (0, peaks);
                }
                of_side.growth = of_side.growth.saturating_add(growth);
            }
        }
    }

    /// Sees whether a memory is now fuller than it was on the sides that the process is on.
    fn note_peak(&mut self, tgid: Tgid, memory: u32) {
        let live = self.live[memory as usize];
        for side in self.active(tgid) {
            let totals = &mut self.sides[side].totals[memory as usize];
            if live > totals.peak {
                totals.peak = live;
                totals.peaks += 1;
            }
        }
    }

    fn memory(&mut self, memory: Memory) -> u32 {
        let next = self.live.len() as u32;
        let number = *self.memories.entry(memory).or_insert(next);
        if number == next {
            self.live.push(0);
            self.sides.iter_mut().for_each(|side| side.totals.push(Totals::default()));
        }
        number
    }

    fn account(&mut self, memory: u32, label: Label) -> u32 {
        let next = self.accounts.len() as u32;
        let number = *self.labels.entry((memory, label.clone())).or_insert(next);
        if number == next {
            self.accounts.push(Account { memory, label, live: 0 });
            self.sides.iter_mut().for_each(|side| side.uses.push(SideUse::default()));
        }
        number
    }

    fn group(&mut self, memory: u32, block: &Block) -> u32 {
        let place = block.place();
        let like = |size| (memory, (Like { pool: block.pool, op: block.op.clone(), size }, place.cloned()));
        let next = self.groups.len() as u32;
        let exact = like(Some(block.size));
        let key = match self.groups.contains_key(&exact) || self.groups.len() < GROUPS_BY_SIZE {
            true => exact,
            false => like(None),
        };
        let number = *self.groups.entry(key).or_insert(next);
        if number == next {
            self.sides.iter_mut().for_each(|side| side.fates.push(Fates::default()));
        }
        number
    }

    /// The profiles, in the order in which they were asked for.
    pub fn finish(self) -> Vec<Profile> {
        let memories: FxHashMap<u32, Memory> =
            self.memories.iter().map(|(memory, number)| (*number, *memory)).collect();
        let profile = |side: &ProfiledSide| {
            let mut of_memory: BTreeMap<Memory, MemoryProfile> = BTreeMap::new();
            for (number, totals) in side.totals.iter().enumerate() {
                let Totals { allocated, freed, peak, .. } = totals.clone();
                if peak > 0 || freed.blocks > 0 {
                    let total = Use { calls: 0, allocated, freed, at_peak: peak };
                    let profile = MemoryProfile { total, ..MemoryProfile::default() };
                    of_memory.insert(memories[&(number as u32)], profile);
                }
            }
            for (account, of_side) in self.accounts.iter().zip(&side.uses) {
                let Some(profile) = of_memory.get_mut(&memories[&account.memory]) else { continue };
                let totals = &side.totals[account.memory as usize];
                let since_peak = if of_side.since_peak == totals.peaks { of_side.growth } else { 0 };
                let at_peak = match totals.peaks {
                    0 => 0,
                    _ => account.live.saturating_add_signed(since_peak.saturating_neg()),
                };
                let SideUse { calls, allocated, freed, .. } = of_side.clone();
                let used = Use { calls, allocated, freed, at_peak };
                if used == Use::default() {
                    continue;
                }
                match &account.label {
                    Label::Op(op) => drop(profile.ops.insert(op.clone(), used)),
                    Label::Owner(owner) => drop(profile.owners.insert(owner.clone(), used)),
                }
            }
            for ((memory, group), number) in &self.groups {
                let fates = side.fates[*number as usize];
                if let Some(profile) = of_memory.get_mut(&memories[memory])
                    && fates.allocated.blocks > 0
                {
                    profile.blocks.insert(group.clone(), fates);
                }
            }
            Profile { side: side.side, memories: of_memory }
        };
        self.sides.iter().map(profile).collect()
    }
}

fn owner_of(row: &Row, block: &Block) -> Name {
    let labels = row.owner.as_deref().map(|labels| format!("@{labels}")).unwrap_or_default();
    match block.pool {
        Pool::Hal => {
            let module = block.module().and_then(Module::name).unwrap_or("UNKNOWN");
            format!("CANN@{module}{labels}").into()
        }
        pool => format!("{pool}{labels}").into(),
    }
}

fn take(count: &mut Count, bytes: u64) {
    count.blocks = count.blocks.saturating_sub(1);
    count.bytes = count.bytes.saturating_sub(bytes);
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// What changed from one side to the other.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    pub base: Side,
    pub compare: Side,
    pub verdict: Verdict,
    pub memories: Vec<MemoryDifference>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MemoryDifference {
    #[serde(flatten)]
    pub memory: Memory,
    /// All operators together; `at_peak` is the peak.
    pub base: Use,
    pub compare: Use,
    /// By the difference of net bytes, largest first, and then of the share of the peak.
    pub ops: Vec<UseDifference>,
    pub owners: Vec<UseDifference>,
    /// Blocks of which one side has more, or keeps more, by pool, operator and size; by the bytes kept, largest difference
    /// first. Each with the line of the program where that is most of the difference.
    pub blocks: Vec<BlockDifference>,
    /// The same by pool and line of the program.
    pub lines: Vec<BlockDifference>,
}

impl MemoryDifference {
    /// The peak of `compare` less that of `base`, in bytes.
    pub fn peak_diff(&self) -> i64 {
        signed(self.compare.at_peak).saturating_sub(signed(self.base.at_peak))
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct UseDifference {
    /// `None`: before the first operator of the thread.
    pub name: Option<Name>,
    pub base: Use,
    pub compare: Use,
    /// Net bytes of `compare` less those of `base`.
    pub net_diff: i64,
    /// Bytes at the peak of `compare` less those of `base`.
    pub peak_diff: i64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BlockDifference {
    #[serde(flatten)]
    pub like: Like,
    /// The line of the program that allocated them; `None` where it is not known.
    pub place: Option<Frame>,
    pub base: Fates,
    pub compare: Fates,
    /// Bytes that `compare` keeps less those that `base` keeps.
    pub kept_diff: i64,
}

/// The difference in one line.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    pub base: Side,
    pub compare: Side,
    /// The layer it is about: pools when there are any, else the driver.
    pub layer: Layer,
    /// Net bytes of `compare` less those of `base`, over all devices.
    pub net_diff: i64,
    /// The same of the peaks.
    pub peak_diff: i64,
    pub cause: Option<Cause>,
}

/// What explains most of a difference.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// One side keeps more blocks of these.
    Kept {
        like: Like,
        place: Option<Frame>,
        blocks: u64,
        /// None of them was ever freed.
        never_freed: bool,
        /// Kept blocks of other kinds that the same side has more of.
        others: u64,
    },
    /// One side frees less of what was there before it.
    Freed { bytes: u64 },
}

/// Compares two profiles.
pub fn difference(base: &Profile, compare: &Profile) -> Difference {
    let mut keys: Vec<Memory> = base.memories.keys().chain(compare.memories.keys()).copied().collect();
    keys.sort_unstable();
    keys.dedup();
    let nothing = MemoryProfile::default();
    let of = |profile: &'_ Profile, memory: &Memory| profile.memories.get(memory).cloned();
    let memories: Vec<MemoryDifference> = keys
        .into_iter()
        .map(|memory| {
            let mut base = of(base, &memory).unwrap_or_else(|| nothing.clone());
            let compare = of(compare, &memory).unwrap_or_else(|| nothing.clone());
            base.blocks = moved(base.blocks, &compare.blocks);
            MemoryDifference {
                memory,
                ops: uses(&base.ops, &compare.ops, Clone::clone),
                owners: uses(&base.owners, &compare.owners, |owner| Some(owner.clone())),
                blocks: blocks(&base.blocks, &compare.blocks, By::Like),
                lines: blocks(&base.blocks, &compare.blocks, By::Line),
                base: base.total,
                compare: compare.total,
            }
        })
        .collect();
    let verdict = verdict(base.side, compare.side, &memories);
    Difference { base: base.side, compare: compare.side, verdict, memories }
}

fn uses<K: Eq + std::hash::Hash>(
    base: &FxHashMap<K, Use>,
    compare: &FxHashMap<K, Use>,
    name: impl Fn(&K) -> Option<Name>,
) -> Vec<UseDifference> {
    let only_compare = compare.keys().filter(|key| !base.contains_key(key));
    let of = |side: &FxHashMap<K, Use>, key: &K| side.get(key).cloned().unwrap_or_default();
    let mut differences: Vec<UseDifference> = base
        .keys()
        .chain(only_compare)
        .map(|key| {
            let (base, compare) = (of(base, key), of(compare, key));
            let net_diff = compare.net().saturating_sub(base.net());
            let peak_diff = signed(compare.at_peak).saturating_sub(signed(base.at_peak));
            UseDifference { name: name(key), base, compare, net_diff, peak_diff }
        })
        .collect();
    differences.sort_by(|a, b| {
        let size = |d: &UseDifference| (d.net_diff.unsigned_abs(), d.peak_diff.unsigned_abs());
        size(b).cmp(&size(a)).then_with(|| a.name.cmp(&b.name))
    });
    differences
}

/// Lines of the base as the other side numbers them.
fn moved(base: FxHashMap<Group, Fates>, compare: &FxHashMap<Group, Fates>) -> FxHashMap<Group, Fates> {
    let moved = lines::moved(base.keys(), compare.keys());
    if moved.is_empty() {
        return base;
    }
    let rename = |place: Frame| moved.get(&place).cloned().unwrap_or(place);
    base.into_iter().map(|((like, place), fates)| ((like, place.map(rename)), fates)).collect()
}

/// What blocks are counted by.
#[derive(Clone, Copy, PartialEq)]
enum By {
    Like,
    Line,
}

/// Some of what makes a difference, and the bytes of the largest part of it.
struct Part {
    sum: BlockDifference,
    largest: u64,
}

impl Part {
    fn add(&mut self, one: BlockDifference, by: By) {
        let Part { sum, largest } = self;
        let size = one.kept_diff.unsigned_abs();
        match by {
            By::Like if size > *largest => sum.place = one.place,
            By::Line if *largest == 0 => sum.like = one.like,
            By::Line if size > 0 => {
                sum.like.op = sum.like.op.take().filter(|op| one.like.op.as_ref() == Some(op));
                sum.like.size = sum.like.size.filter(|size| one.like.size == Some(*size));
            }
            _ => {}
        }
        *largest = size.max(*largest);
        sum.base.add(one.base);
        sum.compare.add(one.compare);
        sum.kept_diff = sum.kept_diff.saturating_add(one.kept_diff);
    }
}

fn blocks(base: &FxHashMap<Group, Fates>, compare: &FxHashMap<Group, Fates>, by: By) -> Vec<BlockDifference> {
    let only_compare = compare.keys().filter(|group| !base.contains_key(group));
    let of = |side: &FxHashMap<Group, Fates>, group: &Group| side.get(group).copied().unwrap_or_default();
    let mut keys: Vec<&Group> = base.keys().chain(only_compare).collect();
    keys.sort_unstable_by_key(|(like, place)| (like.pool, place, &like.op, like.size));
    let mut parts: BTreeMap<_, Part> = BTreeMap::new();
    for group @ (like, place) in keys {
        let (base, compare) = (of(base, group), of(compare, group));
        let kept_diff = signed(compare.kept.bytes).saturating_sub(signed(base.kept.bytes));
        let one = BlockDifference { like: like.clone(), place: place.clone(), base, compare, kept_diff };
        let key = match by {
            By::Like => (like.pool, None, Some((&like.op, like.size))),
            By::Line => (like.pool, Some(place), None),
        };
        match parts.entry(key) {
            Entry::Vacant(entry) => {
                let largest = kept_diff.unsigned_abs();
                entry.insert(Part { sum: one, largest });
            }
            Entry::Occupied(mut entry) => entry.get_mut().add(one, by),
        }
    }
    let mut differences: Vec<BlockDifference> = parts
        .into_values()
        .map(|part| part.sum)
        .filter(|d| d.base.allocated != d.compare.allocated || d.base.kept != d.compare.kept)
        .collect();
    differences.sort_by(|a, b| {
        let size = |d: &BlockDifference| {
            (d.kept_diff.unsigned_abs(), d.compare.allocated.bytes.abs_diff(d.base.allocated.bytes))
        };
        let name = |d: &BlockDifference| (d.like.op.clone(), d.like.pool, d.like.size, d.place.clone());
        size(b).cmp(&size(a)).then_with(|| name(a).cmp(&name(b)))
    });
    differences
}

fn verdict(base: Side, compare: Side, memories: &[MemoryDifference]) -> Verdict {
    let layers = [Layer::Pools, Layer::Driver, Layer::Host];
    let has = |layer: &Layer| memories.iter().any(|of| of.memory.layer == *layer);
    let layer = layers.into_iter().find(has).unwrap_or(Layer::Pools);
    let of_layer = || memories.iter().filter(|of| of.memory.layer == layer);
    let sum = |of: fn(&MemoryDifference) -> i64| of_layer().map(of).fold(0, i64::saturating_add);
    let net_diff = sum(|of| of.compare.net().saturating_sub(of.base.net()));
    let peak_diff = sum(MemoryDifference::peak_diff);
    // The side that keeps more.
    let more = |d: &BlockDifference| if net_diff > 0 { (d.compare, d.base) } else { (d.base, d.compare) };
    let blocks_more = |d: &BlockDifference| {
        let (more, less) = more(d);
        more.kept.blocks.saturating_sub(less.kept.blocks)
    };
    let towards = |d: &&BlockDifference| d.kept_diff.signum() == net_diff.signum() && net_diff != 0;
    let main_of = |by: fn(&MemoryDifference) -> &Vec<BlockDifference>| {
        of_layer().flat_map(by).filter(towards).max_by_key(|d| d.kept_diff.unsigned_abs())
    };
    // A line is one cause, whatever the sizes and operators there.
    let by: fn(&MemoryDifference) -> &Vec<BlockDifference> = match main_of(|of| &of.lines) {
        Some(main) if main.place.is_some() => |of| &of.lines,
        _ => |of| &of.blocks,
    };
    let groups = || of_layer().flat_map(by).filter(towards);
    let main = main_of(by);
    let cause = match main {
        Some(main) => {
            let blocks = blocks_more(main);
            let (fates, _) = more(main);
            Some(Cause::Kept {
                like: main.like.clone(),
                place: main.place.clone(),
                blocks,
                never_freed: fates.never_freed == fates.kept,
                others: groups().map(blocks_more).sum::<u64>() - blocks,
            })
        }
        None if net_diff != 0 => Some(Cause::Freed { bytes: net_diff.unsigned_abs() }),
        None => None,
    };
    Verdict { base, compare, layer, net_diff, peak_diff, cause }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", units::growth(self.net_diff))?;
        match (self.base, self.compare) {
            (Side::Step(base), Side::Step(compare)) => write!(f, "in step {compare} against step {base}")?,
            (Side::Whole, Side::Whole) => f.write_str("in the second dump against the first")?,
            (Side::Whole, Side::Step(compare)) => {
                write!(f, "in step {compare} against the whole first dump")?
            }
            (Side::Step(base), Side::Whole) => write!(f, "in the whole second dump against step {base}")?,
        }
        let less = if self.net_diff < 0 { " less" } else { "" };
        match &self.cause {
            Some(Cause::Kept { like, place, blocks, never_freed, others }) => {
                match *blocks {
                    // As many, of other sizes.
                    0 => {
                        f.write_str(if self.net_diff < 0 { ": smaller blocks" } else { ": larger blocks" })?
                    }
                    blocks => write!(f, ": {}{less}", units::blocks(blocks))?,
                }
                if let Some(op) = &like.op {
                    write!(f, " from {op}")?;
                }
                if let Some(place) = place {
                    write!(f, " at {}", units::place(place))?;
                }
                f.write_str(if *never_freed { ", never freed" } else { ", freed later" })?;
                if *others > 0 {
                    write!(f, ", and {} more", units::count(*others))?;
                }
            }
            Some(Cause::Freed { bytes }) => {
                let how = if self.net_diff < 0 { "more" } else { "less" };
                write!(f, ": {} {how} freed of what was there before", units::bytes(*bytes))?;
            }
            None => {}
        }
        match self.peak_diff {
            0 => Ok(()),
            diff => write!(f, "; peak {}", units::growth(diff)),
        }
    }
}
