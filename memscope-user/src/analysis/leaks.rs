//! Which blocks leak: held over steps and never freed.
//!
//! A block is judged by the step k it was allocated in, when the trace ends, or before that when its process
//! ends, finalizes CANN or resets its device. What is freed from then on is tidied up: nobody waits for it. And
//! what was freed just before, with no allocation after it, was held until then: whether an
//! interpreter drops the variables of its functions before it finalizes CANN, or after, says nothing of the program.
//!
//! - k < 2: never a leak. What comes before the first whole step and in it is warm-up.
//! - No step after k has ended: not judged, for no later step can have shown whether the block is needed.
//! - Blocks of its like were freed late, after up to d later steps had ended: it is a leak only when more
//!   than d later steps have ended; until then it is young, and not judged. So nothing of a steady ring of
//!   batches is a leak, wherever the trace ends. (See [`Old`] and [`HeldByCall::longest`] for what frees of older blocks
//!   say of d.)
//! - Else it is a leak.
//!
//! Alike are blocks of one pool, device, size class (four to a power of two), operator, and place in the program
//! where that is known. What is known of blocks without a place is held to be true of those with one too, and the
//! other way round. Alike are also, whatever their sizes, blocks that one call wanted: whose stacks are the same
//! to the outermost frame (a line alone may be that of a helper through which blocks of all fates come).
//!
//! - Blocks of one call that were freed late, [`HeldByCall::MANY`] at least, may have been held very differently: the
//!   longest [`HeldByCall::WIDE`] times as long as they were on average (requests, entries of a cache that are used
//!   again and again). The longest so far says little then of the longest there will be: d counts by as much more as
//!   it is above the average.
//!
//! A leak is recurring when its like leaked in two or more steps, or, where only the call is the same, in three: caches
//! that are filled for each new shape settle sooner. In [`OUTLIERS`] where blocks of the call are held very
//! differently. Else it happened once: state that was built late.
//!
//! Which driver blocks are judged: the program's own ([`Block::belongs_to_program`]), not segments of pools
//! nor what CANN takes for itself. Pinned host memory and workspaces are kept by allocators for later use
//! and grow until they suffice: they leak only when they keep growing, that is, when their like was leaked
//! in half of all steps that were judged, ten at least, and of the later ones too.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::ops::RangeInclusive;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::model::{
    AllocationId, Block, Change, Count, DeviceId, Event, Frame, Ledger, Name, Nanos, Pool, Process, Stack,
    StepId, StepSet, Tgid, Whose,
};

use super::Analysis;

/// Steps whose blocks are never leaks: what was before the first whole step, and that step.
const WARM_UP: StepId = StepId(1);

/// Late blocks that are kept one by one, per process: the largest.
const LATE_KEPT: usize = 1000;

/// Steps at the beginning of a trace of which not all blocks were seen, or none is judged.
const CUT_STEPS: u32 = 2;

/// Kinds of blocks that are told apart. Operator names come from the target; past this many, blocks are
/// alike whatever their operator.
const LIKES_MAX: usize = 1 << 16;

/// Steps in which blocks of one call must have leaked, to count as recurring.
const GROWING_STEPS: usize = 3;

/// The same for calls whose blocks are held very differently: some are held longer than all before them for no reason.
const OUTLIERS: usize = 8;

/// Steps that must be judged before anything is said of what may be a cache: it is filling.
const CACHE_FILLS: usize = 10;

/// torch_npu's pool leaves a rest of so many bytes at most with a large block instead of splitting it off.
const REST_MAX: u64 = 1 << 20;

/// What makes blocks alike.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Like {
    pub pool: Pool,
    pub device: Option<DeviceId>,
    class: u16,
    pub op: Option<Name>,
    /// The line of the program that wanted it.
    pub place: Option<Frame>,
}

impl Like {
    fn of(block: &Block) -> Self {
        let place = block.place().cloned();
        let (class, op) = (size_class(block.size), block.op.clone());
        Like { pool: block.pool, device: block.device, class, op, place }
    }

    fn of_any_op(self) -> Self {
        Like { op: None, ..self }
    }

    fn anywhere(self) -> Self {
        Like { place: None, ..self }
    }

