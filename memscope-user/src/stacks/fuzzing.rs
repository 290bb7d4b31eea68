//! What the targets in `fuzz/` can not reach from outside.

use std::{fs::File, path::Path};

use blazesym::symbolize::Symbolizer;

use super::{
    code::{Code, Types, identity_of},
    lines::line,
    memory::{Read, word_at},
    native::module::Module,
    offsets::Offsets,
};
use crate::probes::elf::Arch;

/// Where the image is.
const BASE: u64 = 0x10_0000;
const TYPES: Types = Types { code: 0xc0de, text: 0x7e47, bytes: 0xb17e };
/// Bytes before the image: version, machine, whose frame, and an instruction.
const HEAD: usize = 12;

/// Memory that holds these bytes only.
struct Image<'a>(&'a [u8]);

impl Read for Image<'_> {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Option<()> {
        let at = usize::try_from(address.checked_sub(BASE)?).ok()?;
        bytes.copy_from_slice(self.0.get(at..at.checked_add(bytes.len())?)?);
        Some(())
    }
}

fn offsets(data: &[u8]) -> Option<Offsets> {
    let arch = if data.get(1)? & 1 == 0 { Arch::X86_64 } else { Arch::Aarch64 };
    Offsets::of(8 + data.first()? % 6, arch)
}

/// A code object at the beginning of an image, of the version that the first bytes name.
pub fn code(data: &[u8]) {
    let (Some(offsets), Some(instruction), Some(image)) = (offsets(data), word_at(data, 4), data.get(HEAD..))
    else {
        return;
    };
    let in_generator = data[2] & 1 == 1;
    let format = offsets.in_code;
    let Some(identity) = identity_of(image, &format) else { return };
    if let Some(code) = Code::read(&Image(image), &offsets, &TYPES, BASE, identity) {
        let _ = code.at(instruction, in_generator);
    }
    let _ = line(format.format, image, instruction as u32, (instruction >> 32) as u32);
}

/// A whole function of each version.
pub fn codes() -> Vec<Vec<u8>> {
    let (mut seeds, text_at, table_at) = (Vec::new(), 1024, 1536);
    for version in 0..6u8 {
        let mut seed = vec![0; HEAD + 2048];
        seed[..3].copy_from_slice(&[version, version, version]);
        let Some(offsets) = offsets(&seed) else { continue };
        let mut put =
            |at: usize, bytes: &[u8]| seed[HEAD + at..HEAD + at + bytes.len()].copy_from_slice(bytes);
        for (at, of_type, length) in
            [(0, TYPES.code, 0u64), (text_at, TYPES.text, 4), (table_at, TYPES.bytes, 24)]
        {
            put(at, &1u64.to_le_bytes());
            put(at + 8, &of_type.to_le_bytes());
            put(at + 16, &length.to_le_bytes());
        }
        put(text_at + 32, &(1u32 << 5 | 1 << 2 | 1 << 6).to_le_bytes());
        put(text_at + usize::from(offsets.in_str.ascii), b"main");
        put(table_at + 32, &[8, 1, 8, 1, 0xf0, 3, 2, 5]);
        let format = offsets.in_code;
        for name in [Some(format.filename), Some(format.name), format.qualname].into_iter().flatten() {
            put(name.into(), &(BASE + text_at as u64).to_le_bytes());
        }
        put(format.lines.into(), &(BASE + table_at as u64).to_le_bytes());
        put(format.first_line.into(), &7u32.to_le_bytes());
        seeds.push(seed);
    }
    seeds
}

/// What a file with code says of addresses: those of its beginning, and some that `data` names.
pub fn modules(file: File, data: &[u8]) {
    let mut module = Module::new(file, Path::new("fuzzed.so"));
    let symbolizer = Symbolizer::builder().enable_demangling(false).build();
    let named = data.rchunks_exact(8).take(4).filter_map(|word| word_at(word, 0));
    let places = (1..=16u64).map(|part| data.len() as u64 * part / 16);
    for address in named.chain(places) {
        let _ = module.bias(address, address & 0xf_ffff);
        let _ = module.rule(address);
        let _ = module.names(address, &symbolizer);
    }
}
