//! What a new segment begins with, so that the earlier ones can go.

use std::collections::VecDeque;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::dump::record::{Record, records};
use crate::dump::row::{Fact, Row};
use crate::model::{DevicePtr, EventKind, Pool, Tid};

/// Marks carried over at most. Of a program that sets more, the earliest steps are forgotten, and numbers of steps begin
/// later.
const MARKS: usize = 1 << 16;

/// Rows of a capture that still matter.
#[derive(Default)]
pub(super) struct Alive {
    blocks: FxHashMap<(Pool, DevicePtr), AliveBlock>,
    ops: FxHashMap<Tid, Arc<Numbered>>,
    marks: VecDeque<Numbered>,
    /// Where physical memory is mapped.
    mapped: FxHashMap<DevicePtr, Numbered>,
}

struct Numbered {
    id: u64,
    row: Row,
}

struct AliveBlock {
    allocation: Numbered,
    /// The last operator of the thread.
    op: Option<Arc<Numbered>>,
}

impl Alive {
    pub fn observe(&mut self, id: u64, row: &Row) {
        let numbered = || Numbered { id, row: row.clone() };
        match &row.fact {
            Fact::Event(EventKind::Alloc(alloc)) => {
                let op = self.ops.get(&row.tid).cloned();
                self.blocks.insert((alloc.pool, alloc.ptr), AliveBlock { allocation: numbered(), op });
            }
            Fact::Event(EventKind::Free(free)) => self.end(free.pool, free.ptr),
            Fact::NeverFreed { pool, ptr } => self.end(*pool, *ptr),
            Fact::Event(EventKind::Map { ptr, .. }) => drop(self.mapped.insert(*ptr, numbered())),
            Fact::Event(EventKind::Unmap { ptr }) => drop(self.mapped.remove(ptr)),
            Fact::Event(EventKind::Op { .. }) | Fact::OpBegin { .. } => {
                self.ops.insert(row.tid, Arc::new(numbered()));
            }
            Fact::Event(
                EventKind::Mark { .. } | EventKind::RangeBegin { .. } | EventKind::RangeEnd { .. },
            )
            | Fact::StepEnd { .. } => {
                if self.marks.len() >= MARKS {
                    self.marks.pop_front();
                }
                self.marks.push_back(numbered());
            }
            _ => {}
        }
    }

    fn end(&mut self, pool: Pool, ptr: DevicePtr) {
        // The driver frees by address alone, host memory and device memory alike.
        if self.blocks.remove(&(pool, ptr)).is_none() && pool == Pool::Hal {
            self.blocks.remove(&(Pool::Host, ptr));
        }
    }

    /// Calls `put` with each row to carry over, in order. Of an operator it is the beginning.
    pub fn records(&self, mut put: impl FnMut(u64, &Row, &Record<'_>)) {
        let blocks = self.blocks.values();
        let of_blocks = blocks.flat_map(|block| [Some(&block.allocation), block.op.as_deref()]).flatten();
        let mut rows: Vec<&Numbered> = of_blocks.chain(&self.marks).chain(self.mapped.values()).collect();
        rows.sort_unstable_by_key(|numbered| numbered.id);
        rows.dedup_by_key(|numbered| numbered.id);
        for Numbered { id, row } in rows {
            let mut first = true;
            records(row, |record| {
                if std::mem::take(&mut first) {
                    put(*id, row, &record);
                }
            });
        }
    }
}
