//! What the events mean: one file per analysis, all over the same event stream.

pub mod compare;
pub mod decompose;
pub mod fluctuation;
pub mod growth;
pub mod inefficient;
pub mod infer_steps;
pub mod leaks;
pub mod marks;
pub mod offline_leaks;
pub mod oom;
pub mod reconcile;
pub mod reserve;

use crate::model::{Change, Event, Ledger, Nanos, StepRule, StepSet, StepsFrom};

use decompose::Decompose;
use fluctuation::Fluctuation;
use growth::Growth;
use inefficient::Inefficient;
use infer_steps::StepInference;
use leaks::Leaks;
use marks::Marks;
use oom::OutOfMemory;
use reserve::Reserve;

/// Something that watches the event stream. The ledger has applied the event already.
pub trait Analysis {
    fn observe(&mut self, event: &Event, change: &Change, ledger: &Ledger);
}

/// The ledger and the analyses that run while events come in: the one thing that live tracing and dump
/// readers feed.
///
/// Events go in by [`Online::feed`], which holds some back as long as it is not known whether a step begins before them,
/// and by [`Online::finish`] at the end.
#[derive(Debug, Default)]
pub struct Online {
    inference: StepInference,
    /// Events that the inference has let go.
    ready: Vec<Event>,
    pub ledger: Ledger,
    /// Steps of which blocks are reported. Judged they are by all that is seen.
    pub shown_steps: StepSet,
    /// `None` when it was not asked for.
    pub leaks: Option<Leaks>,
    /// With the leaks.
    pub growth: Option<Growth>,
    pub fluctuation: Fluctuation,
    pub reserve: Reserve,
    pub oom: OutOfMemory,
    pub marks: Marks,
    /// `None` when it was not asked for.
    pub inefficient: Option<Inefficient>,
    /// `None` when it was not asked for.
    pub decompose: Option<Decompose>,
}

impl Online {
    pub fn new(rule: StepRule, leaks: bool) -> Self {
        Online {
            ledger: Ledger::new(rule),
            leaks: leaks.then(Leaks::default),
            growth: leaks.then(Growth::default),
            ..Online::default()
        }
    }

    /// Infers steps from operators as well, or from these alone. Without this, only [`StepsFrom::Marks`].
    pub fn with_steps_from(self, rule: &StepRule, from: StepsFrom) -> Self {
        let (inference, ledger) = (StepInference::new(rule.clone(), from), self.ledger.with_steps_from(from));
        Online { inference, ledger, ..self }
    }

    /// Reports blocks of these steps only.
    pub fn showing_steps(self, steps: StepSet) -> Self {
        Online { leaks: self.leaks.map(|_| Leaks::showing(steps.clone())), shown_steps: steps, ..self }
    }

    /// Lists so many of the largest and of the latest blocks with each out-of-memory; `None`: as many as usual.
    pub fn with_oom_blocks(self, blocks: Option<usize>) -> Self {
        Online { oom: blocks.map_or_else(OutOfMemory::default, OutOfMemory::listing), ..self }
    }

    pub fn with_inefficient(self, config: inefficient::Config) -> Self {
        Online { inefficient: Some(Inefficient::new(config)), ..self }
    }

    pub fn with_decompose(self) -> Self {
        Online { decompose: Some(Decompose::default()), ..self }
    }

    /// Feeds one event. Events that are certain are told on, with what they changed, to those who write them elsewhere.
    pub fn feed(&mut self, event: Event, seen: impl FnMut(&Event, &Change, &Ledger)) {
        self.pass(|inference, ready| inference.push(event, ready), seen);
    }

    /// Lets go of all that has been held back since before a time.
    pub fn release(&mut self, before: Nanos, seen: impl FnMut(&Event, &Change, &Ledger)) {
        self.pass(|inference, ready| inference.release(before, ready), seen);
    }

    /// Lets go of everything, for no more is to come.
    pub fn finish(&mut self, seen: impl FnMut(&Event, &Change, &Ledger)) {
        self.pass(StepInference::flush, seen);
        if let Some(leaks) = &mut self.leaks {
            leaks.finish();
        }
        if let Some(inefficient) = &mut self.inefficient {
            inefficient.finish(&mut |_| {});
        }
    }

    fn pass(
        &mut self,
        infer: impl FnOnce(&mut StepInference, &mut Vec<Event>),
        mut seen: impl FnMut(&Event, &Change, &Ledger),
    ) {
        let mut ready = std::mem::take(&mut self.ready);
        infer(&mut self.inference, &mut ready);
        for event in ready.drain(..) {
            let change = self.apply(&event);
            seen(&event, &change, &self.ledger);
        }
        self.ready = ready;
    }

    /// Applies one event as it is, without inference, and returns what it changed.
    pub fn apply(&mut self, event: &Event) -> Change {
        let change = self.ledger.apply(event);
        if let Some(leaks) = &mut self.leaks {
            leaks.observe(event, &change, &self.ledger);
        }
        if let Some(growth) = &mut self.growth {
            growth.observe(event, &change, &self.ledger);
        }
        self.fluctuation.observe(event, &change, &self.ledger);
        self.reserve.observe(event, &change, &self.ledger);
        self.oom.observe(event, &change, &self.ledger);
        self.marks.observe(event, &change, &self.ledger);
        if let Some(inefficient) = &mut self.inefficient {
            inefficient.observe(event, &change, &self.ledger);
        }
        if let Some(decompose) = &mut self.decompose {
            decompose.observe(event, &change, &self.ledger);
        }
        change
    }
}
