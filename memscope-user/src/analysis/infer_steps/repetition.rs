//! Steps of loops of any kind: where the same operators come again and again.
//!
//! Every transition from one operator to another cuts the stream into segments, and keeps a number for the last one. When
//! three segments in a row are the same, the transition repeats with a period. The longest period that any has is the
//! step: shorter ones are layers, or parameters of an optimizer. Of the transitions that have this period, the one with
//! the longest pause is the boundary: the program waits for data or for the device between its steps.
//!
//! A transition with a pause far longer than usual counts as another one too, so that a step of several equal passes is
//! found by the pauses between the steps.
//!
//! No history is kept, only a few numbers for each transition.

use rustc_hash::FxHashMap;

use super::ops::{LONG, Mean, Op, OpId, PAUSES_KNOWN};

/// Equal segments in a row that are a period.
const PERIODS: u32 = 3;

/// Transitions that are told apart. Names come from the target.
const TRANSITIONS_MAX: usize = 1 << 16;

/// After so many periods, a boundary with clearly longer pauses (1.5 times, as a logarithm) takes over.
const REVIEWS: [u32; 3] = [8, 16, 32];
const CLEARLY: f64 = 0.4;

/// A boundary that did not come for so many of its periods is none any more.
const STALE: u64 = 8;

/// A transition from one operator to another, after a long pause or any.
type Cut = (OpId, OpId, bool);

#[derive(Debug, Default)]
pub(super) struct Repetition {
    /// Of all operators so far.
    hash: Hash,
    cuts: FxHashMap<Cut, Segments>,
    boundary: Option<Boundary>,
    /// A boundary came no more: there were steps before those of the present one.
    resumed: bool,
}

#[derive(Debug, Clone, Copy)]
struct Boundary {
    cut: Cut,
    period: u64,
    /// Periods since it was chosen.
    periods: u32,
    /// The operator before which it came last.
    latest: u64,
}

/// The segments that a cut makes.
#[derive(Debug, Clone, Copy, Default)]
struct Segments {
    /// Operators before the last cut, and their hash.
    begin: Option<(u64, Hash)>,
    last: Option<Segment>,
    /// Last segments that are alike.
    alike: u32,
    pauses: Mean,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Segment {
    length: u64,
    hash: Hash,
}

/// What an operator told.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Told {
    /// What were steps so far were parts of steps.
    pub retract: bool,
    /// Steps are others from now on.
    pub anew: bool,
    /// A step begins with it.
    pub begins: Option<Begins>,
}

/// The beginning of a step, and what speaks for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Begins {
    /// Names the operators of the step that ended.
    pub signature: u64,
    /// So many operators had each of the last steps, which were all alike.
    pub period: u64,
    pub alike: u32,
    /// The pauses here.
    pub pauses: Mean,
}

impl Repetition {
    /// Whether a step may begin with the operator after this one.
    pub fn may_end_with(&self, op: &Op) -> bool {
        self.boundary.is_some_and(|boundary| boundary.cut.0 == op.id)
    }

    pub fn observe(&mut self, op: &Op) -> Told {
        if self.boundary.is_some_and(|boundary| op.number > boundary.latest + STALE * boundary.period) {
            self.boundary = None;
            self.resumed = true;
        }
        let any: Cut = (op.previous, op.id, false);
        let usual = self.cuts.get(&any).map(|segments| segments.pauses).unwrap_or_default();
        let long = usual.count() >= PAUSES_KNOWN && op.pause > usual.get() + LONG;
        let mut told = Told::default();
        self.cut(any, op, &mut told);
        if long {
            self.cut((op.previous, op.id, true), op, &mut told);
        }
        self.hash = self.hash.then(op.id);
        told
    }

    fn cut(&mut self, cut: Cut, op: &Op, told: &mut Told) {
        if self.cuts.len() >= TRANSITIONS_MAX && !self.cuts.contains_key(&cut) {
            return;
        }
        let known = self.cuts.entry(cut).or_default();
        known.pauses.add(op.pause);
        let Some((begin, before)) = known.begin.replace((op.number, self.hash)) else { return };
        let length = op.number - begin;
        let segment = Segment { length, hash: self.hash.since(before, length) };
        known.alike = if known.last == Some(segment) { known.alike + 1 } else { 1 };
        known.last = Some(segment);
        let segments = *known;
        if segments.alike >= PERIODS && self.boundary.is_none_or(|boundary| boundary.period < length) {
            told.retract |= self.boundary.is_some() && !self.resumed;
            told.anew = true;
            told.begins = None;
            let cut = self.longest_pause(length, PERIODS - 1, cut);
            self.boundary = Some(Boundary { cut, period: length, periods: 0, latest: op.number });
        }

        let Some(boundary) = self.boundary.as_mut().filter(|boundary| boundary.cut == cut) else { return };
        boundary.periods += 1;
        boundary.latest = op.number;
        told.begins = Some(Begins {
            signature: segment.hash.0,
            period: length,
            alike: segments.alike,
            pauses: segments.pauses,
        });
        let Boundary { period, periods, .. } = *boundary;
        if REVIEWS.contains(&periods) {
            let better = self.longest_pause(period, PERIODS, cut);
            if self.pause(better) > self.pause(cut) + CLEARLY {
                self.boundary = Some(Boundary { cut: better, period, periods, latest: op.number });
            }
        }
    }