    /// Of the sizes that may have been asked for when the block was given.
    fn by_sizes_asked(self, block: &Block) -> impl Iterator<Item = Like> {
        let has_rest = block.pool == Pool::Pta && block.size > REST_MAX;
        let least = if has_rest { (block.size - REST_MAX).max(REST_MAX + 1) } else { block.size };
        (size_class(least)..=self.class).map(move |class| Like { class, ..self.clone() })
    }
}

/// A call of the program that wants blocks.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Call {
    pool: Pool,
    device: Option<DeviceId>,
    stack: Arc<Stack>,
}

impl Call {
    /// `None` also for a backward pass: one call of the program is behind all of its blocks.
    fn of(block: &Block) -> Option<Self> {
        let stack = block.stack.as_ref().filter(|stack| stack.whose() == Whose::Own)?;
        Some(Call { pool: block.pool, device: block.device, stack: stack.clone() })
    }
}

/// Four classes to a power of two.
pub(crate) fn size_class(size: u64) -> u16 {
    let log = size.max(1).ilog2();
    let quarter = if log >= 2 { (size >> (log - 2)) & 3 } else { 0 };
    (log * 4) as u16 + quarter as u16
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// Its like was found in two or more steps.
    Recurring,
    /// In two or more steps, and then no more for long.
    Settled,
    /// In one step only.
    Once,
}

/// Why a block is neither a leak nor cleared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// No step after its own has ended.
    LastStep,
    /// Its like is held that long and then freed: in the n-th step after its own at the latest.
    Young { freed_after: u32 },
    /// Older than that, but its like is held very differently: by steps on average and at most.
    Outlier { mean: u32, longest: u32 },
}

/// A block freed after a step later than its own had ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Late {
    pub block: Block,
    pub freed: Nanos,
    /// The step in which it was freed.
    pub freed_step: StepId,
    /// Steps later than its own that had ended by then.
    later: u32,
}

/// Late blocks of a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LateGroup {
    pub count: Count,
    /// Bytes of the largest.
    pub largest: u64,
    /// Steps from allocation to free: the fewest and the most.
    pub held_min: u32,
    pub held_max: u32,
    /// Steps in which they were allocated: the first and the last.
    pub first_step: StepId,
    pub last_step: StepId,
    /// The step of the first one of all, and whether there were some of another: shown or not.
    begun: StepId,
    recurs: bool,
}

impl LateGroup {
    fn new(step: StepId) -> Self {
        LateGroup { held_min: u32::MAX, first_step: StepId(u32::MAX), begun: step, ..LateGroup::default() }
    }

    fn add(&mut self, block: &Block, freed_step: StepId) {
        let held = freed_step.0 - block.step.0;
        self.count.add(block.size);
        self.largest = self.largest.max(block.size);
        self.held_min = self.held_min.min(held);
        self.held_max = self.held_max.max(held);
        self.first_step = self.first_step.min(block.step);
        self.last_step = self.last_step.max(block.step);
    }

    pub fn pattern(&self) -> Pattern {
        if self.recurs { Pattern::Recurring } else { Pattern::Once }
    }
}

/// What is to be said of one process.
#[derive(Debug, Default)]
pub struct Verdicts {
    /// In order of allocation.
    pub leaks: Vec<(Block, Pattern)>,
    /// Largest first.
    pub not_judged: Vec<(Block, Pattern, Reason)>,
    /// The largest ones, in order of allocation.
    pub late: Vec<(Late, Pattern)>,
    /// All late blocks, by kind; most bytes first.
    pub late_groups: Vec<(Like, LateGroup)>,
}

impl Verdicts {
    /// Keeps what was allocated in these steps, as it was judged by all that was seen.
    pub fn select(&mut self, steps: &StepSet) {
        self.leaks.retain(|(block, _)| steps.contains(block.step));
        self.not_judged.retain(|(block, ..)| steps.contains(block.step));
        self.late.retain(|(late, _)| steps.contains(late.block.step));
    }
}

#[derive(Debug, Default)]
pub struct Leaks {
    /// By position in [`Ledger::processes`].
    processes: Vec<Watched>,
    /// Of which steps late blocks are told.
    shown: StepSet,
    /// Some process may have a [`Watched::tail`].
    has_tails: bool,
}

