//! Which line of one version of a program is which of another.

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::FxHashMap;

use super::difference::Like;
use crate::model::{Frame, Name, Pool};

/// Pairs of lines of a function that are looked at. Dumps may claim anything.
const PAIRS_MAX: usize = 1 << 20;
/// That two lines have the same number is worth a little, and more than as much again as what they have in common: else those of a
/// program that has not changed would be moved where some run in one dump only.
const SAME_NUMBER: f64 = 0.1;
const AS_MUCH_AGAIN: f64 = 1.01;
/// What the same operators with blocks of other sizes are worth, of the same sizes.
const OTHER_SIZES: f64 = 0.25;

/// What a line allocates.
#[derive(Debug, Default)]
struct Kinds<'a>(BTreeSet<(Pool, &'a Option<Name>, Option<u64>)>);

/// A line of a function, by its number.
type Lines<'a> = BTreeMap<Option<u32>, (&'a Frame, Kinds<'a>)>;

/// Lines of the base that have another number on the other side, or none though another line has theirs.
///
/// Within a function lines keep their order. Of all ways to pair those of the two sides, the one is taken by which most is in
/// common between lines: operators and sizes, and the number.
pub fn moved<'a>(
    base: impl Iterator<Item = &'a (Like, Option<Frame>)>,
    compare: impl Iterator<Item = &'a (Like, Option<Frame>)>,
) -> FxHashMap<Frame, Frame> {
    let (base, compare) = (by_function(base), by_function(compare));
    let mut moved = FxHashMap::default();
    for (function, base) in &base {
        let Some(compare) = compare.get(function) else { continue };
        let (from, to): (Vec<_>, Vec<_>) = (base.values().collect(), compare.values().collect());
        if from.len() * to.len() > PAIRS_MAX {
            continue;
        }
        let mut taken = BTreeSet::new();
        let mut alone = Vec::new();
        for (line, pair) in from.iter().zip(pairs(&from, &to)) {
            match pair {
                Some(pair) => {
                    taken.insert(to[pair].0.line);
                    if to[pair].0.line != line.0.line {
                        moved.insert(line.0.clone(), to[pair].0.clone());
                    }
                }
                None => alone.push(line.0),
            }
        }
        for line in alone {
            if taken.contains(&line.line) {
                moved.insert(line.clone(), Frame { line: None, ..line.clone() });
            }
        }
    }
    moved
}

fn by_function<'a>(
    groups: impl Iterator<Item = &'a (Like, Option<Frame>)>,
) -> BTreeMap<(&'a Name, &'a Name), Lines<'a>> {
    let mut functions: BTreeMap<_, Lines<'a>> = BTreeMap::new();
    for (like, place) in groups {
        let Some(place) = place else { continue };
        let lines = functions.entry((&place.file, &place.function)).or_default();
        let line = lines.entry(place.line).or_insert_with(|| (place, Kinds::default()));
        line.1.0.insert((like.pool, &like.op, like.size));
    }
    functions
}

/// For each line which of the other side it is.
fn pairs(from: &[&(&Frame, Kinds<'_>)], to: &[&(&Frame, Kinds<'_>)]) -> Vec<Option<usize>> {
    let worth = |a: usize, b: usize| {
        let ((one, kinds), (other, others)) = (from[a], to[b]);
        let common = kinds.in_common(others);
        common + if one.line == other.line { SAME_NUMBER + AS_MUCH_AGAIN * common } else { 0.0 }
    };
    // What the best pairing of the lines from there on is worth.
    let width = to.len() + 1;
    let mut best = vec![0f64; (from.len() + 1) * width];
    for a in (0..from.len()).rev() {
        for b in (0..to.len()).rev() {
            let apart = best[(a + 1) * width + b].max(best[a * width + b + 1]);
            let worth = worth(a, b);
            let paired = if worth > 0.0 { worth + best[(a + 1) * width + b + 1] } else { 0.0 };
            best[a * width + b] = apart.max(paired);
        }
    }
    let mut pairs = vec![None; from.len()];
    let (mut a, mut b) = (0, 0);
    while a < from.len() && b < to.len() {
        let here = best[a * width + b];
        let worth = worth(a, b);
        if worth > 0.0 && here == worth + best[(a + 1) * width + b + 1] {
            pairs[a] = Some(b);
            (a, b) = (a + 1, b + 1);
        } else if here == best[(a + 1) * width + b] {
            a += 1;
        } else {
            b += 1;
        }
    }
    pairs
}

