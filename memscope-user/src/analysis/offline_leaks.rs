//! Leaks between marks: what is allocated between marks A and B should be freed before mark C.
//!
//! A, B and C are marks of one text, one after another. Each device of a process goes by the marks that were set while
//! it was current; a device that has none of its own, and host memory, by those of the device that had the first one.
//! msMemScope knows the rule for driver memory on one device; with [`Config::pool`] set to that pool the answers are
//! the same. Without, driver memory that a pool cuts into blocks is left out: those are looked at themselves.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use serde::Serialize;

use super::marks::Texts;
use crate::dump::read::NumberedRow;
use crate::dump::{Fact, Place, Row};
use crate::model::{DeviceId, DevicePtr, EventKind, Name, Nanos, Pool, Tgid, Tid};
use crate::report::document::StackOf;

/// Texts of marks that are offered in place of one that is not there.
const OTHERS_SHOWN: usize = 3;

#[derive(Debug, Clone)]
pub struct Config {
    /// The text of the marks.
    pub mark: String,
    /// Which of the marks is A, from 0.
    pub start_index: usize,
    /// Only blocks of this pool.
    pub pool: Option<Pool>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    pub mark: String,
    pub start_index: usize,
    pub devices: Vec<DeviceReport>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeviceReport {
    pub pid: Tgid,
    pub device: Place,
    /// Marks of the text that count for the device.
    pub marks: usize,
    /// Ranges of the text in the process. They are no marks.
    pub ranges: usize,
    /// Where there are too few: the texts of the process's marks that come most often, with their number.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub other_marks: Vec<(Name, u64)>,
    /// Marks A, B and C; `None` when there are too few.
    pub between: Option<[MarkAt; 3]>,
    /// Blocks that were allocated between A and B and not freed before C, in order of allocation.
    pub leaks: Vec<Leak>,
}

/// Where a mark stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MarkAt {
    /// Number of its row.
    pub id: u64,
    pub timestamp_ns: Nanos,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Leak {
    /// Number of the row of the allocation.
    pub id: u64,
    pub pool: Pool,
    pub ptr: DevicePtr,
    /// Bytes.
    pub size: u64,
    /// The operator in progress on the thread, else the last one before.
    pub op: Option<Name>,
    #[serde(flatten)]
    pub stack: StackOf,
    pub tid: Tid,
    pub timestamp_ns: Nanos,
}

/// Takes the rows of a dump in order of time, in one pass. What is kept does not depend on their number but on that of
/// the blocks alive between A and C.
#[derive(Debug)]
pub struct OfflineLeaks {
    config: Config,
    processes: BTreeMap<Tgid, Process>,
}

#[derive(Debug, Default)]
struct Process {
    /// The device whose mark was the first: its marks stand for the process.
    marking: Option<Option<DeviceId>>,
    marks: Marks,
    ranges: usize,
    other_marks: Texts,
    places: BTreeMap<Place, Watch>,
    ops: FxHashMap<Tid, Name>,
}

#[derive(Debug, Default)]
struct Watch {
    own_marks: Marks,
    by_own: Blocks,
    by_process: Blocks,
}

/// Blocks allocated between A and B; several at one address when frees between them were lost.
type Blocks = BTreeMap<(Pool, DevicePtr), Vec<Leak>>;

#[derive(Debug, Default)]
struct Marks {
    seen: usize,
    from_start: Vec<MarkAt>,
}

impl Marks {
    fn observe(&mut self, at: MarkAt, start_index: usize) {
        if self.seen >= start_index && self.from_start.len() < 3 {
            self.from_start.push(at);
        }
        self.seen += 1;
    }

    /// Between A and B.
    fn allocations_count(&self) -> bool {
        self.from_start.len() == 1
    }

    /// Between A and C.
    fn frees_count(&self) -> bool {
        matches!(self.from_start.len(), 1 | 2)
    }
}

impl Watch {
    /// Forgets the driver's block that a pool's lies in.
    fn leave_out_segment(&mut self, ptr: DevicePtr) {
        for blocks in [&mut self.by_own, &mut self.by_process] {
            let before = blocks.range(..=(Pool::Hal, ptr)).next_back().map(|(key, leaks)| (*key, leaks));
            if let Some((key, leaks)) = before
                && key.0 == Pool::Hal
                && leaks.iter().any(|leak| ptr.0 - key.1.0 < leak.size)
            {
                blocks.remove(&key);
            }
        }
    }

