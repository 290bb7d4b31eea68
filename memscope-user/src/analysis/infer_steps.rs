//! Steps of processes that do not say where theirs begin, from the operators that they run.
//!
//! Training loops are known by their optimizer ([`training`]), other loops by their repetition ([`repetition`]). Where
//! a step begins is known only later: when the backward of the next step begins, or with the operator after the pause.
//! So that blocks get their right steps all the same, events are held back until then, and go on with an
//! [`EventKind::StepInferred`] between them: at the pause between the two operators that is usually the longest.
//!
//! Held are the events since the last backward, and in the beginning those since the first operator of a process that is
//! seen from its start: so its first step is found too. At most [`HELD_MAX`] events of a process, and, live, none for
//! long ([`StepInference::release`]).
//!
//! What proves to have been no steps (layers, parts of steps, or what went before the first mark of a process that
//! marks its steps after all) is taken back, by [`EventKind::StepsRetracted`].

mod gaps;
mod ops;
mod repetition;
pub(super) mod roles;
mod training;

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::model::{Basis, Event, EventKind, Inferred, Name, Nanos, StepRule, StepsFrom, Tgid, Tid};

use gaps::{Gaps, like};
use ops::{Names, Op, OpId, Pauses, pause};
use repetition::{Begins, Repetition};
use training::Training;

/// Events of a process that are held back.
const HELD_MAX: usize = 1 << 16;

/// Operators of a process after which what repeats is believed to be steps; fewer, when there were many periods.
const OPERATORS_SURE: u64 = 2048;
const OPERATORS_SOME: u64 = 256;
const PERIODS_SURE: u32 = 16;

/// Operators that came in a row as the period had it: more than chance does.
const FORETOLD: u64 = 64;

/// Equal periods in a row that are believed earlier, if the program waits between them: as much as layers never do.
const PERIODS_PAUSED: u32 = 6;

/// Of all operators, the part in equal periods in a row that are believed earlier.
const EXPLAINED: u64 = 2;
const PENDING_MAX: usize = 4096;

/// Kinds of periods that are counted.
const SIGNATURES_MAX: usize = 64;

/// A stage before the ledger: events go in, and come out in order, with inferred steps between them.
#[derive(Debug)]
pub struct StepInference {
    rule: StepRule,
    from: StepsFrom,
    /// `None`: marks its steps.
    processes: FxHashMap<Tgid, Option<Process>>,
}

#[derive(Debug, Default)]
struct Process {
    from_start: bool,
    /// Events were let go that might have been before the first step.
    gave_up: bool,
    names: Names,
    pauses: Pauses,
    operators: u64,
    last: Option<(OpId, Nanos)>,
    training: Training,
    /// `None` once the optimizer is known.
    repetition: Option<Repetition>,
    /// The next operator may begin a step, by repetition.
    may_begin: bool,
    /// Beginnings of steps by repetition, as long as they are not sure.
    pending: Pending,
    held: VecDeque<Held>,
    gaps: Gaps,
    periods: Periods,
}

#[derive(Debug)]
struct Held {
    event: Event,
    /// Its number, if it is an operator.
    operator: Option<u64>,
}

/// What may turn out to be steps.
#[derive(Debug, Default)]
struct Pending {
    /// Operator and signature.
    begins: Vec<(u64, u64)>,
    /// Periods that have ended.
    periods: u32,
    /// Operators that do more than to change, fill or copy elements.
    computing: u64,
    allocations: u64,
    frees: u64,
}

/// How alike the periods are.
#[derive(Debug, Default)]
struct Periods {
    basis: Option<Basis>,
    total: u32,
    by_signature: Vec<(u64, u32)>,
}

/// Infers nothing.
impl Default for StepInference {
    fn default() -> Self {
        StepInference::new(StepRule::default(), StepsFrom::Marks)
    }
}

impl StepInference {
    pub fn new(rule: StepRule, from: StepsFrom) -> Self {
        StepInference { rule, from, processes: FxHashMap::default() }
    }

