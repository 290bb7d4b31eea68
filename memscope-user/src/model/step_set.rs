//! Steps that were chosen to be shown.

use std::fmt;
use std::ops::RangeInclusive;

use serde::{Serialize, Serializer};

use super::StepId;

/// All steps, unless some were named.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepSet {
    /// First and last of each run: in order, and apart from each other.
    runs: Vec<(u32, u32)>,
}

impl StepSet {
    /// Those in any of the ranges; all, when there is none.
    pub fn of(ranges: impl IntoIterator<Item = RangeInclusive<u32>>) -> Self {
        let mut sorted: Vec<(u32, u32)> = ranges.into_iter().map(RangeInclusive::into_inner).collect();
        sorted.sort_unstable();
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for (first, last) in sorted {
            match runs.last_mut() {
                Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
                _ => runs.push((first, last)),
            }
        }
        StepSet { runs }
    }

    /// Whether none were named.
    pub fn is_all(&self) -> bool {
        self.runs.is_empty()
    }

    pub fn contains(&self, step: StepId) -> bool {
        let before = self.runs.partition_point(|(_, last)| *last < step.0);
        self.is_all() || self.runs.get(before).is_some_and(|(first, _)| *first <= step.0)
    }

    /// How many of these steps it has.
    pub fn count_in(&self, steps: RangeInclusive<u32>) -> u32 {
        let (from, to) = steps.into_inner();
        let count = |first: u32, last: u32| (last.min(to) + 1).saturating_sub(first.max(from));
        if self.is_all() { count(from, to) } else { self.runs.iter().map(|(a, b)| count(*a, *b)).sum() }
    }
}

/// As it is written: `3-7, 12`.
impl fmt::Display for StepSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (first, last)) in self.runs.iter().enumerate() {
            f.write_str(if at > 0 { ", " } else { "" })?;
            match first == last {
                true => write!(f, "{first}")?,
                false => write!(f, "{first}-{last}")?,
            }
        }
        Ok(())
    }
}

/// As a list of the first and the last step of each run.
impl Serialize for StepSet {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        self.runs.serialize(s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_joined() {
        let set = StepSet::of([12..=12, 3..=5, 6..=7, 4..=4]);
        assert_eq!(set.to_string(), "3-7, 12");
        let has: Vec<u32> = (0..20).filter(|step| set.contains(StepId(*step))).collect();
        assert_eq!(has, [3, 4, 5, 6, 7, 12]);
        assert_eq!((set.count_in(1..=20), set.count_in(5..=11), set.count_in(8..=11)), (6, 3, 0));
        assert!(set.contains(StepId(3)) && !set.is_all());
    }

    #[test]
    fn none_named_are_all() {
        let all = StepSet::of([]);
        assert!(all.is_all() && all.contains(StepId(0)) && all.contains(StepId(u32::MAX)));
        assert_eq!((all.count_in(2..=9), all.count_in(RangeInclusive::new(2, 1))), (8, 0));
    }
}
