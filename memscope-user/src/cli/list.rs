//! Lists as msMemScope takes them: separated by `,` or the full-width comma, empty items ignored.

use std::{ops::RangeInclusive, str::FromStr, time::Duration};

use crate::model::StepSet;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List<T>(pub Vec<T>);

impl<T: PartialEq> List<T> {
    /// Whether the list has the word; an error when it has `none` and another word, which contradict each other.
    pub fn none(&self, none: T) -> Result<bool, &'static str> {
        match self.0.contains(&none) {
            true if self.0.iter().any(|word| *word != none) => Err("none excludes all others"),
            has => Ok(has),
        }
    }
}

impl<T: FromStr<Err = String>> FromStr for List<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let items: Result<Vec<T>, String> =
            text.split([',', '，']).map(str::trim).filter(|item| !item.is_empty()).map(T::from_str).collect();
        let items = items?;
        if items.is_empty() { Err("nothing is named".to_owned()) } else { Ok(List(items)) }
    }
}

/// The words that a list may hold.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident: $what:literal { $($variant:ident = $($word:literal)|+),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $($variant),+ }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(word: &str) -> Result<Self, String> {
                match word {
                    $($($word)|+ => Ok(Self::$variant),)+
                    _ => Err(format!(
                        concat!("{:?} is no ", $what, "; known are: {}"),
                        word,
                        [$([$($word),+][0]),+].join(", ")
                    )),
                }
            }
        }
    };
}
pub(super) use words;

/// A number of 1 or more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ordinal(pub u32);

impl FromStr for Ordinal {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word.parse() {
            Ok(n) if n >= 1 => Ok(Self(n)),
            _ => Err(format!("{word:?} is no step number: they are whole numbers from 1")),
        }
    }
}

/// `N`, `FIRST-LAST`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepRange(pub RangeInclusive<u32>);

impl FromStr for StepRange {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let (first, last) = word.split_once('-').unwrap_or((word, word));
        let (Ordinal(first), Ordinal(last)) = (first.trim().parse()?, last.trim().parse()?);
        match first <= last {
            true => Ok(Self(first..=last)),
            false => Err(format!("{word:?} is no range of steps: FIRST-LAST")),
        }
    }
}

/// The steps of `--steps`: all, when it was not given.
pub fn step_set(ranges: Option<List<StepRange>>) -> StepSet {
    StepSet::of(ranges.into_iter().flat_map(|list| list.0).map(|range| range.0))
}

/// `npu`, `npu:N`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    All,
    One(u16),
}

impl FromStr for Device {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let number = match word {
            "npu" => return Ok(Self::All),
            _ => word.strip_prefix("npu:").and_then(|n| n.parse().ok()),
        };
        number
            .map(Self::One)
            .ok_or_else(|| format!("{word:?} is no device: npu, or npu:N with the driver's number"))
    }
}

/// A span of time in seconds, more than none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seconds(pub Duration);

impl FromStr for Seconds {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        /// 30 years: beyond, clocks overflow.
        const MOST: f64 = 1e9;
        match word.parse::<f64>() {
            Ok(seconds) if seconds > 0.0 && seconds <= MOST => Ok(Self(Duration::from_secs_f64(seconds))),
            _ => Err(format!(
                "{word:?} is no number of seconds: more than 0, at most {MOST}; fractions are allowed"
            )),
        }
    }
}

/// A size in bytes, with an optional K, M or G (powers of 1024).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kib" => 10,
            "m" | "mib" => 20,
            "g" | "gib" => 30,
            _ => return Err(format!("{text:?} is no size: a number, perhaps with K, M or G")),
        };
        digits
            .parse::<u64>()
            .ok()
            .and_then(|n| n.checked_mul(1 << shift))
            .map(Self)
            .ok_or_else(|| format!("{text:?} is no size: a number, perhaps with K, M or G"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_commas_separate() {
        assert_eq!("1,2，3,,".parse::<List<Ordinal>>().unwrap().0.len(), 3);
        assert!("0".parse::<List<Ordinal>>().is_err());
        assert!(["", ",", " "].iter().all(|nothing| nothing.parse::<List<Ordinal>>().is_err()));
        assert_eq!("npu,npu:7".parse::<List<Device>>().unwrap().0, [Device::All, Device::One(7)]);
        assert!("gpu".parse::<Device>().is_err());
    }

    #[test]
    fn steps_are_numbers_and_ranges() {
        let set = step_set(Some("3-7, 12，20-20".parse().unwrap()));
        assert_eq!(set.to_string(), "3-7, 12, 20");
        assert!(step_set(None).is_all());
        for wrong in ["7-3", "0-2", "3-", "-3", "1-2-3", "x"] {
            assert!(wrong.parse::<StepRange>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn none_stands_alone() {
        assert_eq!(List(vec![0, 0]).none(0), Ok(true));
        assert_eq!(List(vec![1]).none(0), Ok(false));
        assert!(List(vec![1, 0]).none(0).is_err());
    }

    #[test]
    fn spans_of_time_are_positive_and_bounded() {
        assert_eq!("0.5".parse::<Seconds>(), Ok(Seconds(Duration::from_millis(500))));
        for wrong in ["0", "-1", "1e300", "NaN", "inf", "x", ""] {
            assert!(wrong.parse::<Seconds>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!("64K".parse::<Bytes>(), Ok(Bytes(65536)));
        assert_eq!("1GiB".parse::<Bytes>(), Ok(Bytes(1 << 30)));
        assert!("x".parse::<Bytes>().is_err());
        assert!("99999999999G".parse::<Bytes>().is_err());
    }
}