/// Later steps that had ended when blocks of a kind were freed: the most.
#[derive(Debug, Default)]
struct Held {
    here: FxHashMap<Like, u32>,
    /// By [`Like::anywhere`], whether or not their place is known.
    anywhere: FxHashMap<Like, u32>,
}

impl Held {
    fn note(&mut self, like: Like, later: u32) {
        for (like, held) in [(like.clone().anywhere(), &mut self.anywhere), (like, &mut self.here)] {
            let longest = held.entry(bounded(like, held)).or_default();
            *longest = later.max(*longest);
        }
    }

    /// Of blocks that are of this kind as far as is known.
    fn longest(&self, like: &Like) -> Option<u32> {
        let anywhere = like.clone().anywhere();
        if like.place.is_none() {
            return self.anywhere.get(&bounded(anywhere, &self.anywhere)).copied();
        }
        let here = self.here.get(&bounded(like.clone(), &self.here));
        here.max(self.here.get(&anywhere)).copied()
    }
}

#[derive(Debug, Default)]
struct Watched {
    freed_late: Held,
    /// The same by the call that wanted them.
    freed_late_of: FxHashMap<Call, HeldByCall>,
    old: FxHashMap<(Pool, Option<DeviceId>, u16), Old>,
    /// The same of blocks of the first whole step, whatever their operator: of the first blocks after attach it
    /// is not known yet.
    warm: Held,
    late: FxHashMap<Like, LateGroup>,
    largest_late: BinaryHeap<Reverse<BySize>>,
    /// Freed late, and nothing was allocated since.
    tail: Vec<Late>,
    /// Blocks judged before the trace ended.
    judged: Vec<(Block, Verdict)>,
    /// The last block that was allocated when judgement was passed on all blocks.
    judged_to: AllocationId,
}

/// Late frees of the blocks of one call.
#[derive(Debug, Default)]
struct HeldByCall {
    blocks: u64,
    /// Later steps that had ended at a free: the sum, and the most.
    sum: u64,
    longest: u32,
    /// In the step of the last such free.
    last: Sweep,
}

/// Blocks of one call that were freed late in the same step.
#[derive(Debug, Clone, Copy, Default)]
struct Sweep {
    step: StepId,
    blocks: u32,
    /// The longest held of them.
    longest: u32,
}

impl HeldByCall {
    const MANY: u64 = 16;
    const WIDE: u32 = 3;

    fn mean(&self) -> u32 {
        u32::try_from(self.sum / self.blocks.max(1)).unwrap_or(u32::MAX)
    }

    fn is_wide(&self) -> bool {
        self.blocks >= Self::MANY && self.longest >= self.mean().saturating_mul(Self::WIDE)
    }

    fn freed(&mut self, later: u32, step: StepId) {
        if self.last.step != step {
            self.last = Sweep { step, ..Sweep::default() };
        }
        self.last.blocks += 1;
        self.last.longest = self.last.longest.max(later);
        self.blocks += 1;
        self.sum += u64::from(later);
        self.longest = self.longest.max(later);
    }

    /// A list that is cleared once an epoch, or cycles of references until Python collects them: what goes at once with
    /// older blocks had begun to be collected before attach. Blocks came at the same rate then, so that is how much
    /// longer the next ones may be held. Who is freed later without older ones has been seen from its beginning.
    fn longest(&self, old_in: impl FnOnce(StepId) -> u32) -> u32 {
        let Sweep { step, blocks, longest } = self.last;
        let before = match old_in(step) {
            0 => 0,
            old => {
                let steps = (u64::from(longest) * u64::from(old)).div_ceil(u64::from(blocks.max(1)));
                u32::try_from(steps).unwrap_or(u32::MAX).saturating_add(CUT_STEPS)
            }
        };
        self.longest.max(longest.saturating_add(before))
    }
}

/// Frees of blocks from before the first whole step: of a pool, device and size class, for their operators
/// are not known. It is not known either how long they lived: one may have been there from the start and go
/// with the loop. But when such frees come in several steps, blocks are being replaced in turn, and who lives
/// no longer than that may be one of them. This counts only until blocks of the first whole step must have
/// been freed in their turn too: from then on the frees of younger blocks tell.
#[derive(Debug, Default)]
struct Old {
    /// How many in each step, after a step had ended.
    freed_in: BTreeMap<StepId, u32>,
    /// Steps that had ended at the last free.
    ended: u32,
}