    /// Takes an event. What may go on is put into `out`.
    pub fn push(&mut self, event: Event, out: &mut Vec<Event>) {
        if matches!(self.from, StepsFrom::Marks | StepsFrom::None) {
            out.push(event);
            return;
        }
        let marked = self.from == StepsFrom::MarksOrOps && self.rule.begins_step(&event.kind);
        let state = self.processes.entry(event.tgid).or_insert_with(|| {
            Some(Process { repetition: Some(Repetition::default()), ..Process::default() })
        });
        let Some(process) = state else {
            if matches!(event.kind, EventKind::Exec | EventKind::Exit) {
                self.processes.remove(&event.tgid);
            }
            out.push(event);
            return;
        };
        match &event.kind {
            EventKind::Exec | EventKind::Exit => {
                process.flush(out);
                self.processes.remove(&event.tgid);
                out.push(event);
            }
            _ if marked => {
                process.flush(out);
                process.retract(&event, out);
                *state = None;
                out.push(event);
            }
            EventKind::Op { name } => {
                let name = name.clone();
                process.operator(&name, event, out);
            }
            EventKind::AclInit => {
                process.from_start |= process.operators == 0;
                process.other(event, out);
            }
            _ => process.other(event, out),
        }
    }

    /// Lets go of all that happened before: what is shown live must not be old.
    pub fn release(&mut self, before: Nanos, out: &mut Vec<Event>) {
        for process in self.processes.values_mut().flatten() {
            while process.held.front().is_some_and(|held| held.event.time < before) {
                process.gave_up = true;
                out.extend(process.held.pop_front().map(|held| held.event));
            }
        }
    }

    /// Lets go of everything.
    pub fn flush(&mut self, out: &mut Vec<Event>) {
        self.processes.values_mut().flatten().for_each(|process| process.flush(out));
    }
}

impl Process {
    fn operator(&mut self, name: &Name, event: Event, out: &mut Vec<Event>) {
        let (id, now, tid) = (self.names.id(name), event.time, event.tid);
        let (previous, pause) = self.last.map_or((0, 0.0), |(id, time)| (id, pause(time, now)));
        let op = Op { number: self.operators, id, tid, previous, pause };
        self.operators += 1;
        self.last = Some((id, now));
        self.held.push_back(Held { event, operator: Some(op.number) });
        self.pauses.add(&op);

        let told = self.training.observe(op, &self.names, &self.pauses, self.from_start);
        if self.training.is_found() && self.repetition.is_some() {
            self.repetition = None;
            self.may_begin = false;
            self.retract_at_end(out);
        }
        match told {
            None => {}
            Some(training::Told::Retract) => self.retract_at_end(out),
            Some(training::Told::Boundary { first, at, signature }) => {
                if let Some(first) = first.filter(|first| self.holds(*first)) {
                    self.begin_step(first, tid, Basis::Optimizer, None, out);
                }
                self.begin_step(at, tid, Basis::Optimizer, Some(signature), out);
            }
        }
        if let Some(repetition) = &mut self.repetition {
            let told = repetition.observe(&op);
            self.may_begin = repetition.may_end_with(&op);
            self.repeated(&op, told, out);
        }
        self.let_go(out);
    }

    fn repeated(&mut self, op: &Op, told: repetition::Told, out: &mut Vec<Event>) {
        if told.retract {
            self.retract_at_end(out);
        }
        if told.anew {
            self.pending = Pending::default();
        }
        let roles = self.names.roles(op.id);
        self.pending.computing += u64::from(!roles.in_place && !roles.elementwise);
        let Some(begins) = told.begins else { return };
        self.pending.begin(op.number, begins);
        if (self.periods.basis.is_some() || self.is_sure(begins)) && !self.training.may_find() {
            for (number, signature) in std::mem::take(&mut self.pending.begins) {
                if number == op.number || self.holds(number) {
                    self.begin_step(number, op.tid, Basis::Repetition, Some(signature), out);
                }
            }
        }
    }

    /// Layers repeat too, and parameters of an optimizer or of a model that is loaded: it takes a while to tell.
    fn is_sure(&self, begins: Begins) -> bool {
        let pending = &self.pending;
        let waits = self.pauses.are_long(begins.pauses);
        let long = self.operators >= OPERATORS_SURE
            || self.operators >= OPERATORS_SOME && pending.periods >= PERIODS_SURE;
        let alike = u64::from(begins.alike);
        let foretold = alike.saturating_sub(1) * begins.period >= FORETOLD;
        let explained = EXPLAINED * alike * begins.period >= self.operators;
        // What builds something up keeps it.
        let works = pending.computing > 0 && 2 * pending.frees >= pending.allocations;
        // One operator over and over is no layer, and no cell of a recurrent network.
        let often =
            waits && begins.alike >= PERIODS_PAUSED || begins.period == 1 && begins.alike >= PERIODS_SURE;
        long && (waits || foretold) || explained && works && often
    }

