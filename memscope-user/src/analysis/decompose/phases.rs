//! In which phase of training a process is, and what its use of a block in each tells of it.

use rustc_hash::FxHashMap;

use crate::analysis::infer_steps::roles::Roles;
use crate::model::{Access, AccessKind, AllocationId, Name, Tid};

use super::Class;

/// Distinct names whose roles are kept.
const NAMES_MAX: usize = 1 << 14;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Phase {
    #[default]
    Forward,
    Backward,
    /// After a backward pass or an optimizer: a forward pass, if a backward pass follows, or the norms of gradients, checks
    /// and the like, if an optimizer does.
    Between,
    Optimizer,
}

/// What became of the phase between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Between {
    WasForward,
    WasNot,
}

/// The phases of one process, told from its operators: backward passes by the threads that the main one waits for, or by
/// names, the optimizer by what only it does, or by arithmetic on the thread that had waited for the backward pass.
#[derive(Debug, Default)]
pub(super) struct Phases {
    now: Phase,
    /// The thread of the first operator: never one of a backward pass only.
    first: Option<Tid>,
    /// Threads of nothing but backward passes.
    autograd: Vec<Tid>,
    /// Of the latest backward pass.
    backward: Option<Tid>,
    /// The latest operator, its thread, and what its name says.
    operator: Option<(Tid, Name, Roles)>,
    /// The block that it changes in place by arithmetic.
    target: Option<AllocationId>,
    roles: FxHashMap<Name, Roles>,
}

impl Phases {
    /// A thread that has no call of the program's own: the main thread waits for it.
    pub fn waited_for(&mut self, tid: Tid) {
        if self.first.is_some_and(|first| first != tid) && !self.autograd.contains(&tid) {
            self.autograd.push(tid);
        }
    }

    pub fn operator(&mut self, tid: Tid, name: &Name) -> Option<Between> {
        if self.roles.len() >= NAMES_MAX {
            self.roles.clear();
        }
        let roles = *self.roles.entry(name.clone()).or_insert_with(|| Roles::of(name));
        let arithmetic = roles.update || roles.elementwise || roles.zeroes || roles.fills;
        self.first.get_or_insert(tid);
        if roles.backward {
            self.waited_for(tid);
        }
        let before = self.now;
        self.now = match before {
            _ if roles.backward || self.autograd.contains(&tid) => {
                self.backward = Some(tid);
                Phase::Backward
            }
            Phase::Backward | Phase::Between if roles.update => Phase::Optimizer,
            Phase::Backward if self.backward != Some(tid) && arithmetic => Phase::Optimizer,
            Phase::Backward if self.backward != Some(tid) => Phase::Between,
            Phase::Optimizer if !arithmetic => Phase::Between,
            now => now,
        };
        self.operator = Some((tid, name.clone(), roles));
        self.target = None;
        match (before, self.now) {
            (Phase::Between, Phase::Backward) => Some(Between::WasForward),
            (Phase::Between, Phase::Optimizer) => Some(Between::WasNot),
            _ => None,
        }
    }

    pub fn step(&mut self) -> Option<Between> {
        let before = std::mem::take(&mut self.now);
        (before == Phase::Between).then_some(Between::WasNot)
    }

    /// More has been used between than anything but a forward pass uses.
    pub fn is_forward(&mut self) {
        self.now = Phase::Forward;
    }

    /// A gradient or a state that is changed in place: the optimizer, though its operators are those of others, too.
    pub fn decide(&mut self, told: Option<(Phase, Roles)>, uses: Uses, kind: AccessKind) -> Option<Between> {
        let Some((Phase::Between, roles)) = told else { return None };
        let is_optimizer = roles.changes && kind != AccessKind::Read && uses.is_gradient_or_state();
        is_optimizer.then(|| {
            self.now = Phase::Optimizer;
            Between::WasNot
        })
    }

    /// What the operator in progress changes, when it makes it of a weight: an average of weights, a copy as it were.
    pub fn averaged(
        &mut self,
        id: AllocationId,
        told: Option<(Phase, Roles)>,
        uses: Uses,
        kind: AccessKind,
    ) -> Option<AllocationId> {
        match told {
            Some((_, roles)) if roles.changes && kind != AccessKind::Read => {
                self.target = Some(id);
                None
            }
            Some(_) if kind == AccessKind::Read && uses.class() == Class::Weight => self.target,
            _ => None,
        }
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
    const AVERAGE: u8 = 1 << 6;

    pub fn add(&mut self, told: Option<(Phase, Roles)>, kind: AccessKind) {
        self.0 |= Self::ANY;
        self.0 |= match told {
            None | Some((Phase::Between, _)) => 0,
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

    pub fn add_forward(&mut self) {
        self.0 |= Self::FORWARD;
    }

    pub fn add_average(&mut self) {
        self.0 |= Self::AVERAGE;
    }

    fn is_gradient_or_state(self) -> bool {
        !self.has(Self::FORWARD) && self.has(Self::BACKWARD | Self::OPTIMIZER)
    }

    fn has(self, use_: u8) -> bool {
        self.0 & use_ != 0
    }

    /// - A weight is computed with, and changed by the optimizer.
    /// - A gradient comes from the backward pass and goes to the optimizer.
    /// - What only the optimizer uses, and computes with, is its state. Copies of weights that are kept are not, nor their
    ///   averages.
    /// - Everything else that is used is data, on its way or kept.
    pub fn class(self) -> Class {
        match self {
            _ if !self.has(Self::ANY) => Class::Unknown,
            _ if self.has(Self::OPTIMIZER) && self.has(Self::FORWARD) && self.has(Self::CHANGED) => {
                Class::Weight
            }
            _ if self.has(Self::FORWARD) || !self.has(Self::OPTIMIZER) => Class::Activation,
            _ if self.has(Self::BACKWARD) => Class::Gradient,
            _ if self.has(Self::COMPUTED) && !self.has(Self::AVERAGE) => Class::OptimizerState,
            _ => Class::Activation,
        }
    }
}
