//! Which marks and ranges a process sets, so that a report without steps can say what would make one.

use rustc_hash::FxHashMap;

use crate::model::{Change, Event, EventKind, Ledger, Name};

use super::Analysis;

/// Texts that are counted per process. Texts come from the target, and some carry a number each time.
const TEXTS_MAX: usize = 1000;

#[derive(Debug, Default)]
pub struct Marks {
    /// By position in [`Ledger::processes`].
    processes: Vec<Texts>,
}

/// Texts of a process, with how often it gave them.
#[derive(Debug, Default)]
pub(super) struct Texts(FxHashMap<Name, u64>);

impl Analysis for Marks {
    fn observe(&mut self, event: &Event, _: &Change, ledger: &Ledger) {
        let (EventKind::Mark { text, .. } | EventKind::RangeBegin { text, .. }) = &event.kind else { return };
        let Some(position) = ledger.position(event.tgid) else { return };
        if self.processes.len() <= position {
            self.processes.resize_with(position + 1, Texts::default);
        }
        self.processes[position].add(text);
    }
}

impl Marks {
    /// The texts that the process at this position of [`Ledger::processes`] gave most often, with their number.
    pub fn most_frequent(&self, position: usize, at_most: usize) -> Vec<(Name, u64)> {
        self.processes.get(position).map(|texts| texts.most_frequent(at_most)).unwrap_or_default()
    }
}

impl Texts {
    pub fn add(&mut self, text: &Name) {
        if let Some(times) = self.0.get_mut(text) {
            *times += 1;
        } else if self.0.len() < TEXTS_MAX {
            self.0.insert(text.clone(), 1);
        }
    }

    pub fn most_frequent(&self, at_most: usize) -> Vec<(Name, u64)> {
        let mut texts: Vec<(Name, u64)> = self.0.iter().map(|(text, times)| (text.clone(), *times)).collect();
        texts.sort_by(|(a, a_times), (b, b_times)| b_times.cmp(a_times).then_with(|| a.cmp(b)));
        texts.truncate(at_most);
        texts
    }
}
