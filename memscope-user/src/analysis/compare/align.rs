//! Aligning two sequences of names: which elements of one stand for which of the other.

use imara_diff::{Algorithm, Diff, Token};
use serde::Serialize;

/// Edits up to which the alignment is the one of msMemScope. Its cost grows with their square: this many take 64 MiB
/// and about a second.
pub const MAX_EDITS: usize = 1 << 15;

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

/// Aligns two sequences of `names` names, given by number.
pub fn align(base: &[u32], compare: &[u32], names: u32, max_edits: usize) -> Alignment {
    match exact(base, compare, max_edits) {
        Some(pairs) => Alignment { pairs, method: Method::Exact },
        None => Alignment { pairs: heuristic(base, compare, names), method: Method::Heuristic },
    }
}

/// Myers' greedy algorithm. On diagonal k = i - j, with i elements of `base` and j of `compare` used up, d edits reach
/// furthest either from the diagonal above, by an element of `compare`, or from the one below, by one of `base`. Which
/// of the two is all that needs to be remembered, in one bit: from there on, the path follows equal elements as long as
/// there are any. `None`: more than `max_edits` would be needed.
fn exact(base: &[u32], compare: &[u32], max_edits: usize) -> Option<Vec<Pair>> {
    let (n, m) = (base.len() as isize, compare.len() as isize);
    let limit = (max_edits as isize).min(n + m);
    // Diagonals that have elements, and one more at either end so that all have neighbours.
    let middle = limit.min(m) + 1;
    let mut furthest = vec![-1isize; (middle + limit.min(n) + 2) as usize];
    let mut from_above = Bits::default();
    for d in 0..=limit {
        let low = if d <= m { -d } else { (d - m) % 2 - m };
        let high = if d <= n { d } else { n - (d - n) % 2 };
        from_above.begin_row(low);
        for k in (low..=high).step_by(2) {
            let at = (middle + k) as usize;
            let (below, above) = (furthest[at - 1], furthest[at + 1]);
            let down = below < above;
            let mut i = match d {
                0 => 0,
                _ if down => above,
                _ => below + 1,
            };
            let mut j = i - k;
            while i < n && j < m && base[i as usize] == compare[j as usize] {
                i += 1;
                j += 1;
            }
            furthest[at] = i;
            from_above.push(down);
            if i >= n && j >= m {
                return Some(retrace(base, compare, &from_above, d, k));
            }
        }
    }
    None
}

/// The path that ends on diagonal `k` after `d` edits.
fn retrace(base: &[u32], compare: &[u32], from_above: &Bits, d: isize, mut k: isize) -> Vec<Pair> {
    let mut edits = Vec::with_capacity(d as usize);
    for d in (1..=d).rev() {
        let down = from_above.get(d, k);
        edits.push(if down { Pair::CompareOnly } else { Pair::BaseOnly });
        k += if down { 1 } else { -1 };
    }
    let mut pairs = Vec::with_capacity(base.len().max(compare.len()) + edits.len());
    let (mut i, mut j) = (0, 0);
    loop {
        while let (Some(a), Some(b)) = (base.get(i), compare.get(j))
            && a == b
        {
            pairs.push(Pair::Both);
            i += 1;
            j += 1;
        }
        match edits.pop() {
            Some(edit) => {
                match edit {
                    Pair::BaseOnly => i += 1,
                    _ => j += 1,
                }
                pairs.push(edit);
            }
            None => return pairs,
        }
    }
}

/// A bit for each diagonal that each number of edits reaches.
#[derive(Default)]
struct Bits {
    words: Vec<u64>,
    count: usize,
    /// For each number of edits, where its bits begin and for which diagonal.
    rows: Vec<(usize, isize)>,
}

impl Bits {
    fn begin_row(&mut self, low: isize) {
        self.rows.push((self.count, low));
    }

    fn push(&mut self, bit: bool) {
        if self.count % 64 == 0 {
            self.words.push(0);
        }
        if let Some(word) = self.words.last_mut() {
            *word |= u64::from(bit) << (self.count % 64);
        }
        self.count += 1;
    }

    fn get(&self, d: isize, k: isize) -> bool {
        let (start, low) = self.rows[d as usize];
        let at = start + ((k - low) / 2) as usize;
        self.words[at / 64] >> (at % 64) & 1 == 1
    }
}

fn heuristic(base: &[u32], compare: &[u32], names: u32) -> Vec<Pair> {
    let tokens = |names: &[u32]| names.iter().copied().map(Token).collect::<Vec<_>>();
    let mut diff = Diff::default();
    diff.compute_with(Algorithm::Myers, &tokens(base), &tokens(compare), names);
    let mut pairs = Vec::with_capacity(base.len().max(compare.len()));
    let (mut i, mut j) = (0, 0);
    while i < base.len() || j < compare.len() {
        if i < base.len() && diff.is_removed(i as u32) {
            pairs.push(Pair::BaseOnly);
            i += 1;
        } else if j < compare.len() && diff.is_added(j as u32) {
            pairs.push(Pair::CompareOnly);
            j += 1;
        } else {
            pairs.push(Pair::Both);
            i += 1;
            j += 1;
        }
    }
    pairs
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
        assert_eq!(align(&[1, 2], &[3, 2], 4, MAX_EDITS).pairs, [BaseOnly, CompareOnly, Both]);
        assert_eq!(align(&[], &[], 0, MAX_EDITS).pairs, []);
        assert_eq!(align(&[], &[1, 1], 2, MAX_EDITS).pairs, [CompareOnly, CompareOnly]);
        assert_eq!(align(&[1, 1], &[1], 2, MAX_EDITS).pairs, [Both, BaseOnly]);
    }

    #[test]
    fn what_differs_too_much_is_aligned_all_the_same() {
        let base: Vec<u32> = (0..2000).collect();
        let compare: Vec<u32> = (0..2000).map(|n| if n % 3 == 0 { n } else { 5000 }).collect();
        let alignment = align(&base, &compare, 5001, 100);
        assert_eq!(alignment.method, Method::Heuristic);
        check(&base, &compare, &alignment.pairs);
        assert!(alignment.pairs.iter().filter(|pair| **pair == Pair::Both).count() > 600);
        assert_eq!(align(&base, &compare, 5001, MAX_EDITS).method, Method::Exact);
    }

    proptest! {
        #[test]
        fn exact_alignment_is_the_greedy_one(
            base in prop::collection::vec(0..5u32, 0..40),
            compare in prop::collection::vec(0..5u32, 0..40),
        ) {
            let pairs = align(&base, &compare, 5, MAX_EDITS).pairs;
            check(&base, &compare, &pairs);
            prop_assert_eq!(edits(&pairs), fewest_edits(&base, &compare));
            prop_assert_eq!(&pairs, &by_nodes(&base, &compare));
            check(&base, &compare, &heuristic(&base, &compare, 5));
        }

        #[test]
        fn a_limit_changes_nothing_below_it(
            base in prop::collection::vec(0..3u32, 0..40),
            compare in prop::collection::vec(0..3u32, 0..40),
        ) {
            let fewest = fewest_edits(&base, &compare);
            prop_assert_eq!(exact(&base, &compare, fewest), exact(&base, &compare, MAX_EDITS));
            if fewest > 0 {
                prop_assert_eq!(exact(&base, &compare, fewest - 1), None);
            }
        }
    }
}
