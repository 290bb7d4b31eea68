//! The loaded form of a library: segments, relocations, function bounds, and searches over them. The raw
//! material of the resolvers for stripped binaries.

use std::cell::Cell;

use gimli::{BaseAddresses, EhFrame, EhFrameHdr, LittleEndian, UnwindSection};
use object::elf;

use super::elf::{Arch, ElfError, Library, Symbol, u64_at};
use super::flow::{aarch64, x86_64};

/// Bytes loaded of one library. The largest torch_npu has 98 MB, and grows by 10 MB a year.
const MAX_LOADED: u64 = 384 << 20;
/// Longest name of an import looked at; those looked for have less than 100 bytes.
const MAX_SYMBOL_NAME: usize = 256;
/// Places that a search for a text or an import hands out. What is looked for has one or two.
const MAX_PLACES: usize = 64;
/// Functions or calls that a search hands out. What is looked for has a handful.
const MAX_HITS: usize = 4096;
/// Instructions decoded for one library. Real ones take 2 million at most.
const MAX_WORK: u64 = 20_000_000;

struct Mapped {
    address: u64,
    data: Vec<u8>,
    executable: bool,
}

/// Code of one function, as the unwind tables bound it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Function {
    pub start: u64,
    pub end: u64,
}

impl Function {
    pub fn contains(&self, address: u64) -> bool {
        (self.start..self.end).contains(&address)
    }
}

pub struct Image<'a> {
    library: &'a Library,
    mapped: Vec<Mapped>,
    /// (place, value): 8-byte places that hold an address of this library after relocation. Sorted.
    pointers: Vec<(u64, u64)>,
    /// (place, symbol number): places that hold the address of another library's symbol. Sorted.
    imports: Vec<(u64, u32)>,
    /// (start of a function, address of its FDE). Sorted.
    functions: Vec<(u64, u64)>,
    eh_frame: u64,
    work: Cell<u64>,
}

impl<'a> Image<'a> {
    pub fn load(library: &'a Library) -> Result<Image<'a>, ElfError> {
        let segments = library.segments();
        let total = segments.iter().fold(0u64, |sum, s| sum.saturating_add(s.file_size));
        if total > MAX_LOADED {
            return Err(library.too_large("what it loads"));
        }
        let mut mapped = Vec::with_capacity(segments.len());
        for s in segments {
            let data = library.read_file(s.offset, s.file_size, "a segment")?;
            mapped.push(Mapped { address: s.address, data, executable: s.executable });
        }
        let mut image = Image {
            library,
            mapped,
            pointers: Vec::new(),
            imports: Vec::new(),
            functions: Vec::new(),
            eh_frame: 0,
            work: Cell::new(0),
        };
        image.read_relocations()?;
        image.read_functions()?;
        Ok(image)
    }

    pub fn arch(&self) -> Arch {
        self.library.arch()
    }

    pub fn library(&self) -> &'a Library {
        self.library
    }

    /// Bytes from `address` to the end of its segment's part in the file.
    pub fn bytes(&self, address: u64) -> Option<&[u8]> {
        self.mapped.iter().find_map(|m| m.data.get(usize::try_from(address.checked_sub(m.address)?).ok()?..))
    }

    /// The C string at `address`, if it is one of printable ASCII and not longer than `limit`.
    pub fn text(&self, address: u64, limit: usize) -> Option<&str> {
        let bytes = self.bytes(address)?;
        let end = bytes.iter().take(limit + 1).position(|&b| b == 0)?;
        let text = bytes.get(..end).filter(|t| t.iter().all(|b| b.is_ascii_graphic() || *b == b' '))?;
        std::str::from_utf8(text).ok()
    }

    /// Addresses, sorted, where `text` and a NUL stand, at the end of a longer string too: linkers merge strings
    /// by their tails.
    pub fn find_text(&self, text: &str) -> Vec<u64> {
        let in_data = self.find_text_in(text, |m| !m.executable);
        // Old linkers put constants and code into one segment.
        let mut found = if in_data.is_empty() { self.find_text_in(text, |m| m.executable) } else { in_data };
        found.sort_unstable();
        found
    }

