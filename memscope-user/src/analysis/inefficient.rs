//! Memory that is held without being used: allocated too early, freed too late, idle in between, or for nothing.
//!
//! Two sets of rules, over the same facts. What they count is calls: an operator, or an allocation, free or access that
//! belongs to none.
//!
//! msMemScope's, per process and pool (see [`Rules::Memscope`]):
//! - early allocation: between the call that allocated the block and the first other one that accessed it, some block
//!   was freed;
//! - late deallocation: between the last access and the free, some block was allocated;
//! - temporary idleness: more than so many calls between two accesses.
//!
//! DrGPUM's (see [`Rules::Drgpum`]) are of distances alone, in operators, and there are more of them: memory that nothing
//! ever accesses, that could have been a block's that was done with, that is initialised twice, that is never freed.
//!
//! A finding says for how many operators how many bytes were wasted. Findings of one pattern at one line of the
//! program and around one operator are a group: what one change of the program would repair. A finding and a group say what the peak of their pool would have
//! been without them, which is exact (see `profile`).
//!
//! Nothing can be said where no accesses are seen, and nothing is said.

mod process;
mod profile;

use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::dump::read::NumberedRow;
use crate::dump::{Fact, Row};
use crate::model::{
    AllocationId, Change, DeviceId, DevicePtr, Event, EventKind, Frame, Ledger, Name, Nanos, Pool, Stack,
    Tgid, Tid,
};

use super::Analysis;
use process::{Allocation, Process};

/// Findings kept of each group: the costliest.
const EXAMPLES: usize = 10;

/// What counts as inefficient, with its thresholds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "rules", rename_all = "snake_case")]
pub enum Rules {
    Memscope {
        /// Calls between two accesses, more than which are temporary idleness.
        idle: u64,
    },
    Drgpum {
        /// Operators between allocation and first access, from which on it is early.
        early: u64,
        /// Operators between last access and free, from which on it is late.
        late: u64,
        /// Operators between two accesses, from which on it is temporary idleness.
        idle: u64,
    },
}

impl Rules {
    /// With msMemScope's threshold.
    pub const MEMSCOPE: Rules = Rules::Memscope { idle: 3000 };
    /// With the thresholds of DrGPUM's scripts.
    pub const DRGPUM: Rules = Rules::Drgpum { early: 1, late: 1, idle: 1 };

    /// The patterns that these rules know.
    pub fn patterns(self) -> &'static [Pattern] {
        match self {
            Rules::Memscope { .. } => &Pattern::ALL[..3],
            Rules::Drgpum { .. } => &Pattern::ALL,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    EarlyAllocation,
    LateDeallocation,
    TemporaryIdleness,
    /// Not accessed in its whole life.
    UnusedAllocation,
    /// Allocated while another block of the same size was done with and not freed.
    RedundantAllocation,
    /// Initialised and, before anything else accessed it, initialised again.
    DeadWrite,
    /// Not freed by the end.
    Leak,
}

impl Pattern {
    pub const ALL: [Pattern; 7] = [
        Pattern::EarlyAllocation,
        Pattern::LateDeallocation,
        Pattern::TemporaryIdleness,
        Pattern::UnusedAllocation,
        Pattern::RedundantAllocation,
        Pattern::DeadWrite,
        Pattern::Leak,
    ];

    /// As it is in dumps and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Pattern::EarlyAllocation => "early_allocation",
            Pattern::LateDeallocation => "late_deallocation",
            Pattern::TemporaryIdleness => "temporary_idleness",
            Pattern::UnusedAllocation => "unused_allocation",
            Pattern::RedundantAllocation => "redundant_allocation",
            Pattern::DeadWrite => "dead_write",
            Pattern::Leak => "leak",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Config {
    #[serde(flatten)]
    pub rules: Rules,
    /// Blocks of fewer bytes are passed over.
    pub min_bytes: u64,
    /// What is looked for, of what the rules know.
    pub patterns: Vec<Pattern>,
}

impl Config {
    /// All patterns, blocks of all sizes.
    pub fn new(rules: Rules) -> Self {
        Config { rules, min_bytes: 0, patterns: rules.patterns().to_vec() }
    }