impl Old {
    fn freed(&mut self, process: &Process) {
        let steps = process.steps();
        *self.freed_in.entry(steps.current()).or_default() += 1;
        self.ended = steps.last_ended().0;
    }

    /// The d that all of them together stand for: blocks of either size.
    fn held<'a>(all: impl Iterator<Item = &'a Old> + Clone, process: &Process) -> u32 {
        let ended = all.clone().map(|old| old.ended).max().unwrap_or(0);
        let steps: usize = all.map(|old| old.freed_in.len()).sum();
        let counts = steps >= 2 && process.steps().last_ended().0 < ended + 2;
        if counts { ended } else { 0 }
    }
}

/// The least and the largest size class of the blocks that one call wanted: older ones of the call may have been of any
/// between them.
struct Classes(FxHashMap<Call, (u16, u16)>);

impl Classes {
    fn of<'a>(blocks: impl IntoIterator<Item = &'a Block>) -> Self {
        let mut classes: FxHashMap<Call, (u16, u16)> = FxHashMap::default();
        for block in blocks {
            if let Some(call) = Call::of(block) {
                let class = size_class(block.size);
                let (least, most) = classes.entry(call).or_insert((class, class));
                (*least, *most) = (class.min(*least), class.max(*most));
            }
        }
        Classes(classes)
    }

    fn like(&self, block: &Block) -> RangeInclusive<u16> {
        let class = size_class(block.size);
        let (least, most) =
            Call::of(block).and_then(|call| self.0.get(&call).copied()).unwrap_or((class, class));
        least..=most
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Leak,
    NotJudged(Reason),
}

#[derive(Debug)]
struct BySize(Late);

impl BySize {
    fn key(&self) -> (u64, Reverse<u64>) {
        (self.0.block.size, Reverse(self.0.block.id.0))
    }
}

impl PartialEq for BySize {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for BySize {}

impl PartialOrd for BySize {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for BySize {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

impl Analysis for Leaks {
    fn observe(&mut self, event: &Event, change: &Change, ledger: &Ledger) {
        match change {
            // Nearly all blocks are freed before the next step has ended.
            Change::Freed(block) => {
                if let Some(process) = ledger.process(event.tgid)
                    && let later @ 1.. = later_steps(block, process)
                    && block.belongs_to_program()
                    && let Some(watched) = self.watch(event.tgid, ledger)
                    && block.id > watched.judged_to
                {
                    let steps = process.steps();
                    let (freed, freed_step) = (event.time, steps.current());
                    if block.step < WARM_UP {
                        watched.freed_old(block.pool, block.device, block.size, process);
                        return;
                    }
                    let late = Late { block: block.clone(), freed, freed_step, later };
                    watched.tail.push(late);
                    self.has_tails = true;
                }
            }
            Change::Allocated { .. } if self.has_tails => {
                if let Some(position) = ledger.position(event.tgid) {
                    self.end_tail(position);
                }
                self.has_tails = self.processes.iter().any(|watched| !watched.tail.is_empty());
            }
            Change::UnknownFree { pool, device, size: Some(size) } => {
                if let Some(process) = ledger.process(event.tgid)
                    && process.steps().last_ended() > StepId(0)
                    && let Some(watched) = self.watch(event.tgid, ledger)
                {
                    watched.freed_old(*pool, *device, *size, process);
                }
            }
            Change::Reset { device, blocks } => {
                let of_device = |late: &Late| late.block.device == Some(*device);
                self.judge_for_good(event.tgid, ledger, blocks, of_device);
            }
            Change::Ended { blocks, .. } => self.judge_for_good(event.tgid, ledger, blocks, |_| true),
            Change::StepsRetracted => {
                if let Some(watched) = self.watch(event.tgid, ledger) {
                    *watched = Watched { judged_to: watched.judged_to, ..Watched::default() };
                }
            }
            Change::Finalized => {
                if let Some(process) = ledger.process(event.tgid) {
                    self.judge_for_good(event.tgid, ledger, process.blocks(), |_| true);
                    if let Some(watched) = self.watch(event.tgid, ledger) {
                        watched.judged_to = process.last_id();
                    }
                }
            }
            _ => {}
        }
    }
}

impl Leaks {
    /// Tells of late blocks of these steps only. (They are too many to be kept and chosen from later.)
    pub fn showing(steps: StepSet) -> Self {
        Leaks { shown: steps, ..Leaks::default() }
    }