    fn find_text_in(&self, text: &str, wanted: impl Fn(&&Mapped) -> bool) -> Vec<u64> {
        let needle: Vec<u8> = text.bytes().chain([0]).collect();
        let mut found = Vec::new();
        for m in self.mapped.iter().filter(wanted) {
            for (at, &byte) in m.data.iter().enumerate() {
                if Some(&byte) == needle.first()
                    && found.len() < MAX_PLACES
                    && m.data.get(at..).is_some_and(|rest| rest.starts_with(&needle))
                {
                    found.push(m.address + at as u64);
                }
            }
        }
        found
    }

    /// The address that the 8 bytes at `place` hold after relocation, if it is one of this library.
    pub fn pointer(&self, place: u64) -> Option<u64> {
        let found = self.pointers.binary_search_by_key(&place, |&(at, _)| at).ok()?;
        self.pointers.get(found).map(|&(_, value)| value)
    }

    /// Places that hold one of `values` (sorted) after relocation.
    pub fn pointers_to(&self, values: &[u64]) -> impl Iterator<Item = u64> {
        self.pointers.iter().filter(|(_, value)| values.binary_search(value).is_ok()).map(|&(place, _)| place)
    }

    /// Places that hold the address of `name` of another library.
    pub fn imports_of(&self, name: &str) -> Vec<u64> {
        let named = |number| self.symbol_name(number).is_some_and(|n| n == name.as_bytes());
        let places = self.imports.iter().filter(|&&(_, number)| named(number)).map(|&(place, _)| place);
        places.take(MAX_PLACES).collect()
    }

    /// The symbol of another library whose address the dynamic linker puts at `place`.
    pub fn import_at(&self, place: u64) -> Option<&[u8]> {
        let found = self.imports.binary_search_by_key(&place, |&(at, _)| at).ok()?;
        self.imports.get(found).and_then(|&(_, number)| self.symbol_name(number))
    }

    /// The function that starts at `address`.
    pub fn function_at(&self, address: u64) -> Option<Function> {
        self.function_of(address).filter(|f| f.start == address)
    }

    /// The function that `address` lies in.
    pub fn function_of(&self, address: u64) -> Option<Function> {
        let after = self.functions.partition_point(|&(start, _)| start <= address);
        let &(start, fde) = self.functions.get(after.checked_sub(1)?)?;
        let section = EhFrame::new(self.bytes(self.eh_frame)?, LittleEndian);
        let bases = BaseAddresses::default().set_eh_frame(self.eh_frame);
        let offset = usize::try_from(fde.checked_sub(self.eh_frame)?).ok()?;
        let fde = section.fde_from_offset(&bases, offset.into(), EhFrame::cie_from_offset).ok()?;
        let function = Function { start, end: start.checked_add(fde.len())? };
        (fde.initial_address() == start && function.contains(address) && self.is_code(start))
            .then_some(function)
    }

    pub fn code(&self, function: Function) -> Option<&[u8]> {
        let size = usize::try_from(function.end.checked_sub(function.start)?).ok()?;
        self.bytes(function.start)?.get(..size)
    }

    pub fn is_code(&self, address: u64) -> bool {
        self.mapped
            .iter()
            .any(|m| m.executable && address >= m.address && address - m.address < m.data.len() as u64)
    }

    /// Functions whose code names one of `targets`, an address, by an instruction: loads from it, or computes
    /// it. May hold others.
    ///
    /// aarch64 names an address by two instructions. They are looked for along the code as it lies in the file,
    /// which misses pairs that a jump connects; with `exhaustive` it misses none, and finds up to a hundred
    /// times more functions.
    pub fn functions_that_name(&self, targets: &[u64], exhaustive: bool) -> Vec<Function> {
        let mut targets = targets.to_vec();
        targets.sort_unstable();
        let mut functions = match self.arch() {
            Arch::X86_64 => self.x86_references(&targets),
            Arch::Aarch64 => self.aarch64_references(&targets, exhaustive),
        };
        functions.sort_unstable();
        functions.dedup();
        functions
    }