impl Kinds<'_> {
    /// From 0 to 1.
    fn in_common(&self, other: &Self) -> f64 {
        let part =
            |common: usize, one: usize, other: usize| common as f64 / (one + other - common).max(1) as f64;
        let same = self.0.intersection(&other.0).count();
        if same > 0 {
            return part(same, self.0.len(), other.0.len());
        }
        let without_sizes = |kinds: &Self| -> BTreeSet<_> {
            kinds.0.iter().map(|(pool, op, _)| (*pool, (*op).clone())).collect()
        };
        let (one, other) = (without_sizes(self), without_sizes(other));
        OTHER_SIZES * part(one.intersection(&other).count(), one.len(), other.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines with one letter each for what they allocate; the number that each has on the other side, where it is another.
    fn moves(base: &[(u32, &str)], compare: &[(u32, &str)]) -> Vec<(u32, Option<u32>)> {
        let groups = |lines: &[(u32, &str)]| -> Vec<(Like, Option<Frame>)> {
            let all = lines.iter().flat_map(|(line, kinds)| kinds.chars().map(move |kind| (*line, kind)));
            all.map(|(line, kind)| {
                let like = Like { pool: Pool::Pta, op: Some("op".into()), size: Some(u64::from(kind)) };
                (like, Some(Frame { function: "f".into(), file: "p.py".into(), line: Some(line) }))
            })
            .collect()
        };
        let (base, compare) = (groups(base), groups(compare));
        let mut moves: Vec<_> = moved(base.iter(), compare.iter())
            .into_iter()
            .filter_map(|(from, to)| Some((from.line?, to.line)))
            .collect();
        moves.sort_unstable();
        moves
    }

    #[test]
    fn lines_that_are_where_they_were_are_not_moved() {
        assert_eq!(moves(&[(4, "a"), (5, "b")], &[(4, "a"), (5, "b")]), []);
        // One runs in the one dump only, one in the other, and all allocate the same.
        assert_eq!(moves(&[(4, "a"), (5, "a")], &[(5, "a"), (6, "a")]), []);
        assert_eq!(moves(&[(4, "a")], &[(4, "z")]), []);
    }

    #[test]
    fn lines_below_what_was_inserted_are_moved_though_one_has_the_number_of_another() {
        let all = [(4, Some(6)), (5, Some(7)), (6, Some(8))];
        assert_eq!(moves(&[(4, "a"), (5, "b"), (6, "c")], &[(6, "a"), (7, "b"), (8, "c")]), all);
        assert_eq!(moves(&[(4, "a"), (5, "a"), (6, "a")], &[(6, "a"), (7, "a"), (8, "a")]), all);
    }

    #[test]
    fn a_line_more_is_a_line_more() {
        assert_eq!(
            moves(&[(4, "a"), (5, "b")], &[(6, "a"), (7, "b"), (8, "c")]),
            [(4, Some(6)), (5, Some(7))]
        );
        assert_eq!(
            moves(&[(4, "a"), (5, "b")], &[(6, "a"), (7, "z"), (8, "b")]),
            [(4, Some(6)), (5, Some(8))]
        );
    }

    #[test]
    fn a_line_that_is_gone_is_no_other() {
        assert_eq!(moves(&[(4, "a"), (6, "b")], &[(6, "a")]), [(4, Some(6)), (6, None)]);
    }
}