    /// What is to be said, as of now, of the process at this position of [`Ledger::processes`].
    pub fn verdicts(&self, position: usize, process: &Process) -> Verdicts {
        let unwatched = Watched::default();
        self.processes.get(position).unwrap_or(&unwatched).verdicts(process)
    }

    /// What was freed last counts as freed: the program goes on, or the trace ends before it does.
    pub fn finish(&mut self) {
        (0..self.processes.len()).for_each(|position| self.end_tail(position));
    }

    /// Passes judgement on blocks that nothing will be heard of any more, and on what was freed last.
    fn judge_for_good<'a>(
        &mut self,
        tgid: Tgid,
        ledger: &Ledger,
        blocks: impl IntoIterator<Item = &'a Block>,
        of_tail: impl Fn(&Late) -> bool,
    ) {
        self.watch(tgid, ledger);
        if let (Some(process), Some(position)) = (ledger.process(tgid), ledger.position(tgid))
            && let Some(watched) = self.processes.get_mut(position)
        {
            watched.judge_for_good(blocks, of_tail, process, &self.shown);
        }
    }

    fn end_tail(&mut self, position: usize) {
        let Some(watched) = self.processes.get_mut(position) else { return };
        for late in std::mem::take(&mut watched.tail) {
            let shown = self.shown.contains(late.block.step);
            watched.freed_late(late, shown);
        }
    }

    fn watch(&mut self, tgid: Tgid, ledger: &Ledger) -> Option<&mut Watched> {
        let position = ledger.position(tgid)?;
        if self.processes.len() <= position {
            self.processes.resize_with(position + 1, Watched::default);
        }
        self.processes.get_mut(position)
    }
}

impl Watched {
    fn freed_late(&mut self, late: Late, shown: bool) {
        let Late { block, later, freed_step, .. } = &late;
        self.freed_late.note(Like::of(block), *later);
        if let Some(call) = Call::of(block)
            && (self.freed_late_of.len() < LIKES_MAX || self.freed_late_of.contains_key(&call))
        {
            self.freed_late_of.entry(call).or_default().freed(*later, *freed_step);
        }
        if block.step == WARM_UP {
            self.warm.note(Like::of(block).of_any_op(), *later);
        }
        if block.step == WARM_UP || is_kept_for_use(block.pool) {
            return;
        }

        let like = bounded(Like::of(block), &self.late);
        let group = self.late.entry(like).or_insert_with(|| LateGroup::new(block.step));
        group.recurs |= group.begun != block.step;
        if !shown {
            return;
        }
        group.add(block, late.freed_step);

        let full = self.largest_late.len() == LATE_KEPT;
        if !full || self.largest_late.peek().is_some_and(|least| least.0.0.block.size < block.size) {
            if full {
                self.largest_late.pop();
            }
            self.largest_late.push(Reverse(BySize(late)));
        }
    }

    fn freed_old(&mut self, pool: Pool, device: Option<DeviceId>, size: u64, process: &Process) {
        self.old.entry((pool, device, size_class(size))).or_default().freed(process);
    }

