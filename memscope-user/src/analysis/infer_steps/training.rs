//! Steps of training loops: forward, backward, optimizer.
//!
//! Backward is known by its operators' names, and by its thread when that is not the program's (as in PyTorch). What the
//! program's own thread does between two backwards is a run:
//!
//! - without an optimizer, it is the next forward of an accumulated gradient, and no boundary;
//! - else it begins with the optimizer, and ends with the forward of the next step; the boundary is between.
//!
//! Where the optimizer ends is told by names and by its repetition, the same operators for one parameter after another.
//! Where the forward begins is told by its beginning: the fewest operators that come only once in a forward. Between the
//! two, zeroed gradients, logged figures or a whole evaluation belong to the step before, and what prepares the data to
//! the next: there the longest pause is the boundary, for the program waits for data or for the device between its
//! steps and not in the middle of them.

use std::hash::{Hash, Hasher};

use rustc_hash::{FxHashMap, FxHasher};

use crate::model::Tid;

use super::ops::{Mean, Names, Op, OpId, Pauses};

/// Operators of a run that are kept. Of a longer one (an evaluation) the first are looked at and then forgotten.
const RUN_MAX: usize = 1 << 15;

/// Operators with which an optimizer updates one parameter: the most.
const UNIT_MAX: usize = 12;

/// Operators between the parts of an optimizer.
const GAP_MAX: usize = 4;

/// Operators of a forward's beginning that are kept: more are never needed in programs that are not made of copies.
const BEGINNING_MAX: usize = 4096;

/// Optimizers that are told apart.
const OPTIMIZERS_MAX: usize = 16;

/// Optimizers that take turns within a step.
const TURNS_MAX: usize = 4;

/// Others without the last in turn, after which they no longer do.
const OTHERS_MAX: u32 = 2 * TURNS_MAX as u32;

/// Threads that are told apart.
const THREADS_MAX: usize = 4096;

/// Runs without an optimizer, after which none is expected.
const RUNS_MAX: u32 = 64;

/// Runs that did not have the forward's beginning, after which it is learned anew.
const MISSED_MAX: u32 = 3;

#[derive(Debug, Default)]
pub(super) struct Training {
    /// Threads with operators, and whether any of these said to be backward.
    threads: FxHashMap<Tid, bool>,
    /// What the program has done since the last backward.
    run: Run,
    /// The run before the first backward, until the first boundary is found.
    first_run: Option<Run>,
    optimizers: Vec<(u64, Optimizer)>,
    /// The last optimizers, latest last.
    latest: Vec<u64>,
    turns: Option<Turns>,
    any_backward: bool,
    /// Runs without an optimizer, before any had one.
    runs_without: u32,
}

#[derive(Debug, Default)]
struct Run {
    ops: Vec<Op>,
    /// What was found when the run had become too long, and its beginning was forgotten.
    optimizer: Option<u64>,
}

/// Optimizers that take turns within a step.
#[derive(Debug)]
struct Turns {
    /// The one after which the step ends.
    last: u64,
    /// Others that came since it did.
    others: u32,
}

/// What is known of the runs that begin with an optimizer.
#[derive(Debug, Default)]
struct Optimizer {
    /// The beginning of the shortest forward after it, and the length of that.
    beginning: Vec<OpId>,
    shortest: usize,
    missed: u32,
    /// Pauses at the boundary.
    pauses: Mean,
    last_used: u64,
}

/// What a run told, once it was over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Told {
    /// Steps so far were parts of steps.
    Retract,
    /// Steps begin with these operators, by number.
    Boundary {
        /// The step before, if it is found only now.
        first: Option<u64>,
        at: u64,
        /// Names the optimizer of the step that ended.
        signature: u64,
    },
}

impl Training {
    /// Whether a boundary may yet be found among the operators since the last backward.
    pub fn is_open(&self) -> bool {
        self.any_backward && !self.run.ops.is_empty()
    }

    /// Whether there has been backward, and so may be an optimizer, which accumulated gradients put off.
    pub fn may_find(&self) -> bool {
        self.any_backward && self.runs_without < RUNS_MAX
    }

    /// Whether there has been a boundary.
    pub fn is_found(&self) -> bool {
        !self.optimizers.is_empty()
    }