    fn holds(&self, number: u64) -> bool {
        self.held.iter().any(|held| held.operator == Some(number))
    }

    fn other(&mut self, event: Event, out: &mut Vec<Event>) {
        match event.kind {
            EventKind::Alloc(_) => self.pending.allocations += 1,
            EventKind::Free(_) => self.pending.frees += 1,
            _ => {}
        }
        if self.held.is_empty() {
            out.push(event);
        } else {
            self.held.push_back(Held { event, operator: None });
            self.let_go(out);
        }
    }

    /// Lets go of what no step can begin before.
    fn let_go(&mut self, out: &mut Vec<Event>) {
        let first_step = self.from_start && !self.gave_up && self.periods.basis.is_none();
        if !first_step && !self.training.is_open() && !self.may_begin {
            self.flush(out);
        }
        while self.held.len() > HELD_MAX {
            self.gave_up = true;
            out.extend(self.held.pop_front().map(|held| held.event));
        }
    }

    fn flush(&mut self, out: &mut Vec<Event>) {
        out.extend(self.held.drain(..).map(|held| held.event));
    }

    /// Begins a step with an operator: in the usually longest pause since the one before it.
    fn begin_step(&mut self, number: u64, tid: Tid, basis: Basis, ended: Option<u64>, out: &mut Vec<Event>) {
        let at = match self.held.iter().position(|held| held.operator == Some(number)) {
            Some(at) => at,
            // It has gone on: better late than never, but no first step.
            None if self.periods.basis.is_some() => 0,
            None => return,
        };
        let since = self.held.range(..at).rposition(|held| held.operator.is_some()).map_or(0, |op| op + 1);
        let pauses = (since..=at).map(|index| {
            let before = self.held[index.saturating_sub(1)].event.time;
            let event = &self.held[index].event;
            (like(&event.kind), event.time.0.saturating_sub(before.0))
        });
        let place = since + self.gaps.usually_longest(&pauses.collect::<Vec<_>>());
        out.extend(self.held.drain(..place).map(|held| held.event));
        let Some(next) = self.held.front() else { return };
        let (time, tgid) = (next.event.time, next.event.tgid);
        let inferred = self.periods.begin(basis, ended);
        out.push(Event { time, tgid, tid, kind: EventKind::StepInferred(inferred) });
    }

    fn retract_at_end(&mut self, out: &mut Vec<Event>) {
        if self.periods.basis.is_none() {
            return;
        }
        // The last one is the operator that proved it, with which a step may begin.
        let Some(last) = self.held.pop_back() else { return };
        self.flush(out);
        self.retract(&last.event, out);
        self.held.push_back(last);
    }

    fn retract(&mut self, event: &Event, out: &mut Vec<Event>) {
        if self.periods.basis.is_some() {
            self.periods = Periods::default();
            let (time, tgid, tid) = (event.time, event.tgid, event.tid);
            out.push(Event { time, tgid, tid, kind: EventKind::StepsRetracted });
        }
    }
}

impl Pending {
    fn begin(&mut self, number: u64, begins: Begins) {
        let Begins { signature, period, alike, .. } = begins;
        let before = if self.periods == 0 && alike > 1 { u64::from(alike) } else { 0 };
        for ago in (0..=before).rev() {
            if let Some(number) = number.checked_sub(ago * period)
                && self.begins.len() < PENDING_MAX
            {
                self.begins.push((number, signature));
            }
        }
        self.periods += 1;
    }
}

impl Periods {
    /// Counts the period that ended, if one did.
    fn begin(&mut self, basis: Basis, ended: Option<u64>) -> Inferred {
        if let (Some(_), Some(signature)) = (self.basis, ended) {
            self.total += 1;
            match self.by_signature.iter_mut().find(|(known, _)| *known == signature) {
                Some((_, times)) => *times += 1,
                None => {
                    if self.by_signature.len() == SIGNATURES_MAX
                        && let Some(rarest) = (0..SIGNATURES_MAX).min_by_key(|at| self.by_signature[*at].1)
                    {
                        self.by_signature.swap_remove(rarest);
                    }
                    self.by_signature.push((signature, 1));
                }
            }
        }
        self.basis = Some(basis);
        let equal = self.by_signature.iter().map(|(_, times)| *times).max().unwrap_or(0);
        Inferred { basis, periods: self.total, equal }
    }
}

#[cfg(test)]
mod tests;
