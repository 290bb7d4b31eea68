//! Aligning two sequences of names: which elements of one stand for which of the other.

use serde::Serialize;

/// Edits up to which the alignment is the one of msMemScope. Its cost grows with their square: this many take 16 MiB
/// and a second.
pub const MAX_EDITS: usize = 1 << 14;

/// Edits after which the heuristic settles for what it has found so far.
const EDITS_PER_ROUND: usize = 1 << 10;

/// One place of the alignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pair {
    Both,
    BaseOnly,
    CompareOnly,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alignment {
    /// In order; the elements of each sequence follow one another.
    pub pairs: Vec<Pair>,
    pub method: Method,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// With the fewest edits possible, and of all such ways the one that msMemScope takes.
    Exact,
    /// The sequences have too little in common for that: with few edits, but perhaps not the fewest.
    Heuristic,
}

/// Aligns two sequences of names, given by number.
pub fn align(base: &[u32], compare: &[u32], max_edits: usize) -> Alignment {
    let mut pairs = Vec::with_capacity(base.len().max(compare.len()));
    if greedy(base, compare, max_edits, &mut pairs).is_finished(base, compare) {
        return Alignment { pairs, method: Method::Exact };
    }
    pairs.clear();
    rounds(base, compare, EDITS_PER_ROUND, &mut pairs);
    Alignment { pairs, method: Method::Heuristic }
}

/// Goes a few edits at a time, each time from where it got furthest: cost and memory are linear.
fn rounds(mut base: &[u32], mut compare: &[u32], edits: usize, path: &mut Vec<Pair>) {
    loop {
        let end = greedy(base, compare, edits, path);
        if end.is_finished(base, compare) {
            return;
        }
        base = &base[end.i..];
        compare = &compare[end.j..];
    }
}

/// Elements of both sequences used up.
struct End {
    i: usize,
    j: usize,
}

impl End {
    fn is_finished(&self, base: &[u32], compare: &[u32]) -> bool {
        self.i == base.len() && self.j == compare.len()
    }
}

/// Myers' greedy algorithm, from the beginning of both sequences to their ends, or to the place that is furthest after
/// `max_edits`. Appends the path.
///
/// On diagonal k = i - j, with i elements of `base` and j of `compare` used up, d edits reach furthest either from the
/// diagonal above, by an element of `compare`, or from the one below, by one of `base`. Which of the two is all that
/// needs to be remembered, in one bit: from there on, the path follows equal elements as long as there are any.
fn greedy(base: &[u32], compare: &[u32], max_edits: usize, path: &mut Vec<Pair>) -> End {
    let (n, m) = (base.len(), compare.len());
    let start = common_prefix(base, compare);
    if start == n || start == m {
        path.extend(std::iter::repeat_n(Pair::Both, start));
        path.extend(std::iter::repeat_n(Pair::BaseOnly, n - start));
        path.extend(std::iter::repeat_n(Pair::CompareOnly, m - start));
        return End { i: n, j: m };
    }
    // The furthest i on the diagonals -d, -d + 2, ..., d: diagonal k is at (k + d) / 2. From one d to the next, the
    // diagonal above is at the same place, and the one below at the place before.
    let mut furthest = vec![start];
    let mut before = Vec::new();
    let mut from_above = Bits::default();
    for d in 1..=max_edits {
        std::mem::swap(&mut before, &mut furthest);
        from_above.push_row(&before);
        furthest.clear();
        furthest.push(before[0]);
        furthest.extend(before.windows(2).map(|pair| pair[1].max(pair[0] + 1)));
        furthest.push(before[d - 1] + 1);
        for (at, i) in furthest.iter_mut().enumerate() {
            let j = *i + d - 2 * at;
            // Paths that have left the sequences lead nowhere.
            if *i < n && j < m && base[*i] == compare[j] {
                *i += common_prefix(&base[*i..], &compare[j..]);
            }
        }
        if let Some(at) = (d + n).checked_sub(m).filter(|twice| twice % 2 == 0).map(|twice| twice / 2)
            && furthest.get(at) == Some(&n)
        {
            retrace(base, compare, &from_above, at, path);
            return End { i: n, j: m };
        }
    }
    let ends = furthest.iter().enumerate().map(|(at, i)| (at, End { i: *i, j: i + max_edits - 2 * at }));
    let inside = ends.filter(|(_, end)| end.i <= n && end.j <= m);
    let best = inside.max_by_key(|(_, end)| (end.i + end.j, std::cmp::Reverse(end.i.abs_diff(end.j))));
    match best {
        Some((at, end)) => {
            retrace(base, compare, &from_above, at, path);
            end
        }
        // Both sequences are shorter than the edits allowed, and their ends are found.
        None => End { i: 0, j: 0 },
    }
}