    /// (caller, callee) for every direct call or tail call of one of `targets`.
    pub fn calls_of(&self, targets: &[u64]) -> Vec<(Function, u64)> {
        let mut targets = targets.to_vec();
        targets.sort_unstable();
        let hits = match self.arch() {
            Arch::X86_64 => self.x86_calls(&targets),
            Arch::Aarch64 => self.aarch64_calls(&targets),
        };
        let mut calls: Vec<_> =
            hits.into_iter().filter_map(|(at, target)| Some((self.function_of(at)?, target))).collect();
        calls.sort_unstable();
        calls.dedup();
        calls
    }

    /// Takes `instructions` from the budget of this image; false when it is used up. Bounds the time that a
    /// hostile file can take.
    pub fn spend(&self, instructions: u64) -> bool {
        let used = self.work.get().saturating_add(instructions);
        self.work.set(used);
        used <= MAX_WORK
    }

    fn code_segments(&self) -> impl Iterator<Item = &Mapped> {
        self.mapped.iter().filter(|m| m.executable)
    }

    /// Functions with 4 bytes that, as a displacement, lead to one of `targets`. All positions are tried, as one
    /// can not know where instructions begin.
    fn x86_references(&self, targets: &[u64]) -> Vec<Function> {
        let (Some(&low), Some(&high)) = (targets.first(), targets.last()) else { return Vec::new() };
        let mut functions = Vec::new();
        for m in self.code_segments() {
            let mut window = 0u32;
            let mut next = m.address;
            for &byte in &m.data {
                window = window >> 8 | u32::from(byte) << 24;
                next += 1;
                let target = next.wrapping_add_signed(i64::from(window as i32));
                let is_named = target >= low && target <= high && targets.binary_search(&target).is_ok();
                if is_named && functions.len() < MAX_HITS && self.spend(1) {
                    functions.extend(self.function_of(next - 1));
                }
            }
        }
        functions
    }

    fn x86_calls(&self, targets: &[u64]) -> Vec<(u64, u64)> {
        let mut hits = Vec::new();
        for m in self.code_segments() {
            let mut window = 0u64;
            let mut next = m.address;
            for &byte in &m.data {
                window = window >> 8 | u64::from(byte) << 32;
                next += 1;
                if matches!(window as u8, 0xe8 | 0xe9) {
                    let target = next.wrapping_add_signed(i64::from((window >> 8) as i32));
                    if targets.binary_search(&target).is_ok() && hits.len() < MAX_HITS {
                        hits.push((next.wrapping_sub(5), target));
                    }
                }
            }
        }
        hits.retain(|&(at, _)| self.is_x86_instruction(at));
        hits
    }

    /// Whether an instruction begins at `at`, decoding from the start of its function.
    fn is_x86_instruction(&self, at: u64) -> bool {
        let Some(function) = self.function_of(at) else { return false };
        let before = Function { start: function.start, end: at };
        self.spend((at - function.start) / 4) && self.code(before).is_some_and(x86_64::is_whole)
    }

    /// Functions that compute one of `targets` in one instruction (`adr`), or load its page into a register
    /// (`adrp`) and add its low 12 bits to that register or load from there.
    fn aarch64_references(&self, targets: &[u64], exhaustive: bool) -> Vec<Function> {
        let mut functions = Vec::new();
        for m in self.code_segments() {
            let mut done = m.address;
            for (at, word) in words(m).filter(|&(_, word)| word & 0x1f00_0000 == 0x1000_0000) {
                let is_named = |&t: &u64| {
                    aarch64::address(at, word) == Some(t) || aarch64::page(at, word) == Some(t & !0xfff)
                };
                if at < done || !targets.iter().any(is_named) {
                    continue;
                }
                if !self.spend(1) || functions.len() == MAX_HITS {
                    return functions;
                }
                let Some(function) = self.function_of(at) else { continue };
                done = function.end;
                if targets.iter().any(|&t| self.makes_address(function, t, exhaustive)) {
                    functions.push(function);
                }
            }
        }
        functions
    }