    /// `from_start`: the program was seen from its beginning.
    pub fn observe(&mut self, op: Op, names: &Names, pauses: &Pauses, from_start: bool) -> Option<Told> {
        let named = names.roles(op.id).backward;
        if self.threads.len() == THREADS_MAX && !self.threads.contains_key(&op.tid) {
            self.threads.clear();
        }
        let known = std::mem::replace(self.threads.entry(op.tid).or_default(), named);
        if known {
            self.threads.insert(op.tid, true);
        }
        // PyTorch has a thread for it; then all that this thread does is backward.
        let own_thread = (named || known) && self.threads.values().any(|backward| !backward);
        if !named && !own_thread {
            self.run.push(op, names, self.is_threaded());
            return None;
        }
        if own_thread && !known {
            self.run.ops.retain(|earlier| earlier.tid != op.tid);
        }
        self.any_backward = true;
        if self.run.ops.is_empty() {
            return None;
        }
        let run = std::mem::take(&mut self.run);
        self.judge(run, names, pauses, from_start)
    }

    fn is_threaded(&self) -> bool {
        self.threads.values().any(|backward| *backward) && self.threads.values().any(|backward| !backward)
    }

    fn judge(&mut self, run: Run, names: &Names, pauses: &Pauses, from_start: bool) -> Option<Told> {
        let Some((signature, end)) = run.optimizer(names, self.is_threaded()) else {
            if !self.is_found() {
                self.runs_without += 1;
                self.first_run.get_or_insert(run);
            }
            return None;
        };
        if end >= run.ops.len() {
            return None;
        }
        let first_run = self.first_run.take();
        let whole_first = first_run.as_ref().filter(|_| from_start).map(Run::ids).unwrap_or_default();
        let optimizer = self.optimizer(signature, run.ops[end].number);
        if optimizer.beginning.is_empty() {
            // Seen from the beginning, a program may do nothing before its first forward.
            optimizer.beginning = whole_first;
        }
        let at = run.ops[optimizer.boundary(&run, end, names, pauses)?].number;
        let first = first_run.and_then(|first| {
            let begins = last_match(&first.ids(), &optimizer.beginning, 0)?;
            Some(first.ops[begins].number)
        });
        if self.take_turns(signature) {
            return Some(Told::Retract);
        }
        let ends = self.turns.as_ref().is_none_or(|turns| turns.last == signature);
        ends.then_some(Told::Boundary { first, at, signature })
    }

    fn optimizer(&mut self, signature: u64, now: u64) -> &mut Optimizer {
        let known = self.optimizers.iter().position(|(known, _)| *known == signature);
        let at = known.unwrap_or_else(|| {
            if self.optimizers.len() == OPTIMIZERS_MAX
                && let Some(oldest) = (0..OPTIMIZERS_MAX).min_by_key(|at| self.optimizers[*at].1.last_used)
            {
                self.optimizers.swap_remove(oldest);
            }
            self.optimizers.push((signature, Optimizer::default()));
            self.optimizers.len() - 1
        });
        let optimizer = &mut self.optimizers[at].1;
        optimizer.last_used = now;
        optimizer
    }

    /// When different optimizers have taken turns twice (as in adversarial training), a step is over when all have had
    /// theirs: with the one after which the pause is longest. Whether that is found now and for the first time.
    fn take_turns(&mut self, signature: u64) -> bool {
        if let Some(turns) = &mut self.turns {
            turns.others = if turns.last == signature { 0 } else { turns.others + 1 };
            if turns.others <= OTHERS_MAX {
                return false;
            }
            self.turns = None;
            self.latest.clear();
        }
        if self.latest.len() == 2 * TURNS_MAX {
            self.latest.remove(0);
        }
        self.latest.push(signature);
        let latest = &self.latest;
        let several = (2..=TURNS_MAX).find(|several| {
            let Some(from) = latest.len().checked_sub(2 * several) else { return false };
            let (before, last) = latest[from..].split_at(*several);
            before == last && (1..*several).all(|at| !last[..at].contains(&last[at]))
        });
        let Some(several) = several else { return false };
        let pause = |signature: u64| {
            let known = self.optimizers.iter().find(|(known, _)| *known == signature);
            known.map_or(0.0, |(_, optimizer)| optimizer.pauses.get())
        };
        let optimizers = latest[latest.len() - several..].iter().copied();
        let last = optimizers.max_by(|a, b| pause(*a).total_cmp(&pause(*b)));
        self.turns = last.map(|last| Turns { last, others: 0 });
        self.turns.is_some()
    }
}