    /// See [`Leaks::judge_for_good`].
    fn judge_for_good<'a>(
        &mut self,
        blocks: impl IntoIterator<Item = &'a Block>,
        of_tail: impl Fn(&Late) -> bool,
        process: &Process,
        shown: &StepSet,
    ) {
        let tail: Vec<Late> = self.tail.extract_if(.., |late| of_tail(late)).collect();
        let blocks: Vec<&Block> = blocks.into_iter().collect();
        let classes = Classes::of(blocks.iter().copied().chain(tail.iter().map(|late| &late.block)));
        let (mut held, mut in_turn) = (Vec::new(), Vec::new());
        for late in tail {
            match self.judge(&late.block, late.later, process, &classes) {
                Some(Verdict::Leak) => held.push((late.block, Verdict::Leak)),
                Some(Verdict::NotJudged(_)) => in_turn.push(late),
                None => {}
            }
        }
        for late in in_turn {
            let shown = shown.contains(late.block.step);
            self.freed_late(late, shown);
        }
        let judged: Vec<_> = blocks
            .into_iter()
            .filter(|block| block.id > self.judged_to)
            .filter_map(|block| {
                let verdict = self.judge(block, later_steps(block, process), process, &classes)?;
                Some((block.clone(), verdict))
            })
            .chain(held)
            .collect();
        self.judged.extend(judged);
    }

    /// `None` for blocks that are in order.
    fn judge(&self, block: &Block, later: u32, process: &Process, classes: &Classes) -> Option<Verdict> {
        if block.step <= WARM_UP || !block.belongs_to_program() {
            return None;
        }
        if later == 0 {
            return Some(Verdict::NotJudged(Reason::LastStep));
        }
        let longest = self.freed_late_as(block, classes).unwrap_or_else(|| {
            let warm =
                Like::of(block).of_any_op().by_sizes_asked(block).filter_map(|like| self.warm.longest(&like));
            warm.max().unwrap_or(0).max(Old::held(self.old_like(block, classes), process))
        });
        // Who outlives the end of its own step and d later ones is freed in step d + 1 after its own.
        Some(if later <= longest {
            Verdict::NotJudged(Reason::Young { freed_after: longest.saturating_add(1) })
        } else if let Some(held) = self.held_by_call(block).filter(|held| held.is_wide())
            && let (mean, longest) = (held.mean(), held.longest)
            && later <= longest.saturating_add(longest - mean)
        {
            Verdict::NotJudged(Reason::Outlier { mean, longest })
        } else {
            Verdict::Leak
        })
    }

    /// Later steps that had ended when blocks like this one were freed, as far as it is known which were.
    fn freed_late_as(&self, block: &Block, classes: &Classes) -> Option<u32> {
        let by_call = self.held_by_call(block).map(|held| {
            held.longest(|step| self.old_like(block, classes).filter_map(|old| old.freed_in.get(&step)).sum())
        });
        let by_kind = Like::of(block).by_sizes_asked(block).filter_map(|like| self.freed_late.longest(&like));
        by_call.max(by_kind.max())
    }

    fn held_by_call(&self, block: &Block) -> Option<&HeldByCall> {
        self.freed_late_of.get(&Call::of(block)?)
    }

    /// Frees of older blocks that may have been like this one.
    fn old_like(&self, block: &Block, classes: &Classes) -> impl Iterator<Item = &Old> + Clone {
        let (pool, device) = (block.pool, block.device);
        classes.like(block).filter_map(move |class| self.old.get(&(pool, device, class)))
    }

