//! Line numbers, from the tables of code objects.

use super::offsets::LineFormat;

/// The line of the instruction at `offset` bytes; `None` where it belongs to no line. What is cut short ends with
/// the last line that it tells.
pub fn line(format: LineFormat, table: &[u8], first_line: u32, offset: u32) -> Option<u32> {
    match format {
        LineFormat::Steps => steps(table, first_line, offset),
        LineFormat::Ranges => ranges(table, first_line, offset),
        LineFormat::Locations => locations(table, first_line, offset),
    }
}

/// Pairs: bytes of code, then lines to go on by.
fn steps(table: &[u8], first_line: u32, offset: u32) -> Option<u32> {
    let mut line = i64::from(first_line);
    let mut address = 0u32;
    for pair in table.chunks_exact(2) {
        address = address.saturating_add(pair[0].into());
        if address > offset {
            break;
        }
        line += i64::from(pair[1] as i8);
    }
    u32::try_from(line).ok()
}

/// Pairs: bytes of code of a range, and its line relative to the last one; -128: it has none.
fn ranges(table: &[u8], first_line: u32, offset: u32) -> Option<u32> {
    let mut line = i64::from(first_line);
    let mut end = 0u32;
    for pair in table.chunks_exact(2) {
        let delta = pair[1] as i8;
        let has_line = delta != i8::MIN;
        if has_line {
            line += i64::from(delta);
        }
        end = end.saturating_add(pair[0].into());
        if offset < end {
            return u32::try_from(line).ok().filter(|_| has_line);
        }
    }
    None
}

/// Entries of a head byte, `1cccclll`: kind c, l + 1 code units; and what the kind has besides. Other bytes of an
/// entry have their highest bit clear.
fn locations(table: &[u8], first_line: u32, offset: u32) -> Option<u32> {
    const NO_LINE: u8 = 15;
    let mut line = i64::from(first_line);
    let mut end = 0u32;
    let mut rest = table;
    while let [head, tail @ ..] = rest {
        let body = tail.iter().position(|byte| byte & 0x80 != 0).unwrap_or(tail.len());
        let kind = (head >> 3) & 15;
        line = line.saturating_add(match kind {
            10..=12 => i64::from(kind) - 10,
            13 | 14 => signed_varint(tail.get(..body)?),
            _ => 0,
        });
        end = end.saturating_add((u32::from(head & 7) + 1) * 2);
        if offset < end {
            return u32::try_from(line).ok().filter(|_| kind != NO_LINE);
        }
        rest = tail.get(body..)?;
    }
    None
}

/// Six bits a byte, lowest first, bit 6 where more follow; the sign is in the lowest bit.
fn signed_varint(bytes: &[u8]) -> i64 {
    let mut value = 0u64;
    for (n, byte) in bytes.iter().take(10).enumerate() {
        value |= u64::from(byte & 0x3f) << (6 * n);
        if byte & 0x40 == 0 {
            break;
        }
    }
    let magnitude = (value >> 1) as i64;
    if value & 1 != 0 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::{probes::elf::Arch, stacks::offsets::Offsets};

    #[derive(Deserialize)]
    struct Sample {
        minor: u8,
        name: String,
        first: u32,
        table: String,
        /// Of each instruction of two bytes.
        lines: Vec<Option<u32>>,
    }

    /// Of `testdata/lines.py`, by six versions of the interpreter.
    fn samples() -> Vec<Sample> {
        let text = include_str!("testdata/lines.jsonl");
        text.lines().map(|line| serde_json::from_str(line).expect("a sample")).collect()
    }

    fn format(minor: u8) -> LineFormat {
        Offsets::of(minor, Arch::X86_64).expect("a known version").in_code.format
    }

    fn bytes(table: &str) -> Vec<u8> {
        let digits = table.as_bytes().chunks_exact(2);
        digits.map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap_or(""), 16).unwrap_or(0)).collect()
    }

    #[test]
    fn lines_are_what_the_interpreter_says() {
        let samples = samples();
        for minor in 8..=13 {
            assert!(samples.iter().filter(|sample| sample.minor == minor).count() >= 6, "3.{minor}");
        }
        for Sample { minor, name, first, table, lines } in samples {
            let table = bytes(&table);
            for (offset, expected) in (0..).step_by(2).zip(lines) {
                let found = line(format(minor), &table, first, offset);
                assert_eq!(found, expected, "3.{minor} {name} at {offset}");
            }
        }
    }

    /// Tables are read from a process: whatever is in them, nothing breaks.
    #[test]
    fn any_bytes_are_a_table() {
        for Sample { minor, table, lines, .. } in samples() {
            let whole = bytes(&table);
            for end in 0..whole.len() {
                let mut table = whole[..end].to_vec();
                for flipped in [0, 0x80, 0xff] {
                    if let Some(last) = table.last_mut() {
                        *last ^= flipped;
                    }
                    for first in [0, u32::MAX] {
                        line(format(minor), &table, first, 2 * lines.len() as u32);
                        line(format(minor), &table, first, u32::MAX);
                    }
                }
            }
        }
    }
}