    fn makes_address(&self, function: Function, target: u64, exhaustive: bool) -> bool {
        let Some(code) = self.code(function).filter(|code| self.spend(code.len() as u64 / 32)) else {
            return false;
        };
        let words = || (0u64..).zip(code.as_chunks::<4>().0).map(|(i, &b)| (4 * i, u32::from_le_bytes(b)));
        let loads_page =
            |(at, word): &(u64, u32)| aarch64::page(function.start + at, *word) == Some(target & !0xfff);
        let low = (target & 0xfff) as u32;
        let (add, load) = (0x9100_0000 | low << 10, 0xf940_0000 | (low / 8) << 10);
        // Registers that hold the page, a bit each.
        let mut holders = 0u32;
        if exhaustive {
            holders = words().filter(loads_page).fold(0, |mask, (_, word)| mask | 1 << (word & 0x1f));
        }
        words().any(|(at, word)| {
            let makes = word & 0xffff_fc00 == add || (word & 0xffff_fc00 == load && low.is_multiple_of(8));
            let named = (makes && holders >> (word >> 5 & 0x1f) & 1 == 1)
                || aarch64::address(function.start + at, word) == Some(target);
            if !exhaustive {
                holders &= !aarch64::overwritten(word);
                holders |= u32::from(loads_page(&(at, word))) << (word & 0x1f);
            }
            named
        })
    }

    fn aarch64_calls(&self, targets: &[u64]) -> Vec<(u64, u64)> {
        let mut hits = Vec::new();
        for m in self.code_segments() {
            for (at, word) in words(m) {
                if word & 0x7c00_0000 == 0x1400_0000 {
                    let target = at.wrapping_add_signed(i64::from((word << 6) as i32 >> 4));
                    if targets.binary_search(&target).is_ok() && hits.len() < MAX_HITS {
                        hits.push((at, target));
                    }
                }
            }
        }
        hits
    }

    fn read_relocations(&mut self) -> Result<(), ElfError> {
        let cut = |library: &Library| library.malformed("its relocations lie outside of its segments".into());
        let (mut pointers, mut imports) = (Vec::new(), Vec::new());
        let dynamic = self.library.dynamic();
        for &(at, size) in &dynamic.rela {
            let table = usize::try_from(size).ok().and_then(|size| self.bytes(at)?.get(..size));
            for entry in table.ok_or_else(|| cut(self.library))?.as_chunks::<24>().0 {
                let word = |i| u64_at(entry, i).unwrap_or_default();
                let (place, info, addend) = (word(0), word(8), word(16));
                let (kind, number) = (elf::RelocationType(info as u32), (info >> 32) as u32);
                if self.is_relative(kind) {
                    pointers.push((place, addend));
                } else if self.is_symbolic(kind) {
                    match self.symbol(number) {
                        Some(s) if s.is_defined() => pointers.push((place, s.value.wrapping_add(addend))),
                        _ => imports.push((place, number)),
                    }
                }
            }
        }
        if let Some((at, size)) = dynamic.relr {
            let table = usize::try_from(size).ok().and_then(|size| self.bytes(at)?.get(..size));
            for place in relr_places(table.ok_or_else(|| cut(self.library))?) {
                if let Some(value) = self.bytes(place).and_then(|b| u64_at(b, 0)) {
                    pointers.push((place, value));
                }
            }
        }
        pointers.sort_unstable();
        imports.sort_unstable();
        (self.pointers, self.imports) = (pointers, imports);
        Ok(())
    }