    /// Takes blocks off, by each of the two sets of marks when their frees count.
    fn take_off(&mut self, process_marks: &Marks, mut off: impl FnMut(&mut Blocks)) {
        if self.own_marks.frees_count() {
            off(&mut self.by_own);
        }
        if process_marks.frees_count() {
            off(&mut self.by_process);
        }
    }
}

impl OfflineLeaks {
    pub fn new(config: Config) -> Self {
        OfflineLeaks { config, processes: BTreeMap::new() }
    }

    pub fn observe(&mut self, numbered: &NumberedRow) {
        let row = &numbered.row;
        let Process { marking, marks, ranges, other_marks, places, ops } =
            self.processes.entry(row.tgid).or_default();
        match &row.fact {
            Fact::OpBegin { name, .. } | Fact::Event(EventKind::Op { name }) => {
                ops.insert(row.tid, name.clone());
            }
            Fact::Event(EventKind::Mark { text, .. }) if **text == *self.config.mark => {
                let at = MarkAt { id: numbered.id, timestamp_ns: row.time };
                if *marking.get_or_insert(row.device) == row.device {
                    marks.observe(at, self.config.start_index);
                }
                if let Some(device) = row.device {
                    let watch = places.entry(Place::Npu(device)).or_default();
                    watch.own_marks.observe(at, self.config.start_index);
                }
            }
            Fact::Event(EventKind::Mark { text, .. }) => other_marks.add(text),
            Fact::Event(EventKind::RangeBegin { text, .. }) if **text == *self.config.mark => *ranges += 1,
            Fact::Event(EventKind::Alloc(alloc)) => {
                if self.config.pool.is_none() && !matches!(alloc.pool, Pool::Hal | Pool::Host) {
                    for watch in places.values_mut() {
                        watch.leave_out_segment(alloc.ptr);
                    }
                }
                let (Some(place), true) =
                    (row.place(), self.config.pool.is_none_or(|pool| pool == alloc.pool))
                else {
                    return;
                };
                let watch = places.entry(place).or_default();
                let block = || Leak {
                    id: numbered.id,
                    pool: alloc.pool,
                    ptr: alloc.ptr,
                    size: alloc.size,
                    op: ops.get(&row.tid).cloned(),
                    stack: StackOf(alloc.stack.clone()),
                    tid: row.tid,
                    timestamp_ns: row.time,
                };
                let key = (alloc.pool, alloc.ptr);
                if watch.own_marks.allocations_count() {
                    watch.by_own.entry(key).or_default().push(block());
                }
                if marks.allocations_count() {
                    watch.by_process.entry(key).or_default().push(block());
                }
            }
            Fact::Event(EventKind::Free(free)) => self.free(row, (free.pool, free.ptr)),
            // Before the trace ends, for what was given back without a free of its own.
            Fact::NeverFreed { pool, ptr } => self.free(row, (*pool, *ptr)),
            Fact::Event(EventKind::DeviceReset { device }) => {
                if let Some(watch) = places.get_mut(&Place::Npu(*device)) {
                    watch.take_off(marks, Blocks::clear);
                }
            }
            _ => {}
        }
    }

    fn free(&mut self, row: &Row, key: (Pool, DevicePtr)) {
        let Some(Process { marks, places, .. }) = self.processes.get_mut(&row.tgid) else { return };
        let off = |blocks: &mut Blocks| drop(blocks.remove(&key));
        match row.place() {
            Some(place) => {
                if let Some(watch) = places.get_mut(&place) {
                    watch.take_off(marks, off);
                }
            }
            // A driver free that does not say where: addresses are unique in a process.
            None => places.values_mut().for_each(|watch| watch.take_off(marks, off)),
        }
    }

    pub fn finish(self) -> Report {
        let Config { mark, start_index, .. } = self.config;
        let mut devices = Vec::new();
        for (pid, process) in self.processes {
            for (device, watch) in process.places {
                let own = watch.own_marks.seen > 0;
                let marks = if own { &watch.own_marks } else { &process.marks };
                let between = <[MarkAt; 3]>::try_from(marks.from_start.as_slice()).ok();
                let blocks = if own { watch.by_own } else { watch.by_process };
                let mut leaks: Vec<Leak> = match between {
                    Some(_) => blocks.into_values().flatten().collect(),
                    None => Vec::new(),
                };
                leaks.sort_by_key(|leak| leak.id);
                let (marks, ranges) = (marks.seen, process.ranges);
                let other_marks = match between {
                    Some(_) => Vec::new(),
                    None => process.other_marks.most_frequent(OTHERS_SHOWN),
                };
                devices.push(DeviceReport { pid, device, marks, ranges, other_marks, between, leaks });
            }
        }
        Report { mark, start_index, devices }
    }
}
