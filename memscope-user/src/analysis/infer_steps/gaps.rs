//! Where between two operators a step begins: where the process most often pauses longest.
//!
//! How long the pauses are is not added up: a program that is interrupted once pauses longer than it ever does on its
//! own.

use std::mem::{Discriminant, discriminant};

use rustc_hash::FxHashMap;

use crate::model::EventKind;

/// What makes events alike: the kind, and bytes. `None` stands for all of the kind whose like is new.
pub(super) type Like = (Discriminant<EventKind>, Option<u64>);

pub(super) fn like(kind: &EventKind) -> Like {
    let size = match kind {
        EventKind::Alloc(alloc) => alloc.size,
        EventKind::Free(free) => free.size.unwrap_or(0),
        _ => 0,
    };
    (discriminant(kind), Some(size))
}

/// Likes that are told apart.
const LIKES_MAX: usize = 4096;

/// So often seen, a like is no longer new.
const NEW: u32 = 2;

/// What comes between two steps, and how often the longest pause was before it.
#[derive(Debug, Default)]
pub(super) struct Gaps {
    by_like: FxHashMap<Like, Gap>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Gap {
    seen: u32,
    longest: u32,
}

impl Gaps {
    /// Which of these events between two steps begins the second one; each with the pause before it, in ns.
    pub fn usually_longest(&mut self, events: &[(Like, u64)]) -> usize {
        // One alone says nothing of the others.
        let [_, _, ..] = events else { return 0 };
        let shares: Vec<_> = events.iter().map(|(like, _)| self.share(*like)).collect();
        let longer = |a: &usize, b: &usize| events[*a].1.cmp(&events[*b].1).then(b.cmp(a));
        let usual = |a: &usize, b: &usize| shares[*a].total_cmp(&shares[*b]).then(longer(a, b));
        let longest = (0..events.len()).max_by(longer);
        let place = (0..events.len()).max_by(usual).unwrap_or(0);
        // Each like once, however many of it there are: half of the gap's events may be of the one that begins the step.
        let mut longest_before: FxHashMap<Like, bool> = FxHashMap::default();
        for (index, (like, _)) in events.iter().enumerate() {
            let any = self.is_new(*like).then_some((like.0, None));
            for like in [Some(*like), any].into_iter().flatten() {
                *longest_before.entry(like).or_default() |= longest == Some(index);
            }
        }
        for (like, longest) in longest_before {
            if self.by_like.len() < LIKES_MAX || self.by_like.contains_key(&like) {
                let gap = self.by_like.entry(like).or_default();
                gap.seen += 1;
                gap.longest += u32::from(longest);
            }
        }
        place
    }

    fn is_new(&self, like: Like) -> bool {
        self.by_like.get(&like).is_none_or(|gap| gap.seen < NEW)
    }

    /// In how much of the gaps with such an event the longest pause was before it. What is new has no share of its own:
    /// that of its kind, which counts less than what begins most steps.
    fn share(&self, like: Like) -> f64 {
        let share = |like: Like| {
            let gap = self.by_like.get(&like).copied().unwrap_or_default();
            f64::from(gap.longest) / f64::from(gap.seen.max(1))
        };
        if self.is_new(like) { share((like.0, None)).min(0.5) } else { share(like) }
    }
}
