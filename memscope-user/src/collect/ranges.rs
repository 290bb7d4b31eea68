//! Which end belongs to which range.
//!
//! A range's id would tell, but it is 0 whenever no profiler listens, which is the rule. Then ranges of one
//! thread and domain nest.

use rustc_hash::{FxHashMap, FxHashSet};

use crate::model::{Name, Tid};

/// Open ranges and known ids kept for a process. A target that never ends its ranges loses the oldest.
const MOST: usize = 4096;

/// The library through which a range was begun: an end must come through the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Through {
    /// torch_npu's `rangeStart`/`rangeEnd`.
    Torch,
    /// torch_npu's `rangePush`/`rangePop`.
    TorchStack,
    /// libms_tools_ext.so.
    Mstx,
    /// CANN's Python module.
    Python,
}

#[derive(Debug)]
struct Open {
    range: u64,
    tid: Tid,
    through: Through,
    domain: Option<Name>,
    id: u64,
}

/// The open ranges of one process.
#[derive(Debug, Default)]
pub struct Ranges {
    last: u64,
    open: Vec<Open>,
    ids: FxHashMap<u64, u64>,
    /// Ids of ranges that were reported through another library already.
    duplicates: FxHashSet<u64>,
}

impl Ranges {
    /// A range begins; the number by which its end will name it.
    pub fn begin(&mut self, tid: Tid, through: Through, domain: Option<Name>) -> u64 {
        self.last += 1;
        if self.open.len() >= MOST {
            let oldest = self.open.remove(0);
            self.ids.remove(&oldest.id);
        }
        self.open.push(Open { range: self.last, tid, through, domain, id: 0 });
        self.last
    }

    /// The id of the range that the thread has just begun became known.
    pub fn name(&mut self, tid: Tid, through: Through, id: u64) {
        if id == 0 {
            return;
        }
        let latest = self.open.iter_mut().rev().find(|r| r.tid == tid && r.through == through);
        if let Some(range) = latest.filter(|r| r.id == 0) {
            range.id = id;
            self.ids.insert(id, range.range);
        }
    }

    pub fn mark_duplicate(&mut self, id: u64) {
        if id != 0 && self.duplicates.len() < MOST {
            self.duplicates.insert(id);
        }
    }

    /// Whether the end with this id belongs to a range that was dropped as a duplicate.
    pub fn is_duplicate(&mut self, id: u64) -> bool {
        self.duplicates.remove(&id)
    }

    /// A range ends: which one. `None` when its beginning was not seen.
    pub fn end(&mut self, tid: Tid, through: Through, domain: Option<&Name>, id: u64) -> Option<u64> {
        if through == Through::Mstx
            && let Some(range) = self.ids.remove(&id)
        {
            self.open.retain(|open| open.range != range);
            return Some(range);
        }
        let fits = |open: &Open| open.through == through && open.id == 0 && open.domain.as_ref() == domain;
        let own = self.open.iter().rposition(|open| open.tid == tid && fits(open));
        // A range may be begun by one thread and ended by another.
        let at = own.or_else(|| self.open.iter().rposition(fits))?;
        Some(self.open.remove(at).range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Tid = Tid(1);
    const B: Tid = Tid(2);

    #[test]
    fn ranges_without_ids_nest_by_thread_and_domain() {
        let mut ranges = Ranges::default();
        let other: Name = "communication".into();
        let step = ranges.begin(A, Through::Torch, None);
        let elsewhere = ranges.begin(B, Through::Torch, None);
        let inner = ranges.begin(A, Through::Torch, None);
        let domain = ranges.begin(A, Through::Torch, Some(other.clone()));
        assert_eq!(ranges.end(A, Through::Torch, None, 0), Some(inner));
        assert_eq!(ranges.end(A, Through::Torch, Some(&other), 0), Some(domain));
        assert_eq!(ranges.end(A, Through::Torch, None, 0), Some(step));
        assert_eq!(ranges.end(A, Through::Torch, None, 0), Some(elsewhere));
        assert_eq!(ranges.end(A, Through::Torch, None, 0), None);
    }

    #[test]
    fn ids_name_ranges_across_threads_and_out_of_order() {
        let mut ranges = Ranges::default();
        let first = ranges.begin(A, Through::Mstx, None);
        ranges.name(A, Through::Mstx, 71);
        let second = ranges.begin(A, Through::Mstx, None);
        ranges.name(A, Through::Mstx, 72);
        assert_eq!(ranges.end(B, Through::Mstx, None, 71), Some(first));
        assert_eq!(ranges.end(A, Through::Mstx, None, 72), Some(second));
        assert_eq!(ranges.end(A, Through::Mstx, None, 73), None);
    }

    #[test]
    fn unending_ranges_do_not_fill_memory() {
        let mut ranges = Ranges::default();
        for id in 1..=3 * MOST as u64 {
            ranges.begin(A, Through::Mstx, None);
            ranges.name(A, Through::Mstx, id);
        }
        assert_eq!(ranges.open.len(), MOST);
        assert!(ranges.ids.len() <= MOST);
    }
}
