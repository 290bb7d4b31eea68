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
//!
//! Steps that are inferred from operators ([`crate::analysis::infer_steps`]) begin where they are told to, and each ends
//! the one before. A process has either these or its own.

use regex::Regex;

use super::{Event, EventKind, Inferred, Nanos, StepId, Tid};

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

/// Where steps come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StepsFrom {
    /// From the process's marks and ranges, or, as long as it has none that are steps, from its operators.
    #[default]
    MarksOrOps,
    Marks,
    Ops,
    None,
}

impl StepRule {
    /// Whether the event is a mark or the beginning of a range that is a step.
    pub fn begins_step(&self, kind: &EventKind) -> bool {
        match kind {
            EventKind::RangeBegin { text, .. } => self.range(text),
            EventKind::Mark { text, .. } => self.mark(text),
            _ => false,
        }
    }

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
    inferred: Option<Inferred>,
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

    /// Why these are believed to be steps, when they were inferred.
    pub fn inferred(&self) -> Option<Inferred> {
        self.inferred
    }

    pub(super) fn observe(&mut self, event: &Event, rule: &StepRule, from: StepsFrom) -> Boundary {
        let (marks, ops) = match from {
            StepsFrom::MarksOrOps => (true, true),
            StepsFrom::Marks => (true, false),
            StepsFrom::Ops => (false, true),
            StepsFrom::None => (false, false),
        };
        match &event.kind {
            EventKind::StepInferred(inferred) if ops => {
                self.inferred = Some(*inferred);
                self.next(event.time, event.tid, None)
            }
            _ if !marks => Boundary::default(),
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
        self.next(time, tid, range)
    }

    fn next(&mut self, time: Nanos, tid: Tid, range: Option<u64>) -> Boundary {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::{MAIN, Script};

    const WORKER: Tid = Tid(101);
    const OTHER: Tid = Tid(102);

    fn steps(script: &Script, rule: &StepRule) -> Steps {
        let mut steps = Steps::default();
        for event in &script.events {
            steps.observe(event, rule, StepsFrom::MarksOrOps);
        }
        steps
    }

    /// Numbers of steps with the indices of the events that begin and end them.
    fn bounds(steps: &Steps) -> Vec<(u32, u64, Option<u64>)> {
        let index = |time: Nanos| (time.0 - 1_000_000) / 1000;
        steps.list().iter().map(|step| (step.id.0, index(step.begin), step.end.map(index))).collect()
    }

    fn matching(pattern: &str) -> StepRule {
        StepRule::Matching(Regex::new(pattern).unwrap_or_else(|e| panic!("{e}")))
    }

    #[test]
    fn ranges_with_the_text_are_steps() {
        let mut script = Script::new();
        let other = script.range(MAIN, "step start ");
        script.range_end(MAIN, other).step(|_| {}).mark("step start").step(|_| {});
        let steps = steps(&script, &StepRule::StepStart);
        assert_eq!(bounds(&steps), [(1, 2, Some(3)), (2, 5, Some(6))]);
        assert_eq!((steps.current(), steps.last_ended()), (StepId(2), StepId(2)));
    }

    #[test]
    fn nothing_before_the_first_beginning_is_a_step() {
        let mut script = Script::new();
        script.push(MAIN, EventKind::RangeEnd { range: None }).range_end(MAIN, 77);
        let before = steps(&script, &StepRule::StepStart);
        assert_eq!((before.current(), before.last_ended()), (StepId(0), StepId(0)));
        script.range(MAIN, "step start");
        let open = steps(&script, &StepRule::StepStart);
        assert_eq!((open.current(), open.last_ended()), (StepId(1), StepId(0)));
    }

    #[test]
    fn only_its_own_range_ends_a_step() {
        let mut script = Script::new();
        let step = script.range(MAIN, "step start");
        let inner = script.range(MAIN, "forward");
        script.range_end(MAIN, inner).push(MAIN, EventKind::RangeEnd { range: None });
        script.range_end(WORKER, step);
        assert_eq!(
            bounds(&steps(&script, &StepRule::StepStart)),
            [(1, 0, Some(4))],
            "by any thread, by id alone"
        );
    }

    #[test]
    fn a_lost_end_is_made_up_by_the_next_beginning() {
        let mut script = Script::new();
        script.range(MAIN, "step start");
        script.step(|_| {});
        assert_eq!(bounds(&steps(&script, &StepRule::StepStart)), [(1, 0, Some(1)), (2, 1, Some(2))]);
    }

    #[test]
    fn of_nested_ranges_the_inner_are_the_steps() {
        let mut script = Script::new();
        let outer = script.range(MAIN, "step start");
        script.step(|_| {}).step(|_| {}).range_end(MAIN, outer).step(|_| {});
        assert_eq!(
            bounds(&steps(&script, &StepRule::StepStart)),
            [(1, 0, Some(1)), (2, 1, Some(2)), (3, 3, Some(4)), (4, 6, Some(7))]
        );
    }

    #[test]
    fn a_thread_beside_the_open_step_paces_nothing() {
        let mut script = Script::new();
        let main = script.range(MAIN, "step start");
        let worker = script.range(WORKER, "step start");
        script.range_end(WORKER, worker).range_end(MAIN, main);
        let steps = steps(&script, &StepRule::StepStart);
        assert_eq!(bounds(&steps), [(1, 0, Some(3))]);
    }

    #[test]
    fn a_thread_whose_step_never_ends_is_replaced() {
        let mut script = Script::new();
        script.range(MAIN, "step start");
        for _ in 0..TAKEOVER {
            for worker in [WORKER, OTHER] {
                let range = script.range(worker, "step start");
                script.range_end(worker, range);
            }
        }
        let steps = steps(&script, &StepRule::StepStart);
        // The worker's third beginning is event 9; it goes on from there, beside the other one.
        assert_eq!(bounds(&steps), [(1, 0, Some(9)), (2, 9, Some(10)), (3, 11, Some(12))]);
    }

    #[test]
    fn marks_that_match_end_one_step_and_begin_the_next() {
        let mut script = Script::new();
        script
            .mark("iteration 1")
            .mark("loss 0.5")
            .mark_of(WORKER, "iteration 1")
            .mark("iteration 2")
            .mark("done");
        let steps = steps(&script, &matching("^iteration"));
        assert_eq!(bounds(&steps), [(1, 0, Some(3)), (2, 3, None)]);
        assert_eq!((steps.current(), steps.last_ended()), (StepId(2), StepId(1)));
    }

    #[test]
    fn a_pattern_takes_the_place_of_the_default() {
        let mut script = Script::new();
        script.step(|_| {});
        let range = script.range(MAIN, "train_step#7");
        script.range_end(MAIN, range);
        assert_eq!(bounds(&steps(&script, &matching("^train_step"))), [(1, 2, Some(3))]);
    }
}