    fn looks_for(&self, pattern: Pattern) -> bool {
        self.patterns.contains(&pattern) && self.rules.patterns().contains(&pattern)
    }
}

/// A block that was held for nothing, from one moment to another.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    pub pattern: Pattern,
    pub pid: Tgid,
    pub pool: Pool,
    /// `None` where it is not known.
    pub device: Option<DeviceId>,
    /// Where the events say.
    pub allocation_id: Option<AllocationId>,
    pub ptr: DevicePtr,
    /// Bytes.
    pub size: u64,
    /// The operator around which it was allocated.
    pub op: Option<Name>,
    /// The line of the program that allocated it, where that is known, and who called that.
    pub place: Option<Frame>,
    pub caller: Option<Frame>,
    /// Early: its allocation and first access. Late: last access and free. Idle: two accesses. Unused and redundant:
    /// the time for which it was not needed. Dead write: the two writes. Leak: last access and end.
    pub from: Moment,
    pub to: Moment,
    /// `from` is the allocation: until `to` no use was seen. Of what msMemScope's rules take to be used by being allocated,
    /// too.
    pub from_allocation: bool,
    /// The call between the two in which some block was freed (early, rules of msMemScope) or allocated (late).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call_between: Option<u64>,
    /// Operators begun between the two.
    pub operators: u64,
    /// Bytes times operators.
    pub wasted: u64,
    /// Redundant: the block that could have been used instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instead_of: Option<AllocationId>,
    /// In reports: the peak of the pool without this one finding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_without: Option<u64>,
}

/// A point in the life of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Moment {
    /// Number of the call, as the process's calls that may touch the pool are counted, from 1.
    pub call: u64,
    pub timestamp_ns: Nanos,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    #[serde(flatten)]
    pub config: Config,
    /// Pools of which accesses were seen: nothing can be found in others.
    pub pools: Vec<PoolReport>,
}

impl Report {
    /// Whether anything was found without which some peak were lower. (Any loop holds something a little longer than
    /// it needs it.)
    pub fn lowers_a_peak(&self) -> bool {
        self.pools.iter().any(|pool| pool.peak_without < pool.peak_bytes)
    }
}

/// One pool of a process on one device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PoolReport {
    pub pid: Tgid,
    pub pool: Pool,
    pub device: Option<DeviceId>,
    /// Operators of the process.
    pub operators: u64,
    pub blocks: u64,
    pub accesses: u64,
    /// The most bytes of blocks seen at once.
    pub peak_bytes: u64,
    /// The same without anything that was found. Redundant allocations are left out, for their time overlaps others'.
    pub peak_without: u64,
    /// Most bytes saved at the peak first, then most wasted.
    pub groups: Vec<Group>,
}

/// Findings of one pattern at one line of the program, which one other has called, around one operator.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Group {
    pub pattern: Pattern,
    pub op: Option<Name>,
    pub place: Option<Frame>,
    pub caller: Option<Frame>,
    pub findings: u64,
    /// Bytes of the largest.
    pub largest: u64,
    /// Operators between the two ends: the fewest and the most.
    pub operators_min: u64,
    pub operators_max: u64,
    /// Bytes times operators, over all findings.
    pub wasted: u64,
    /// The peak of the pool without these findings, and how much less that is.
    pub peak_without: u64,
    pub saved_at_peak: u64,
    /// The costliest findings.
    pub examples: Vec<Finding>,
}

/// Looks for inefficient memory in a stream of events or rows. What is kept depends on the blocks alive, on the number of
/// operators' names and on sizes, and not on the length of the stream.
#[derive(Debug)]
pub struct Inefficient {
    config: Config,
    processes: Vec<Process>,
    /// Index of the latest process with this id.
    index: FxHashMap<Tgid, usize>,
}

impl Inefficient {
    pub fn new(config: Config) -> Self {
        Inefficient { config, processes: Vec::new(), index: FxHashMap::default() }
    }

    /// Takes the next row of a dump, in order of time. `found` gets each finding when it is certain.
    pub fn observe_row(&mut self, numbered: &NumberedRow, found: &mut dyn FnMut(&Finding)) {
        let row = &numbered.row;
        let (tgid, tid, time) = (row.tgid, row.tid, row.time);
        match &row.fact {
            Fact::OpBegin { name, .. } => self.process(tgid, time).begin_operator(tid, name),
            Fact::OpEnd { .. } => self.process(tgid, time).end_operator(tid),
            Fact::NeverFreed { pool, ptr } => {
                self.process(tgid, time).never_freed(*pool, row.allocation_id, *ptr, found);
            }
            Fact::Event(kind) => match kind {
                EventKind::Alloc(alloc) => {
                    let (place, caller) = place(alloc.stack.as_deref());
                    let allocation = Allocation {
                        pool: alloc.pool,
                        device: device_of(alloc.pool, row),
                        id: row.allocation_id,
                        ptr: alloc.ptr,
                        size: alloc.size,
                        place,
                        caller,
                    };
                    self.process(tgid, time).alloc(allocation, tid);
                }
                EventKind::Free(free) => {
                    self.process(tgid, time).free(free.pool, row.allocation_id, free.ptr, tid, found);
                }
                EventKind::Exec | EventKind::Exit => self.end(tgid, time, found),
                _ => self.observe_common(kind, tgid, tid, time, row.allocation_id, found),
            },
            Fact::StepEnd { .. } | Fact::Lost { .. } => {}
        }
    }