fn common_prefix(base: &[u32], compare: &[u32]) -> usize {
    base.iter().zip(compare).take_while(|(a, b)| a == b).count()
}

/// Appends the path that is at place `at` after all edits.
fn retrace(base: &[u32], compare: &[u32], from_above: &Bits, mut at: usize, path: &mut Vec<Pair>) {
    let mut edits = Vec::with_capacity(from_above.rows.len());
    for row in (0..from_above.rows.len()).rev() {
        if from_above.get(row, at) {
            edits.push(Pair::CompareOnly);
        } else {
            edits.push(Pair::BaseOnly);
            at -= 1;
        }
    }
    let (mut i, mut j) = (0, 0);
    loop {
        let equal = common_prefix(&base[i..], &compare[j..]);
        path.extend(std::iter::repeat_n(Pair::Both, equal));
        i += equal;
        j += equal;
        match edits.pop() {
            Some(Pair::BaseOnly) => {
                path.push(Pair::BaseOnly);
                i += 1;
            }
            Some(_) => {
                path.push(Pair::CompareOnly);
                j += 1;
            }
            None => return,
        }
    }
}

/// Rows of bits.
#[derive(Default)]
struct Bits {
    words: Vec<u64>,
    /// The word with which each row begins.
    rows: Vec<usize>,
}

impl Bits {
    /// Where the furthest of `before` are to be reached from: from above at the first place, from below at the last.
    fn push_row(&mut self, before: &[usize]) {
        let row = self.words.len();
        self.rows.push(row);
        let mut below = 0;
        let places = before.chunks(u64::BITS as usize);
        self.words.extend(places.map(|places| {
            let mut word = 0;
            for (bit, above) in places.iter().enumerate() {
                word |= u64::from(below < *above) << bit;
                below = *above;
            }
            word
        }));
        if before.len().is_multiple_of(u64::BITS as usize) {
            self.words.push(0);
        }
        self.words[row] |= 1;
    }

    fn get(&self, row: usize, at: usize) -> bool {
        let word = self.words[self.rows[row] + at / u64::BITS as usize];
        (word >> (at % u64::BITS as usize)) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn edits(pairs: &[Pair]) -> usize {
        pairs.iter().filter(|pair| **pair != Pair::Both).count()
    }

    /// Panics unless the pairs use up both sequences, and pair equal elements only.
    fn check(base: &[u32], compare: &[u32], pairs: &[Pair]) {
        let (mut i, mut j) = (0, 0);
        for pair in pairs {
            match pair {
                Pair::Both => {
                    assert_eq!(base[i], compare[j]);
                    i += 1;
                    j += 1;
                }
                Pair::BaseOnly => i += 1,
                Pair::CompareOnly => j += 1,
            }
        }
        assert_eq!((i, j), (base.len(), compare.len()));
    }

    /// The fewest edits, by the definition.
    fn fewest_edits(base: &[u32], compare: &[u32]) -> usize {
        let mut row: Vec<usize> = (0..=compare.len()).collect();
        for (i, a) in base.iter().enumerate() {
            let mut diagonal = row[0];
            row[0] = i + 1;
            for (j, b) in compare.iter().enumerate() {
                let equal = if a == b { diagonal } else { usize::MAX };
                diagonal = row[j + 1];
                row[j + 1] = equal.min(row[j] + 1).min(row[j + 1] + 1);
            }
        }
        row[compare.len()]
    }

    /// The greedy algorithm as it is written down: nodes with their predecessors, no bounds on diagonals.
    fn by_nodes(base: &[u32], compare: &[u32]) -> Vec<Pair> {
        let (n, m) = (base.len() as i64, compare.len() as i64);
        // (i, j) at the end of each node's equal elements, and the index of its predecessor.
        let mut nodes: Vec<(i64, i64, usize)> = vec![(0, -1, 0)];
        let mut furthest = std::collections::HashMap::from([(1i64, 0usize)]);
        let last = 'found: {
            for d in 0..=n + m {
                for k in (-d..=d).step_by(2) {
                    let node = |k: i64| furthest.get(&k).copied().unwrap_or(0);
                    let down = k == -d || (k != d && nodes[node(k - 1)].0 < nodes[node(k + 1)].0);
                    let before = if down { node(k + 1) } else { node(k - 1) };
                    let mut i = nodes[before].0 + i64::from(!down);
                    while i < n && i - k < m && base[i as usize] == compare[(i - k) as usize] {
                        i += 1;
                    }
                    nodes.push((i, i - k, before));
                    furthest.insert(k, nodes.len() - 1);
                    if i >= n && i - k >= m {
                        break 'found nodes.len() - 1;
                    }
                }
            }
            unreachable!("n + m edits always do")
        };
        let mut pairs = Vec::new();
        let mut at = last;
        while at != 0 {
            let (i, j, before) = nodes[at];
            let (before_i, before_j, _) = nodes[before];
            let equal = (i - before_i).min(j - before_j);
            pairs.extend(vec![Pair::Both; equal as usize]);
            if before != 0 {
                pairs.push(if i - before_i > j - before_j { Pair::BaseOnly } else { Pair::CompareOnly });
            }
            at = before;
        }
        pairs.reverse();
        pairs
    }

