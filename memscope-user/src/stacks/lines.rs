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
        line += match kind {
            10..=12 => i64::from(kind) - 10,
            13 | 14 => signed_varint(tail.get(..body)?),
            _ => 0,
        };
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
