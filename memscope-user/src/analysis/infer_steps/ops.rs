//! Operators as the detectors see them: numbers instead of names, and the pauses before them.

use rustc_hash::FxHashMap;

use crate::model::{Name, Nanos, Tid};

use super::roles::Roles;

/// Names that are told apart, and transitions from one to another. They come from the target.
const NAMES_MAX: usize = 1 << 16;
const TRANSITIONS_MAX: usize = 1 << 17;

/// How many times the usual pause a long one is, as a logarithm (10 times), and how many pauses must be known.
pub(super) const LONG: f64 = 2.3;
pub(super) const PAUSES_KNOWN: u32 = 4;

/// The number of an operator's name; 0 for those past [`NAMES_MAX`].
pub(super) type OpId = u32;

#[derive(Debug, Clone, Copy)]
pub(super) struct Op {
    /// Counts the operators of the process, from 0.
    pub number: u64,
    pub id: OpId,
    pub tid: Tid,
    /// The one before.
    pub previous: OpId,
    /// Logarithm of the microseconds since then: pauses are compared by how many times longer one is.
    pub pause: f64,
}

/// The names of a process's operators.
#[derive(Debug, Default)]
pub(super) struct Names {
    ids: FxHashMap<Name, OpId>,
    names: Vec<(Name, Roles)>,
}

impl Names {
    pub fn id(&mut self, name: &Name) -> OpId {
        if let Some(id) = self.ids.get(name) {
            return *id;
        }
        if self.names.len() >= NAMES_MAX {
            return 0;
        }
        self.names.push((name.clone(), Roles::of(name)));
        let id = self.names.len() as OpId;
        self.ids.insert(name.clone(), id);
        id
    }

    pub fn roles(&self, id: OpId) -> Roles {
        let known = (id as usize).checked_sub(1).and_then(|at| self.names.get(at));
        known.map(|(_, roles)| *roles).unwrap_or_default()
    }
}

/// A mean of pauses.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Mean {
    count: u32,
    sum: f64,
}

impl Mean {
    pub fn add(&mut self, pause: f64) {
        self.count += 1;
        self.sum += pause;
    }

    pub fn count(self) -> u32 {
        self.count
    }

    /// Of the others, when `part` is one part of these.
    pub fn without(self, part: Mean) -> Mean {
        Mean { count: self.count.saturating_sub(part.count), sum: self.sum - part.sum }
    }

    /// 0 for none.
    pub fn get(self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum / f64::from(self.count) }
    }
}

/// How long a process usually pauses between one operator and another.
#[derive(Debug, Default)]
pub(super) struct Pauses {
    all: Mean,
    by_transition: FxHashMap<(OpId, OpId), Mean>,
}

impl Pauses {
    pub fn add(&mut self, op: &Op) {
        self.all.add(op.pause);
        let transition = (op.previous, op.id);
        if let Some(mean) = self.by_transition.get_mut(&transition) {
            mean.add(op.pause);
        } else if self.by_transition.len() < TRANSITIONS_MAX {
            self.by_transition.entry(transition).or_default().add(op.pause);
        }
    }

    pub fn usual(&self) -> f64 {
        self.all.get()
    }

    /// Whether the program waits here: its pauses are [`LONG`] against all others.
    pub fn are_long(&self, here: Mean) -> bool {
        let others = self.all.without(here);
        others.count() >= PAUSES_KNOWN && here.get() > others.get() + LONG
    }

    pub fn before(&self, op: &Op) -> f64 {
        self.by_transition.get(&(op.previous, op.id)).copied().unwrap_or_default().get()
    }
}

/// Logarithm of a pause in microseconds, 0 for less than one.
pub(super) fn pause(from: Nanos, to: Nanos) -> f64 {
    (to.0.saturating_sub(from.0) as f64 / 1000.0).max(1.0).ln()
}