    fn verdicts(&self, process: &Process) -> Verdicts {
        let classes = Classes::of(process.blocks());
        let alive = process.blocks().filter(|block| block.id > self.judged_to).filter_map(|block| {
            Some((block.clone(), self.judge(block, later_steps(block, process), process, &classes)?))
        });
        let mut judged: Vec<(Block, Verdict)> = self.judged.iter().cloned().chain(alive).collect();
        judged.sort_unstable_by_key(|(block, _)| block.id);

        let mut leaked_in: FxHashMap<Like, BTreeSet<StepId>> = FxHashMap::default();
        let mut leaked_of: FxHashMap<Call, BTreeSet<StepId>> = FxHashMap::default();
        for (block, _) in judged.iter().filter(|(_, verdict)| *verdict == Verdict::Leak) {
            for like in Like::of(block).by_sizes_asked(block) {
                leaked_in.entry(like).or_default().insert(block.step);
            }
            if let Some(call) = Call::of(block) {
                leaked_of.entry(call).or_default().insert(block.step);
            }
        }
        let last_ended = process.steps().last_ended();
        // What came after it is young yet, whether it leaks or not.
        let last_judged = |block: &Block| {
            StepId(last_ended.0.saturating_sub(
                self.freed_late_as(block, &classes).map_or(0, |longest| longest.saturating_add(1)),
            ))
        };

        let mut verdicts = Verdicts::default();
        for (block, verdict) in judged {
            let by_kind: Vec<&BTreeSet<StepId>> =
                Like::of(&block).by_sizes_asked(&block).filter_map(|like| leaked_in.get(&like)).collect();
            let by_call = Call::of(&block).and_then(|call| leaked_of.get(&call));
            let is_wide = self.held_by_call(&block).is_some_and(HeldByCall::is_wide);
            let (of_kind, of_call) = if is_wide { (OUTLIERS, OUTLIERS) } else { (2, GROWING_STEPS) };
            let mut recurred = by_kind
                .iter()
                .copied()
                .filter(|steps| steps.len() >= of_kind)
                .chain(by_call.filter(|steps| steps.len() >= of_call))
                .peekable();
            let pattern = if recurred.peek().is_none() {
                Pattern::Once
            } else if recurred.all(|steps| has_settled(steps, last_judged(&block))) {
                Pattern::Settled
            } else {
                Pattern::Recurring
            };
            if is_kept_for_use(block.pool)
                && (verdict != Verdict::Leak || !by_kind.iter().any(|steps| grows_on(steps, last_ended)))
            {
                continue;
            }
            match verdict {
                Verdict::Leak => verdicts.leaks.push((block, pattern)),
                Verdict::NotJudged(reason) => verdicts.not_judged.push((block, pattern, reason)),
            }
        }
        verdicts.not_judged.sort_by_key(|(block, ..)| Reverse(block.size));

        verdicts.late = self
            .largest_late
            .iter()
            .map(|Reverse(BySize(late))| {
                let like = bounded(Like::of(&late.block), &self.late);
                (late.clone(), self.late.get(&like).map_or(Pattern::Once, LateGroup::pattern))
            })
            .collect();
        verdicts.late.sort_unstable_by_key(|(late, _)| late.block.id);
        let shown = self.late.iter().filter(|(_, group)| group.count.blocks > 0);
        verdicts.late_groups = shown.map(|(like, group)| (like.clone(), *group)).collect();
        verdicts
            .late_groups
            .sort_unstable_by_key(|(_, group)| (Reverse(group.count.bytes), group.first_step));
        verdicts
    }
}

/// Steps after the block's own that have ended.
fn later_steps(block: &Block, process: &Process) -> u32 {
    process.steps().last_ended().0.saturating_sub(block.step.0)
}

/// Whether what leaked in these steps leaks no more: for ten steps at least, for more than half of the trace since it
/// began, and for three times as long as it ever paused before.
fn has_settled(steps: &BTreeSet<StepId>, last_ended: StepId) -> bool {
    const QUIET_MIN: u32 = 10;
    let (Some(first), Some(last)) = (steps.first(), steps.last()) else { return false };
    let quiet = last_ended.0.saturating_sub(last.0);
    let longest_pause = steps.iter().zip(steps.iter().skip(1)).map(|(a, b)| b.0 - a.0).max().unwrap_or(1);
    quiet >= QUIET_MIN && quiet > last.0 - first.0 && quiet >= longest_pause.saturating_mul(3)
}

/// Whether what may be a cache, and was leaked to in these steps, grows for ever: in half of all steps that were judged, and in
/// half of the later half of them too, where a cache would have enough.
fn grows_on(steps: &BTreeSet<StepId>, last_ended: StepId) -> bool {
    let judged = last_ended.0.saturating_sub(2) as usize;
    let half = judged / 2;
    let lately = steps.range(StepId(last_ended.0.saturating_sub(half as u32))..).count();
    judged >= CACHE_FILLS && 2 * steps.len() >= judged && lately >= half / 2
}

/// Whether an allocator that is not seen itself keeps the pool's blocks for later use.
fn is_kept_for_use(pool: Pool) -> bool {
    matches!(pool, Pool::Host | Pool::PtaWorkspace)
}

fn bounded<V>(mut like: Like, known: &FxHashMap<Like, V>) -> Like {
    if known.len() >= LIKES_MAX && !known.contains_key(&like) {
        like.op = None;
        like.place = None;
    }
    like
}

#[cfg(test)]
mod tests;