    #[test]
    fn of_two_ways_the_one_without_the_base_element_comes_first() {
        use Pair::{BaseOnly, Both, CompareOnly};
        assert_eq!(align(&[1, 2], &[3, 2], MAX_EDITS).pairs, [BaseOnly, CompareOnly, Both]);
        assert_eq!(align(&[], &[], MAX_EDITS).pairs, []);
        assert_eq!(align(&[], &[1, 1], MAX_EDITS).pairs, [CompareOnly, CompareOnly]);
        assert_eq!(align(&[1, 1], &[1], MAX_EDITS).pairs, [Both, BaseOnly]);
    }

    #[test]
    fn what_differs_too_much_is_aligned_all_the_same() {
        let base: Vec<u32> = (0..2000).collect();
        let compare: Vec<u32> = (0..2000).map(|n| if n % 3 == 0 { n } else { 5000 }).collect();
        let alignment = align(&base, &compare, 100);
        assert_eq!(alignment.method, Method::Heuristic);
        check(&base, &compare, &alignment.pairs);
        assert!(alignment.pairs.iter().filter(|pair| **pair == Pair::Both).count() > 600);
        assert_eq!(align(&base, &compare, MAX_EDITS).method, Method::Exact);
    }

    proptest! {
        #[test]
        fn exact_alignment_is_the_greedy_one(
            base in prop::collection::vec(0..5u32, 0..40),
            compare in prop::collection::vec(0..5u32, 0..40),
        ) {
            let pairs = align(&base, &compare, MAX_EDITS).pairs;
            check(&base, &compare, &pairs);
            prop_assert_eq!(edits(&pairs), fewest_edits(&base, &compare));
            prop_assert_eq!(&pairs, &by_nodes(&base, &compare));
        }

        #[test]
        fn a_limit_changes_nothing_below_it(
            base in prop::collection::vec(0..3u32, 0..40),
            compare in prop::collection::vec(0..3u32, 0..40),
        ) {
            let exact = align(&base, &compare, MAX_EDITS);
            let fewest = edits(&exact.pairs);
            prop_assert_eq!(&align(&base, &compare, fewest), &exact);
            let heuristic = align(&base, &compare, fewest.saturating_sub(1));
            check(&base, &compare, &heuristic.pairs);
            // What is left after the common beginning needs no search when one side is used up.
            let searched = common_prefix(&base, &compare) < base.len().min(compare.len());
            prop_assert_eq!(heuristic.method == Method::Heuristic, searched);
        }

        #[test]
        fn rounds_find_their_way(
            base in prop::collection::vec(0..4u32, 0..60),
            compare in prop::collection::vec(0..4u32, 0..60),
            edits_per_round in 1..8usize,
        ) {
            let mut pairs = Vec::new();
            rounds(&base, &compare, edits_per_round, &mut pairs);
            check(&base, &compare, &pairs);
        }
    }
}