    fn observe_common(
        &mut self,
        kind: &EventKind,
        tgid: Tgid,
        tid: Tid,
        time: Nanos,
        id: Option<AllocationId>,
        found: &mut dyn FnMut(&Finding),
    ) {
        match kind {
            EventKind::Op { name } => {
                let process = self.process(tgid, time);
                process.begin_operator(tid, name);
                process.end_operator(tid);
            }
            EventKind::Access(access) => self.process(tgid, time).access(access, id, tid, found),
            _ => {}
        }
    }

    /// Judges what is left when there is no more to come.
    pub fn finish(&mut self, found: &mut dyn FnMut(&Finding)) {
        for process in &mut self.processes {
            process.end(found);
        }
        self.index.clear();
    }

    pub fn report(&self) -> Report {
        let mut pools: Vec<PoolReport> = self.processes.iter().flat_map(Process::report).collect();
        pools.sort_by_key(|pool| (pool.pid, pool.device.is_none(), pool.device, pool.pool));
        Report { config: self.config.clone(), pools }
    }

    fn process(&mut self, tgid: Tgid, time: Nanos) -> &mut Process {
        let Inefficient { config, processes, index } = self;
        let at = *index.entry(tgid).or_insert_with(|| {
            processes.push(Process::new(tgid, config));
            processes.len() - 1
        });
        let process = &mut processes[at];
        process.now = time;
        process
    }

    fn end(&mut self, tgid: Tgid, time: Nanos, found: &mut dyn FnMut(&Finding)) {
        if let Some(at) = self.index.remove(&tgid) {
            self.processes[at].now = time;
            self.processes[at].end(found);
        }
    }
}

impl Analysis for Inefficient {
    fn observe(&mut self, event: &Event, change: &Change, ledger: &Ledger) {
        let Event { time, tgid, tid, kind } = event;
        let found: &mut dyn FnMut(&Finding) = &mut |_| {};
        match (kind, change) {
            (EventKind::Alloc(_), Change::Allocated { block, replaced }) => {
                if let Some(old) = replaced {
                    self.process(*tgid, *time).never_freed(old.pool, Some(old.id), old.ptr, found);
                }
                let Some(block) = ledger.process(*tgid).and_then(|process| process.block(*block)) else {
                    return;
                };
                let (pool, device, ptr, size) = (block.pool, block.device, block.ptr, block.size);
                let (id, (place, caller)) = (Some(block.id), place(block.stack.as_deref()));
                let allocation = Allocation { pool, device, id, ptr, size, place, caller };
                self.process(*tgid, *time).alloc(allocation, *tid);
            }
            // The same block in other words.
            (EventKind::Alloc(_), _) => {}
            (EventKind::Free(free), Change::Freed(block)) => {
                self.process(*tgid, *time).free(free.pool, Some(block.id), free.ptr, *tid, found);
            }
            (EventKind::Free(free), _) => {
                self.process(*tgid, *time).free(free.pool, None, free.ptr, *tid, found);
            }
            (EventKind::Access(access), Change::Used(Some(block))) => {
                let block = ledger.process(*tgid).and_then(|process| process.block(*block));
                let id = block.map(|block| block.id);
                self.process(*tgid, *time).access(access, id, *tid, found);
            }
            (EventKind::Access(_), _) => {}
            (_, Change::Reset { blocks, .. }) => {
                for block in blocks {
                    self.process(*tgid, *time).never_freed(block.pool, Some(block.id), block.ptr, found);
                }
            }
            (_, Change::Ended { .. }) => self.end(*tgid, *time, found),
            _ => self.observe_common(kind, *tgid, *tid, *time, None, found),
        }
    }
}

/// The line of the program, and who called it.
fn place(stack: Option<&Stack>) -> (Option<Frame>, Option<Frame>) {
    let place = stack.and_then(Stack::place);
    (place.cloned(), stack.filter(|_| place.is_some()).and_then(Stack::caller).cloned())
}

/// Host memory is on no device, whatever the thread's.
fn device_of(pool: Pool, row: &Row) -> Option<DeviceId> {
    match &row.fact {
        _ if pool == Pool::Host => None,
        Fact::Event(EventKind::Alloc(alloc)) => alloc.device.or(row.device),
        _ => row.device,
    }
}

#[cfg(test)]
mod tests;
