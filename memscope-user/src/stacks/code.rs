//! Code objects: what a frame's function is called, and where its lines are.
//!
//! They are read from what the BPF programs have copied, else while the program runs on. One that was freed meanwhile must not lend its name to another: its type,
//! its reference count and the identity that the BPF program saw are checked before and after its texts are read.

use memscope_ebpf::identity;

use super::{
    lines::line,
    memory::{Read, half_at, word_at},
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
    pub fn read(
        memory: &impl Read,
        offsets: &Offsets,
        types: &Types,
        address: u64,
        wanted: u64,
    ) -> Option<Self> {
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

fn object(memory: &impl Read, format: &InCode, address: u64) -> Option<Vec<u8>> {
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

pub(super) fn identity_of(object: &[u8], format: &InCode) -> Option<u64> {
    let mut words = [0; 4];
    for (n, word) in words.iter_mut().take(usize::from(format.identity_bytes) / 8).enumerate() {
        *word = word_at(object, format.filename + 8 * n as u16)?;
    }
    Some(identity(words))
}

/// A `str`: Latin-1, UCS-2 or UCS-4 behind its head.
fn text(memory: &impl Read, format: &InStr, types: &Types, address: u64) -> Option<Name> {
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
fn table(memory: &impl Read, types: &Types, address: u64) -> Option<Vec<u8>> {
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

#[cfg(test)]
#[path = "../../tests/fuzzing/mod.rs"]
pub(super) mod fuzzing;

#[cfg(test)]
mod tests {
    use super::{fuzzing::*, *};
    use crate::{model::Tgid, probes::elf::Arch, stacks::memory::Memory};

    const TYPES: Types = Types { code: 0xc0de, text: 0x7e47, bytes: 0xb17e };

    /// Objects of an interpreter, in memory of our own.
    struct Objects {
        memory: Vec<u8>,
        used: usize,
    }

    impl Objects {
        fn address(&self, at: usize) -> u64 {
            self.memory.as_ptr() as u64 + at as u64
        }

        fn put(&mut self, at: usize, bytes: &[u8]) {
            self.memory[at..at + bytes.len()].copy_from_slice(bytes);
        }

        /// An object of so many bytes that someone refers to.
        fn object(&mut self, of_type: u64, bytes: usize) -> usize {
            let at = self.used;
            self.used = (at + bytes).next_multiple_of(16);
            self.put(at, &1u64.to_le_bytes());
            self.put(at + 8, &of_type.to_le_bytes());
            at
        }

        fn text(&mut self, format: &InStr, text: &[u8], width: u32) -> u64 {
            let at = self.object(TYPES.text, usize::from(format.other) + text.len() + 8);
            let ascii = width == 1 && text.is_ascii();
            let state = 1 << 5 | width << 2 | u32::from(ascii) << 6;
            self.put(at + 16, &(text.len() as u64 / u64::from(width)).to_le_bytes());
            self.put(at + 32, &state.to_le_bytes());
            self.put(at + usize::from(if ascii { format.ascii } else { format.other }), text);
            self.address(at)
        }

        fn bytes(&mut self, bytes: &[u8]) -> u64 {
            let at = self.object(TYPES.bytes, 32 + bytes.len());
            self.put(at + 16, &(bytes.len() as u64).to_le_bytes());
            self.put(at + 32, bytes);
            self.address(at)
        }
    }

    /// The objects of a function, the address of its code and its identity.
    fn function(offsets: &Offsets, name: &str, lines: &[u8]) -> (Objects, u64, u64) {
        let mut objects = Objects { memory: vec![0; 1 << 14], used: 0 };
        let format = offsets.in_code;
        let code = objects.object(TYPES.code, format.bytes.into());
        let name = objects.text(&offsets.in_str, name.as_bytes(), 1);
        let file = objects.text(&offsets.in_str, &[b'/', 0, 0x4e, 0x2d], 2);
        let lines = objects.bytes(lines);
        let at = |offset: u16| code + usize::from(offset);
        objects.put(at(format.filename), &file.to_le_bytes());
        objects.put(at(format.name), &name.to_le_bytes());
        objects.put(at(format.qualname.unwrap_or(format.name)), &name.to_le_bytes());
        objects.put(at(format.lines), &lines.to_le_bytes());
        objects.put(at(format.first_line), &7u32.to_le_bytes());
        let identity = identity_of(&objects.memory[code..], &format).expect("it is whole");
        let address = objects.address(code);
        (objects, address, identity)
    }

    fn versions() -> Vec<Offsets> {
        let archs = [Arch::X86_64, Arch::Aarch64];
        (8..=13)
            .flat_map(|minor| archs.map(|arch| Offsets::of(minor, arch).expect("a known version")))
            .collect()
    }

    fn own_memory() -> Memory {
        Memory::Numbered(Tgid(std::process::id()))
    }

    #[test]
    fn texts_are_read_from_memory() {
        for offsets in versions() {
            let (_objects, address, identity) = function(&offsets, "Model.forward", &[]);
            let read = |identity| Code::read(&own_memory(), &offsets, &TYPES, address, identity);
            let code = read(identity).expect("it is there");
            assert_eq!((&*code.function, &*code.file), ("Model.forward", "/\u{2d4e}"));
            assert!(read(identity + 1).is_none(), "another one by now");
        }
    }

    /// Whatever is in memory: no panic, and nothing of any size that it claims.
    #[test]
    fn fuzz_code() {
        let versions = versions();
        rounds("code", 3000, |random| {
            let offsets = random.pick(&versions);
            let lines: Vec<u8> = (0..random.below(300)).map(|_| random.next() as u8).collect();
            let (mut objects, address, identity) = function(offsets, "f", &lines);
            let used = objects.used;
            for _ in 0..random.below(6) {
                let at = random.below(used / 8) * 8;
                let inside = objects.address(random.below(used));
                let word = *random.pick(&[
                    0,
                    1,
                    u64::MAX,
                    1 << 47,
                    1 << 20,
                    1 << 32,
                    inside,
                    TYPES.text,
                    TYPES.code,
                ]);
                objects.put(at, &word.to_le_bytes());
            }
            let format = offsets.in_code;
            let start = (address - objects.address(0)) as usize;
            let now = identity_of(&objects.memory[start..], &format).unwrap_or(identity);
            if let Some(code) = Code::read(&own_memory(), offsets, &TYPES, address, now) {
                assert!(code.function.len() <= 4 * 8 * TEXT_MOST as usize);
                let _ = code.at(random.next() >> random.below(64), random.one_in(2));
                let _ = code.at(code.instructions + random.below(1 << 12) as u64, random.one_in(2));
            }
            // A table that is nearly one, and what it says at every place.
            let mut table = lines.clone();
            damage(
                &mut table,
                &[&[0xff; 12], &[0xf0, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x3f]],
                random,
            );
            for offset in [0, 1, 50, 1000, u32::MAX] {
                let _ = line(format.format, &table, random.next() as u32, offset);
            }
        });
    }
}
