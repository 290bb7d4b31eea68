//! Code objects: what a frame's function is called, and where its lines are.
//!
//! They are read while the program runs on. One that was freed meanwhile must not lend its name to another: its type,
//! its reference count and the identity that the BPF program saw are checked before and after its texts are read.

use memscope_ebpf::identity;

use super::{
    lines::line,
    memory::{Memory, half_at, word_at},
    offsets::{InCode, InStr, Offsets, Position},
};
use crate::{model::Name, text::sanitize};

/// Characters of a name or path at most; the rest is cut.
const TEXT_MOST: u64 = 1024;
/// Bytes of a line table at most; that of a function of 10 000 lines is shorter.
const TABLE_MOST: u64 = 1 << 20;
/// No object has that many references; the freed ones have an address in place of the count.
const REFERENCES_MOST: u64 = 1 << 40;

/// Addresses of the types that objects must be of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    pub code: u64,
    pub text: u64,
    pub bytes: u64,
}

#[derive(Debug)]
pub struct Code {
    pub function: Name,
    pub file: Name,
    lines: Vec<u8>,
    first_line: u32,
    /// Address of the first instruction.
    instructions: u64,
    /// Bytes of instructions before the function's own.
    preamble: u64,
    format: InCode,
    position: Position,
}

/// Where a frame is in its code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// It has not begun: for the program, it is not there yet.
    NotBegun,
    Line(Option<u32>),
}

impl Code {
    /// Reads the code object at `address`; `None` when it is not the one with this identity any more.
    pub fn read(memory: Memory, offsets: &Offsets, types: &Types, address: u64, wanted: u64) -> Option<Self> {
        let format = offsets.in_code;
        let object = object(memory, &format, address)?;
        if wanted == 0 || !is_valid(&object, &format, types, wanted) {
            return None;
        }
        let text = |at| text(memory, &offsets.in_str, types, word_at(&object, at)?);
        let code = Self {
            function: text(format.qualname.unwrap_or(format.name))?,
            file: text(format.filename)?,
            lines: table(memory, types, word_at(&object, format.lines)?)?,
            first_line: half_at(&object, format.first_line)?,
            instructions: address.wrapping_add(format.instructions.into()),
            preamble: match format.first_traceable {
                Some(at) => 2 * u64::from(half_at(&object, at)?),
                None => 0,
            },
            format,
            position: offsets.in_frame.position,
        };
        // Freed while it was read: then the texts may be another's.
        is_valid(&self::object(memory, &format, address)?, &format, types, wanted).then_some(code)
    }

    pub fn at(&self, instruction: u64, in_generator: bool) -> At {
        let offset = match self.position {
            Position::Index(unit) => {
                let index = instruction as u32 as i32;
                match u32::try_from(index) {
                    Ok(index) => index.saturating_mul(unit),
                    Err(_) => return At::Line(Some(self.first_line)),
                }
            }
            Position::Address => {
                let offset = instruction.wrapping_sub(self.instructions);
                if !in_generator && (offset as i64) < self.preamble as i64 {
                    return At::NotBegun;
                }
                match u32::try_from(offset) {
                    Ok(offset) => offset,
                    Err(_) => return At::Line(Some(self.first_line)),
                }
            }
        };
        At::Line(line(self.format.format, &self.lines, self.first_line, offset))
    }
}

fn object(memory: Memory, format: &InCode, address: u64) -> Option<Vec<u8>> {
    let mut object = vec![0; format.bytes.into()];
    memory.read(address, &mut object)?;
    Some(object)
}

fn is_valid(object: &[u8], format: &InCode, types: &Types, wanted: u64) -> bool {
    is_alive(object, types.code) && identity_of(object, format) == Some(wanted)
}

/// Whether it begins as an object of this type does that someone refers to.
pub fn is_alive(object: &[u8], of_type: u64) -> bool {
    word_at(object, 0).is_some_and(|count| count > 0 && count < REFERENCES_MOST)
        && word_at(object, 8) == Some(of_type)
}

fn identity_of(object: &[u8], format: &InCode) -> Option<u64> {
    let mut words = [0; 4];
    for (n, word) in words.iter_mut().take(usize::from(format.identity_bytes) / 8).enumerate() {
        *word = word_at(object, format.filename + 8 * n as u16)?;
    }
    Some(identity(words))
}

/// A `str`: Latin-1, UCS-2 or UCS-4 behind its head.
fn text(memory: Memory, format: &InStr, types: &Types, address: u64) -> Option<Name> {
    const COMPACT: u32 = 1 << 5;
    const ASCII: u32 = 1 << 6;
    let head: [u8; 40] = memory.bytes(address)?;
    let (length, state) = (word_at(&head, 16)?, half_at(&head, 32)?);
    if !is_alive(&head, types.text) || state & COMPACT == 0 {
        return None;
    }
    let at = if state & ASCII != 0 { format.ascii } else { format.other };
    let width = (state >> 2) & 7;
    let taken = length.min(TEXT_MOST);
    let mut bytes = vec![0; (taken * u64::from(width)) as usize];
    memory.read(address + u64::from(at), &mut bytes)?;
    let scalar = |value: u32| char::from_u32(value).unwrap_or(char::REPLACEMENT_CHARACTER);
    let mut text: String = match width {
        1 => bytes.iter().map(|byte| char::from(*byte)).collect(),
        2 => {
            bytes.chunks_exact(2).map(|unit| scalar(u16::from_le_bytes([unit[0], unit[1]]).into())).collect()
        }
        4 => bytes
            .chunks_exact(4)
            .map(|unit| scalar(u32::from_le_bytes([unit[0], unit[1], unit[2], unit[3]])))
            .collect(),
        _ => return None,
    };
    if taken < length {
        text.push('…');
    }
    Some(sanitize(text.as_bytes()).into())
}

/// The content of a `bytes` object.
fn table(memory: Memory, types: &Types, address: u64) -> Option<Vec<u8>> {
    let head: [u8; 24] = memory.bytes(address)?;
    let length = word_at(&head, 16)?;
    if !is_alive(&head, types.bytes) || length > TABLE_MOST {
        return None;
    }
    let mut bytes = vec![0; length as usize];
    if length > 0 {
        memory.read(address + 32, &mut bytes)?;
    }
    Some(bytes)
}
