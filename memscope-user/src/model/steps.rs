//! Steps: where one iteration of a process ends and the next begins.
//!
//! A step is a range with the text `step start` in any domain, or, with a pattern, a range or a mark whose
//! text matches it.
//!
//! - Steps are numbered from 1 in order of their beginnings; step 0 is what came before. A step whose
//!   beginning was not seen has no number: the end of its range ends nothing.
//! - A range's step ends with that range, and with no other. What happens between its end and the next
//!   beginning still belongs to it.
//! - A mark is beginning and end at once: it ends the step before.
//! - One thread paces the process. A beginning on the thread of the open step ends that step: its end was
//!   lost, or the ranges are nested, and then the inner ones are the steps (the outer range's end comes when
//!   its step is over, and ends nothing). Beginnings on other threads, while a step is open, are iterations
//!   of a worker that runs beside it and are passed over; but when one thread begins [`TAKEOVER`] times in
//!   that time, the open step will hardly end any more, and that thread takes over.

use regex::Regex;

use super::{Event, EventKind, Nanos, StepId, Tid};

/// Text of the range that is a step when no pattern is given: msMemScope's convention.
const STEP_START: &str = "step start";

/// Beginnings of one other thread within an open step after which that thread paces the process.
const TAKEOVER: u32 = 3;

/// What counts as a step.
#[derive(Debug, Clone, Default)]
pub enum StepRule {
    /// A range whose text is `step start`.
    #[default]
    StepStart,
    /// A range or a mark whose text matches.
    Matching(Regex),
}

impl StepRule {
    fn range(&self, text: &str) -> bool {
        match self {
            StepRule::StepStart => text == STEP_START,
            StepRule::Matching(pattern) => pattern.is_match(text),
        }
    }

    fn mark(&self, text: &str) -> bool {
        match self {
            StepRule::StepStart => false,
            StepRule::Matching(pattern) => pattern.is_match(text),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    pub id: StepId,
    pub begin: Nanos,
    /// `None` while it is open.
    pub end: Option<Nanos>,
}

/// The steps of one process.
#[derive(Debug, Default)]
pub struct Steps {
    list: Vec<Step>,
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    tid: Tid,
    /// `None` when a mark began it.
    range: Option<u64>,
    /// Threads that began meanwhile, and how many times.
    rivals: Vec<(Tid, u32)>,
}

/// What an event did to the steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Boundary {
    pub ended: Option<StepId>,
    pub began: Option<StepId>,
}

impl Steps {
    /// In order; at most the last one is open.
    pub fn list(&self) -> &[Step] {
        &self.list
    }

    /// The step that is open, else the one that ended last; 0 before the first.
    pub fn current(&self) -> StepId {
        StepId(self.list.len() as u32)
    }

    /// 0 before the first end.
    pub fn last_ended(&self) -> StepId {
        StepId(self.list.len() as u32 - u32::from(self.open.is_some()))
    }

    pub(super) fn observe(&mut self, event: &Event, rule: &StepRule) -> Boundary {
        match &event.kind {
            EventKind::RangeBegin { range, text, .. } if rule.range(text) => {
                self.begin(event.time, event.tid, Some(*range))
            }
            EventKind::Mark { text, .. } if rule.mark(text) => self.begin(event.time, event.tid, None),
            EventKind::RangeEnd { range: Some(range) }
                if self.open.as_ref().is_some_and(|open| open.range == Some(*range)) =>
            {
                Boundary { ended: self.end(event.time), began: None }
            }
            _ => Boundary::default(),
        }
    }

    fn begin(&mut self, time: Nanos, tid: Tid, range: Option<u64>) -> Boundary {
        if let Some(open) = &mut self.open
            && open.tid != tid
        {
            match open.rivals.iter_mut().find(|(rival, _)| *rival == tid) {
                None => open.rivals.push((tid, 1)),
                Some((_, times)) => *times += 1,
            }
            if open.rivals.iter().all(|(_, times)| *times < TAKEOVER) {
                return Boundary::default();
            }
        }
        let ended = self.end(time);
        self.open = Some(Open { tid, range, rivals: Vec::new() });
        let id = StepId(self.list.len() as u32 + 1);
        self.list.push(Step { id, begin: time, end: None });
        Boundary { ended, began: Some(id) }
    }

    fn end(&mut self, time: Nanos) -> Option<StepId> {
        self.open.take()?;
        let step = self.list.last_mut()?;
        step.end = Some(time);
        Some(step.id)
    }
}
