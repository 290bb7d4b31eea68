//! What the events mean: one file per analysis, all over the same event stream.

pub mod compare;
pub mod fluctuation;
pub mod inefficient;
pub mod leaks;
pub mod marks;
pub mod offline_leaks;
pub mod oom;
pub mod reconcile;

use crate::model::{Change, Event, Ledger, StepRule};

use fluctuation::Fluctuation;
use leaks::Leaks;
use marks::Marks;
use oom::OutOfMemory;

/// Something that watches the event stream. The ledger has applied the event already.
pub trait Analysis {
    fn observe(&mut self, event: &Event, change: &Change, ledger: &Ledger);
}

/// The ledger and the analyses that run while events come in: the one thing that live tracing and dump
/// readers feed.
#[derive(Debug, Default)]
pub struct Online {
    pub ledger: Ledger,
    /// `None` when it was not asked for.
    pub leaks: Option<Leaks>,
    pub fluctuation: Fluctuation,
    pub oom: OutOfMemory,
    pub marks: Marks,
}

impl Online {
    pub fn new(rule: StepRule, leaks: bool) -> Self {
        Online { ledger: Ledger::new(rule), leaks: leaks.then(Leaks::default), ..Online::default() }
    }

    /// Feeds one event. What it changed is returned for those who write the events elsewhere.
    pub fn apply(&mut self, event: &Event) -> Change {
        let change = self.ledger.apply(event);
        if let Some(leaks) = &mut self.leaks {
            leaks.observe(event, &change, &self.ledger);
        }
        self.fluctuation.observe(event, &change, &self.ledger);
        self.oom.observe(event, &change, &self.ledger);
        self.marks.observe(event, &change, &self.ledger);
        change
    }
}
