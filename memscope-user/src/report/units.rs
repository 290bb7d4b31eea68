//! Numbers and places as people read them.

use crate::model::Frame;

/// Bytes with three significant digits: `18.1 MiB`.
pub fn bytes(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64;
    let mut unit = "B";
    for larger in ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"] {
        if value < 1023.5 {
            break;
        }
        value /= 1024.0;
        unit = larger;
    }
    format!("{} {unit}", three_digits(value))
}

/// Growth with its sign: `+3.00 MiB`, `-512 B`, `±0`.
pub fn growth(change: i64) -> String {
    match change {
        0 => "±0".to_owned(),
        1.. => format!("+{}", bytes(change.unsigned_abs())),
        _ => format!("-{}", bytes(change.unsigned_abs())),
    }
}

/// A rate: `850 /s`, `1.2 k/s`.
pub fn rate(per_second: f64) -> String {
    match per_second {
        r if r >= 999_950.0 => format!("{:.1} M/s", r / 1e6),
        r if r >= 999.5 => format!("{:.1} k/s", r / 1e3),
        r => format!("{r:.0} /s"),
    }
}

/// A number with its thousands apart: `40,120`.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Sizes come from targets, so that their sum may be anything.
pub fn sum(sizes: impl IntoIterator<Item = u64>) -> u64 {
    sizes.into_iter().fold(0, u64::saturating_add)
}

/// `1 block`, `5 blocks`.
pub fn blocks(number: u64) -> String {
    count_of(number, "block")
}

/// A number of things, by the word for one of them: `1 row`, `2,030 rows`, `2 libraries`.
pub fn count_of(number: u64, thing: &str) -> String {
    let ending = match number {
        1 => return format!("1 {thing}"),
        _ if ["s", "x", "ch", "sh"].iter().any(|end| thing.ends_with(end)) => "es",
        _ => "s",
    };
    match thing.strip_suffix('y').filter(|stem| !stem.ends_with(['a', 'e', 'o', 'u'])) {
        Some(stem) => format!("{} {stem}ies", count(number)),
        None => format!("{} {thing}{ending}", count(number)),
    }
}

/// What has happened to a number of things: `1 event was`, `5 events were`.
pub fn were(number: u64, thing: &str) -> String {
    format!("{} {}", count_of(number, thing), if number == 1 { "was" } else { "were" })
}

/// A line of the program, the file with its directory: `project/train.py:92 in main`.
pub fn place(frame: &Frame) -> String {
    let start = frame.file.rmatch_indices('/').nth(1).map_or(0, |(at, _)| at + 1);
    line_of(&frame.file[start..], frame)
}

/// A line of the program, with the whole path.
pub fn frame(frame: &Frame) -> String {
    line_of(&frame.file, frame)
}

fn line_of(file: &str, frame: &Frame) -> String {
    match frame.line {
        Some(line) => format!("{file}:{line} in {}", frame.function),
        None => format!("{file} in {}", frame.function),
    }
}

fn three_digits(value: f64) -> String {
    let decimals = match value {
        v if v < 0.9995 => 3,
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_three_digits() {
        for (number, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (3_146_240, "3.00 MiB"),
            (18_980_000, "18.1 MiB"),
            (10_481_000, "10.0 MiB"),
            (1_048_575, "1.00 MiB"),
            (1_048_000, "1023 KiB"),
            (68_719_476_736, "64.0 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(bytes(number), text, "{number}");
        }
        assert_eq!(growth(-3 << 20), "-3.00 MiB");
        assert_eq!(growth(i64::MIN), "-8.00 EiB");
    }

    #[test]
    fn things_are_one_or_several() {
        for (number, thing, text) in [
            (0, "mark", "0 marks"),
            (1, "row", "1 row"),
            (2_030, "row", "2,030 rows"),
            (2, "library", "2 libraries"),
            (1, "library", "1 library"),
            (3, "process", "3 processes"),
            (3, "day", "3 days"),
        ] {
            assert_eq!(count_of(number, thing), text);
        }
        assert_eq!((were(1, "event"), were(2, "event")), ("1 event was".into(), "2 events were".into()));
    }

    #[test]
    fn counts_and_rates() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(40_120), "40,120");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(rate(0.0), "0 /s");
        assert_eq!(rate(1234.0), "1.2 k/s");
        assert_eq!(rate(2_500_000.0), "2.5 M/s");
    }
}