    fn pause(&self, cut: Cut) -> f64 {
        self.cuts.get(&cut).map_or(0.0, |segments| segments.pauses.get())
    }

    /// Of the cuts that have made so many segments alike of this length, the one with the longest pauses.
    fn longest_pause(&self, length: u64, alike: u32, cut: Cut) -> Cut {
        self.cuts
            .iter()
            .filter(|(_, segments)| {
                segments.alike >= alike && segments.last.is_some_and(|s| s.length == length)
            })
            .map(|(cut, segments)| (*cut, segments.pauses.get()))
            .max_by(|(a, a_pause), (b, b_pause)| a_pause.total_cmp(b_pause).then(a.cmp(b)))
            .map_or(cut, |(cut, _)| cut)
    }
}

/// A polynomial in the numbers of operators, modulo a prime: the hash of a segment comes from those before its ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Hash(u64);

const PRIME: u64 = (1 << 61) - 1;
const BASE: u64 = 0x1234_5678_9abc_def1;

fn times(a: u64, b: u64) -> u64 {
    (u128::from(a) * u128::from(b) % u128::from(PRIME)) as u64
}

impl Hash {
    fn then(self, id: OpId) -> Hash {
        Hash((times(self.0, BASE) + u64::from(id) + 1) % PRIME)
    }

    /// Of the last operators, so many, when this is the hash of all and `before` that of those before.
    fn since(self, before: Hash, mut count: u64) -> Hash {
        let (mut power, mut square) = (1, BASE);
        while count > 0 {
            if count & 1 == 1 {
                power = times(power, square);
            }
            square = times(square, square);
            count >>= 1;
        }
        Hash((self.0 + PRIME - times(before.0, power)) % PRIME)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Tid;

    /// Operators by letter; after a `|` comes a pause of 10 ms, else 20 µs. Returns where steps begin.
    fn steps(text: &str) -> Vec<usize> {
        let mut repetition = Repetition::default();
        let mut begins = Vec::new();
        let (mut number, mut previous, mut pause) = (0, 0, 20f64);
        for letter in text.chars() {
            if letter == '|' {
                pause = 10_000.0;
                continue;
            }
            let op = Op { number, id: letter as OpId, tid: Tid(1), previous, pause: pause.ln() };
            let told = repetition.observe(&op);
            if told.retract {
                begins.clear();
            }
            if told.begins.is_some() {
                begins.push(number as usize);
            }
            (number, previous, pause) = (number + 1, op.id, 20.0);
        }
        begins
    }

    fn every(period: usize, from: usize, to: usize) -> Vec<usize> {
        (from..to).step_by(period).collect()
    }

    #[test]
    fn the_period_begins_after_the_longest_pause() {
        assert_eq!(steps(&"abc|de".repeat(10)), every(5, 18, 50));
    }

    #[test]
    fn layers_are_no_steps() {
        let step = format!("e{}h|", "lmn".repeat(12));
        let length = 38;
        assert_eq!(steps(&step.repeat(8)), every(length, 4 * length, 8 * length));
    }

    #[test]
    fn equal_passes_between_long_pauses_are_one_step() {
        let step = format!("|{}", "ab".repeat(6));
        assert_eq!(steps(&step.repeat(10)), every(12, 48, 120));
    }

    #[test]
    fn what_does_not_repeat_has_no_steps() {
        let text: String = (0..2000u32).map(|n| char::from(b'a' + (n * n / 7 % 23) as u8)).collect();
        assert!(steps(&text).len() < 10, "{:?}", steps(&text));
    }

    #[test]
    fn another_loop_has_steps_too() {
        let text = format!("{}{}", "abcdef|".repeat(6), "xy|z".repeat(60));
        let found = steps(&text);
        // Once the first has not come for eight of its periods.
        assert_eq!(found[..3], [24, 30, 80], "{found:?}");
        assert_eq!(found[2..], every(3, 80, 36 + 3 * 60));
    }

    #[test]
    fn a_hash_of_a_segment_is_that_of_its_operators() {
        let of = |ids: &[OpId]| ids.iter().fold(Hash::default(), |hash, id| hash.then(*id));
        let (one, other, part) = ([9, 9, 1, 2, 3], [4, 1, 2, 3], [1, 2, 3]);
        assert_eq!(of(&one).since(of(&one[..2]), 3), of(&part));
        assert_eq!(of(&other).since(of(&other[..1]), 3), of(&part));
        assert_ne!(of(&part), of(&[1, 3, 2]));
        assert_ne!(of(&[0]), of(&[0, 0]), "unknown names count");
    }
}
