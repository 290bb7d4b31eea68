//! In which phase of training a process is, and what its use of a block in each tells of it.

use rustc_hash::FxHashMap;

use crate::analysis::infer_steps::roles::Roles;
use crate::model::{Access, AccessKind, Name, Tid};

use super::Class;

/// Distinct names whose roles are kept.
const NAMES_MAX: usize = 1 << 14;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Phase {
    #[default]
    Forward,
    Backward,
    Optimizer,
}

/// The phases of one process, told from its operators: backward passes by their names, the optimizer by what only it
/// does, or by arithmetic on the thread that had waited for the backward pass.
#[derive(Debug, Default)]
pub(super) struct Phases {
    now: Phase,
    /// Of the backward pass.
    backward: Option<Tid>,
    /// The latest operator, its thread, and what its name says.
    operator: Option<(Tid, Name, Roles)>,
    roles: FxHashMap<Name, Roles>,
}

impl Phases {
    pub fn operator(&mut self, tid: Tid, name: &Name) {
        if self.roles.len() >= NAMES_MAX {
            self.roles.clear();
        }
        let roles = *self.roles.entry(name.clone()).or_insert_with(|| Roles::of(name));
        let arithmetic = roles.update || roles.elementwise || roles.zeroes || roles.fills;
        self.now = match self.now {
            _ if roles.backward => {
                self.backward = Some(tid);
                Phase::Backward
            }
            Phase::Backward if roles.update => Phase::Optimizer,
            Phase::Backward if self.backward != Some(tid) && arithmetic => Phase::Optimizer,
            Phase::Backward if self.backward != Some(tid) => Phase::Forward,
            Phase::Optimizer if !arithmetic => Phase::Forward,
            now => now,
        };
        self.operator = Some((tid, name.clone(), roles));
    }

    pub fn step(&mut self) {
        self.now = Phase::Forward;
    }

    /// The phase of a use and the roles of its operator, if they tell anything: a copy by the runtime does not, and
    /// neither does setting to zero.
    pub fn of(&self, tid: Tid, access: &Access) -> Option<(Phase, Roles)> {
        let (of, name, roles) = self.operator.as_ref()?;
        let tells = !roles.zeroes && *of == tid && access.op.as_ref() == Some(name);
        tells.then_some((self.now, *roles))
    }
}

/// How a block has been used so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Uses(u8);

impl Uses {
    const ANY: u8 = 1 << 0;
    const FORWARD: u8 = 1 << 1;
    const BACKWARD: u8 = 1 << 2;
    const OPTIMIZER: u8 = 1 << 3;
    const CHANGED: u8 = 1 << 4;
    const COMPUTED: u8 = 1 << 5;

    pub fn add(&mut self, told: Option<(Phase, Roles)>, kind: AccessKind) {
        self.0 |= Self::ANY;
        self.0 |= match told {
            None => 0,
            Some((Phase::Forward, _)) => Self::FORWARD,
            Some((Phase::Backward, _)) => Self::BACKWARD,
            Some((Phase::Optimizer, roles)) => {
                let changed = kind != AccessKind::Read;
                // What is copied to is a result of nothing, and what is read is part of an update when it changes another.
                let computed = !roles.fills && (changed || roles.in_place || roles.update);
                let of = |which, bit| if which { bit } else { 0 };
                Self::OPTIMIZER | of(changed, Self::CHANGED) | of(computed, Self::COMPUTED)
            }
        };
    }

    fn has(self, use_: u8) -> bool {
        self.0 & use_ != 0
    }

    /// - A weight is computed with, and changed by the optimizer.
    /// - A gradient comes from the backward pass and goes to the optimizer.
    /// - What only the optimizer uses, and computes with, is its state. Copies of weights that are kept are not.
    /// - Everything else that is used is data, on its way or kept.
    pub fn class(self) -> Class {
        match self {
            _ if !self.has(Self::ANY) => Class::Unknown,
            _ if self.has(Self::OPTIMIZER) && self.has(Self::FORWARD) && self.has(Self::CHANGED) => {
                Class::Weight
            }
            _ if self.has(Self::FORWARD) || !self.has(Self::OPTIMIZER) => Class::Activation,
            _ if self.has(Self::BACKWARD) => Class::Gradient,
            _ if self.has(Self::COMPUTED) => Class::OptimizerState,
            _ => Class::Activation,
        }
    }
}