    fn is_relative(&self, kind: elf::RelocationType) -> bool {
        match self.arch() {
            Arch::X86_64 => kind == elf::R_X86_64_RELATIVE,
            Arch::Aarch64 => kind == elf::R_AARCH64_RELATIVE,
        }
    }

    fn is_symbolic(&self, kind: elf::RelocationType) -> bool {
        match self.arch() {
            Arch::X86_64 => {
                matches!(kind, elf::R_X86_64_64 | elf::R_X86_64_GLOB_DAT | elf::R_X86_64_JUMP_SLOT)
            }
            Arch::Aarch64 => {
                matches!(kind, elf::R_AARCH64_ABS64 | elf::R_AARCH64_GLOB_DAT | elf::R_AARCH64_JUMP_SLOT)
            }
        }
    }

    fn symbol_name(&self, number: u32) -> Option<&[u8]> {
        let strings = self.library.dynamic().strings?;
        let name = self.bytes(strings.checked_add(self.symbol(number)?.name.into())?)?;
        let length = name.iter().take(MAX_SYMBOL_NAME).position(|&b| b == 0)?;
        name.get(..length)
    }

    fn symbol(&self, number: u32) -> Option<Symbol> {
        let table = self.library.dynamic().symbols?;
        Symbol::parse(self.bytes(table.checked_add(u64::from(number) * Symbol::SIZE)?)?)
    }

    fn read_functions(&mut self) -> Result<(), ElfError> {
        let Some((at, size)) = self.library.eh_frame_hdr() else { return Ok(()) };
        let bad = |_| self.library.malformed("its table of functions (.eh_frame_hdr) is not valid".into());
        let header = usize::try_from(size).ok().and_then(|size| self.bytes(at)?.get(..size));
        let header = EhFrameHdr::new(header.ok_or(()).map_err(bad)?, LittleEndian);
        let bases = BaseAddresses::default().set_eh_frame_hdr(at);
        let parsed = header.parse(&bases, 8).map_err(|_| bad(()))?;
        let gimli::Pointer::Direct(eh_frame) = parsed.eh_frame_ptr() else { return Err(bad(())) };
        let Some(table) = parsed.table() else { return Ok(()) };
        let mut functions = Vec::new();
        let mut entries = table.iter(&bases);
        while let Some((start, fde)) = entries.next().map_err(|_| bad(()))? {
            if let (gimli::Pointer::Direct(start), gimli::Pointer::Direct(fde)) = (start, fde) {
                functions.push((start, fde));
            }
        }
        functions.sort_unstable();
        (self.functions, self.eh_frame) = (functions, eh_frame);
        Ok(())
    }
}

/// Instructions of an aarch64 segment with their addresses.
fn words(m: &Mapped) -> impl Iterator<Item = (u64, u32)> {
    let skew = (m.address.wrapping_neg() % 4) as usize;
    let aligned = m.data.get(skew..).unwrap_or_default();
    let first = m.address + skew as u64;
    aligned
        .as_chunks::<4>()
        .0
        .iter()
        .enumerate()
        .map(move |(i, &b)| (first + 4 * i as u64, u32::from_le_bytes(b)))
}

/// Decodes packed relative relocations: an even word is the address of a place; an odd one is a bitmap of the
/// 63 places that follow.
fn relr_places(table: &[u8]) -> impl Iterator<Item = u64> {
    let mut next = 0u64;
    table.as_chunks::<8>().0.iter().flat_map(move |&entry| {
        let entry = u64::from_le_bytes(entry);
        let (from, bitmap) = if entry & 1 == 0 { (entry, 1) } else { (next, entry >> 1) };
        next = from.wrapping_add(if entry & 1 == 0 { 8 } else { 63 * 8 });
        (0..63u64).filter(move |bit| bitmap >> bit & 1 != 0).map(move |bit| from.wrapping_add(8 * bit))
    })
}