impl Run {
    fn push(&mut self, op: Op, names: &Names, threaded: bool) {
        if self.ops.len() == RUN_MAX {
            if let Some((signature, _)) = self.optimizer(names, threaded) {
                self.optimizer = Some(signature);
            }
            self.ops.drain(..RUN_MAX / 2);
        }
        self.ops.push(op);
    }

    fn ids(&self) -> Vec<OpId> {
        self.ops.iter().map(|op| op.id).collect()
    }

    /// What names the optimizer that the run begins with, and where it ends.
    fn optimizer(&self, names: &Names, threaded: bool) -> Option<(u64, usize)> {
        if let Some(signature) = self.optimizer {
            return Some((signature, 0));
        }
        let end = optimizer_end(&self.ids(), names, threaded)?;
        let mut hasher = FxHasher::default();
        self.ops[..end].iter().for_each(|op| op.id.hash(&mut hasher));
        Some((hasher.finish(), end))
    }
}

impl Optimizer {
    /// Where in the run the next step begins.
    fn boundary(&mut self, run: &Run, end: usize, names: &Names, pauses: &Pauses) -> Option<usize> {
        let ids = run.ids();
        // What may be the optimizer's last or the forward's first.
        let unclear = |id: &OpId| {
            let roles = names.roles(*id);
            roles.zeroes || roles.changes
        };
        let last = ids.len() - 1;
        let clear = end + ids[end..last].iter().take_while(|id| unclear(id)).count();
        let longest_pause = |from: usize, to: usize| {
            let pause = |at: &usize| pauses.before(&run.ops[*at]);
            (from..=to).max_by(|a, b| pause(a).total_cmp(&pause(b)).then(b.cmp(a))).unwrap_or(from)
        };
        let begins = last_match(&ids, &self.beginning, end);
        self.missed = if begins.is_some() { 0 } else { self.missed + 1 };
        let forgotten = run.optimizer.is_some();
        let at = match begins {
            None if forgotten => return None,
            None => longest_pause(end, clear),
            Some(begins) if begins <= clear => longest_pause(end, clear),
            // Much lies between: it was an evaluation.
            Some(begins) if 2 * (begins - clear) > ids.len() - begins => begins,
            // As long a pause as there is between steps.
            Some(begins)
                if self.pauses.count() == 0
                    || run.ops[begins].pause >= f64::midpoint(pauses.usual(), self.pauses.get()) =>
            {
                begins
            }
            Some(begins) => longest_pause(end, begins - 1),
        };
        if at <= clear {
            self.pauses.add(run.ops[at].pause);
        }
        let length = ids.len() - at;
        if !forgotten && (self.shortest == 0 || self.missed >= MISSED_MAX || length < self.shortest) {
            self.shortest = length;
            self.beginning = unique_beginning(&ids[at..]);
            self.missed = 0;
        }
        Some(at)
    }
}

/// Where the optimizer that a run begins with ends: after the last operator that only optimizers have, or after updates
/// of several parameters by the same operators.
///
/// A backward without a thread of its own is mistaken for one less easily: it adds up gradients, and fills tensors first.
fn optimizer_end(ids: &[OpId], names: &Names, threaded: bool) -> Option<usize> {
    let named = ids.iter().rposition(|id| names.roles(*id).update).map(|at| at + 1);
    let mut end = named;
    let mut at = named.unwrap_or(0);
    while at < ids.len() && end.is_none_or(|end| at <= end + GAP_MAX) {
        match updates_at(&ids[at..], names, threaded) {
            0 => at += 1,
            length => {
                at += length;
                end = Some(at);
            }
        }
    }
    end
}

/// How many operators from the first on are updates of parameters, two or more, by the same operators for each.
fn updates_at(ids: &[OpId], names: &Names, threaded: bool) -> usize {
    let mut longest = 0;
    for unit in if threaded { 1 } else { 2 }..=UNIT_MAX.min(ids.len() / 2) {
        let first = &ids[..unit];
        if !is_update(first, names, threaded) {
            continue;
        }
        let times = ids.chunks_exact(unit).take_while(|chunk| *chunk == first).count();
        if times >= 2 {
            longest = longest.max(times * unit);
        }
    }
    longest
}

fn is_update(unit: &[OpId], names: &Names, threaded: bool) -> bool {
    let roles = || unit.iter().map(|id| names.roles(*id));
    roles().all(|roles| roles.elementwise && (threaded || !roles.fills))
        && roles().any(|roles| roles.changes)
        && 2 * roles().filter(|roles| roles.in_place).count() >= unit.len()
}

/// The fewest operators from the first on that come only once.
fn unique_beginning(ids: &[OpId]) -> Vec<OpId> {
    // For each place, how much from there on is like the beginning (the Z function).
    let mut alike = vec![0usize; ids.len()];
    let (mut from, mut to) = (0, 0);
    for at in 1..ids.len() {
        let mut length = if at < to { alike[at - from].min(to - at) } else { 0 };
        while at + length < ids.len() && ids[length] == ids[at + length] {
            length += 1;
        }
        if at + length > to {
            (from, to) = (at, at + length);
        }
        alike[at] = length;
    }
    let longest = alike.into_iter().max().unwrap_or(0);
    ids.iter().copied().take((longest + 1).min(BEGINNING_MAX)).collect()
}

/// The last place at or after `from` where `wanted` is.
fn last_match(ids: &[OpId], wanted: &[OpId], from: usize) -> Option<usize> {
    if wanted.is_empty() || from >= ids.len() {
        return None;
    }
    ids[from..].windows(wanted.len()).rposition(|window| window == wanted).map(|at| from + at)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn ids(names: &mut Names, text: &str) -> Vec<OpId> {
        text.split_whitespace().map(|name| names.id(&Arc::from(format!("aclnn{name}")))).collect()
    }

    #[test]
    fn the_optimizer_ends_with_its_last_parameter() {
        for (optimizer, rest) in [
            ("InplaceMuls InplaceAdd InplaceAdd InplaceMuls InplaceAdd InplaceAdd", "Addmm Relu"),
            // The first step copies gradients to the momentum.
            ("InplaceCopy InplaceAdd InplaceCopy InplaceAdd", "Addmm Relu"),
            (
                "InplaceAdd InplaceAdd InplaceAdd",
                "Matmul InplaceAdd InplaceCopy Matmul InplaceAdd InplaceCopy",
            ),
            ("ForeachNorm Stack LinalgVectorNorm ForeachAddcdivScalarListInplace", "Embedding"),
            ("InplaceZero InplaceZero InplaceMuls InplaceLerps Sqrt InplaceAddcdiv", "InplaceZero Addmm"),
            ("ApplyAdamWV2 ApplyAdamWV2 InplaceMuls InplaceAdd InplaceMuls InplaceAdd", "Addmm"),
            // Gradients come from a backward whose names do not say so.
            ("Mm ReduceSum InplaceMuls InplaceAdd InplaceMuls InplaceAdd", "Cast Cast Mul Add Mul Add"),
        ] {
            let mut names = Names::default();
            let run = ids(&mut names, &format!("{optimizer} {rest}"));
            let expected = optimizer.split_whitespace().count();
            assert_eq!(optimizer_end(&run, &names, true), Some(expected), "{optimizer}");
        }
    }

    #[test]
    fn a_forward_is_no_optimizer() {
        for forward in [
            "Conv2D BatchNorm Relu Conv2D BatchNorm InplaceAdd Relu Conv2D BatchNorm Relu Conv2D BatchNorm InplaceAdd Relu",
            "Matmul InplaceAdd InplaceCopy Softmax Matmul InplaceAdd InplaceCopy Softmax",
            "Cast Cast Mul Add Mul Add",
            "InplaceZero InplaceZero Addmm",
            "InplaceAdd Mm",
        ] {
            let mut names = Names::default();
            assert_eq!(optimizer_end(&ids(&mut names, forward), &names, true), None, "{forward}");
        }
    }

    #[test]
    fn a_beginning_is_unique_and_no_longer_than_it_must_be() {
        for (forward, length) in [
            ("Addmm Relu Addmm MseLoss", 2),
            ("Embedding Mm Mm", 1),
            ("Mm Add Norm Mm Add Norm Loss", 4),
            ("Mm Mm Mm", 3),
            ("Mm Add Mm Add Mm", 4),
            ("Mm", 1),
        ] {
            let mut names = Names::default();
            let forward_ids = ids(&mut names, forward);
            let beginning = unique_beginning(&forward_ids);
            assert_eq!(beginning.len(), length, "{forward}");
            let times = forward_ids.windows(beginning.len()).filter(|window| *window == beginning).count();
            assert_eq!(times, 1, "{forward}");
        }
        assert!(unique_beginning(&[]).is_empty());
    }
}
