//! Shared objects and executables as files: identity, exported functions, file offsets.
//!
//! Reads are bounded and positioned, never a mapping: the file may belong to a container and may be cut short,
//! rewritten or malicious while it is read. Every offset and length in it is a claim to check; a file that lies
//! gives an [`ElfError`].

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use object::elf;
use serde::{Deserialize, Serialize};

/// Program headers of a real library are about ten.
const MAX_PROGRAM_HEADERS: u16 = 1024;
/// A real dynamic section is below 2 KiB.
const MAX_DYNAMIC: u64 = 64 << 10;
/// A real note segment is below 1 KiB.
const MAX_NOTES: u64 = 64 << 10;
/// Longest symbol or library name looked at. Mangled C++ names of several KiB exist.
const MAX_NAME: u64 = 64 << 10;
/// Symbols of one hash chain looked at. Linkers size their tables for chains of a few.
const MAX_CHAIN: u32 = 16 << 10;
/// Bytes of the symbol table that go into the key of a file without build-id.
const MAX_KEYED_SYMBOLS: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum ElfError {
    #[error("{path}: can not be read: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path}: not an ELF file; only shared objects and executables can be probed")]
    NotElf { path: PathBuf },
    #[error("{path}: {what} is not supported; libraries for 64-bit x86_64 and aarch64 are")]
    Unsupported { path: PathBuf, what: String },
    #[error("{path}: {what}; the file is damaged or still being written, reinstall it or try again")]
    Malformed { path: PathBuf, what: String },
    #[error("{path}: {what} is larger than any real library's; the file is not analysed")]
    TooLarge { path: PathBuf, what: String },
}

/// Why a site was not found in a library: one sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{0}")]
pub struct Missing(String);

impl Missing {
    pub(super) fn new(why: impl Into<String>) -> Missing {
        Missing(why.into())
    }

    pub(super) fn because<T>(why: impl Into<String>) -> Result<T, Missing> {
        Err(Missing(why.into()))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arch {
    #[serde(rename = "x86_64")]
    X86_64,
    Aarch64,
}

/// A PT_LOAD entry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    pub address: u64,
    pub offset: u64,
    /// Bytes. What memory has beyond them is zero.
    pub file_size: u64,
    pub executable: bool,
}

/// Where the dynamic section says things are. Addresses, unless a field says otherwise.
#[derive(Debug, Default)]
pub(super) struct Dynamic {
    raw: Vec<u8>,
    pub strings: Option<u64>,
    /// Bytes.
    strings_size: u64,
    pub symbols: Option<u64>,
    gnu_hash: Option<u64>,
    sysv_hash: Option<u64>,
    /// Offset into the strings.
    soname: Option<u64>,
    /// Offsets into the strings.
    needed: Vec<u64>,
    /// (address, bytes) of Elf64_Rela tables: DT_RELA, DT_JMPREL.
    pub rela: Vec<(u64, u64)>,
    /// (address, bytes) of the packed relative relocations.
    pub relr: Option<(u64, u64)>,
}

/// Symbol 0 of `DT_GNU_HASH` is `first_symbol`; those below are undefined.
#[derive(Debug, Clone, Copy)]
struct GnuHash {
    buckets: u32,
    first_symbol: u32,
    bloom_words: u32,
    bloom_shift: u32,
    bloom_at: u64,
    buckets_at: u64,
    chains_at: u64,
}

/// An entry of the dynamic symbol table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Symbol {
    /// Offset into the strings.
    pub name: u32,
    info: u8,
    section: u16,
    pub value: u64,
}

impl Symbol {
    pub const SIZE: u64 = 24;

    pub fn parse(bytes: &[u8]) -> Option<Symbol> {
        Some(Symbol {
            name: u32_at(bytes, 0)?,
            info: *bytes.get(4)?,
            section: u16_at(bytes, 6)?,
            value: u64_at(bytes, 8)?,
        })
    }

    pub fn is_defined(&self) -> bool {
        self.section != elf::SHN_UNDEF.0
    }

    /// Functions; hand-written assembly often lacks a type. Not `STT_GNU_IFUNC`: its address is that of a
    /// chooser which runs once, not of the function.
    fn is_function(&self) -> bool {
        matches!(elf::SymbolType(self.info & 0xf), elf::STT_FUNC | elf::STT_NOTYPE)
    }

    fn is_variable(&self) -> bool {
        elf::SymbolType(self.info & 0xf) == elf::STT_OBJECT
    }
}

/// How the kernel executes the instruction a probe replaces, which sets the probe's price.
///
/// Sources: `arch/x86/kernel/uprobes.c` (`branch_setup_xol_ops`, `push_setup_xol_ops`) and
/// `arch/arm64/kernel/probes/decode-insn.c` of Linux 4.19 to 6.18.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FirstInstruction {
    /// Emulated in the kernel: one trap a hit (about 1 us).
    Emulated,
    /// Executed out of line under single-step: a second trap (x86 in a VM: 6 to 11 us a hit).
    SingleStepped,
    /// x86 `endbr64`, 4 bytes: single-stepped. The arguments are untouched behind it.
    Endbr64,
    /// aarch64 `bti`, `paciasp` and other hints, 4 bytes: kernels before 5.8 refuse to probe them. The
    /// arguments are untouched behind it, but a return probe behind `paciasp` breaks the authentication.
    Hint,
}

/// An open library or executable: ELF64, little-endian, x86_64 or aarch64, whatever the host is.
#[derive(Debug)]
pub struct Library {
    path: PathBuf,
    file: File,
    len: u64,
    arch: Arch,
    headers: Vec<u8>,
    segments: Vec<Segment>,
    dynamic: Dynamic,
    gnu_hash: Option<GnuHash>,
    build_id: Option<String>,
    /// (address, bytes)
    eh_frame_hdr: Option<(u64, u64)>,
}

impl Library {
    /// `path` is for messages only: the file is read through `file`.
    pub fn open(file: File, path: impl Into<PathBuf>) -> Result<Library, ElfError> {
        let path = path.into();
        let len = match file.metadata() {
            Ok(metadata) if metadata.is_file() => metadata.len(),
            Ok(_) => return Err(ElfError::NotElf { path }),
            Err(source) => return Err(ElfError::Io { path, source }),
        };
        let mut library = Library {
            path,
            file,
            len,
            arch: Arch::X86_64,
            headers: Vec::new(),
            segments: Vec::new(),
            dynamic: Dynamic::default(),
            gnu_hash: None,
            build_id: None,
            eh_frame_hdr: None,
        };
        library.read_headers()?;
        library.gnu_hash = library.read_gnu_hash()?;
        Ok(library)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// The GNU build-id in hexadecimal digits. CANN's runtime and driver libraries have none.
    pub fn build_id(&self) -> Option<&str> {
        self.build_id.as_deref()
    }

    /// What tells this build from every other: the build-id, or size and hash of headers and symbol table. A
    /// claim of the file, not a proof of its content.
    pub fn key(&self) -> Result<String, ElfError> {
        if let Some(id) = &self.build_id {
            return Ok(id.clone());
        }
        let mut hash = fnv1a(FNV_BASIS, &self.headers);
        hash = fnv1a(hash, &self.dynamic.raw);
        if let Some(symbols) = self.dynamic.symbols {
            let size = self.readable_at(symbols).min(MAX_KEYED_SYMBOLS);
            hash = fnv1a(hash, &self.read(symbols, size, "the symbol table")?);
        }
        Ok(format!("{:x}-{hash:016x}", self.len))
    }

    /// DT_SONAME.
    pub fn soname(&self) -> Result<Option<String>, ElfError> {
        self.dynamic.soname.map(|at| self.string(at)).transpose()
    }

    /// DT_NEEDED, in the file's order.
    pub fn needed(&self) -> Result<Vec<String>, ElfError> {
        self.dynamic.needed.iter().map(|&at| self.string(at)).collect()
    }

    /// The file offset of an exported function. Of several versions of one symbol, the first in its hash chain.
    pub fn symbol(&self, name: &str) -> Result<Option<u64>, ElfError> {
        Ok(self.find(name, Symbol::is_function)?.and_then(|symbol| self.code_offset(symbol.value)))
    }

    /// The address of an exported function, before the library is loaded anywhere.
    pub fn function(&self, name: &str) -> Result<Option<u64>, ElfError> {
        Ok(self.find(name, Symbol::is_function)?.map(|symbol| symbol.value))
    }

    /// The address of an exported variable, before the library is loaded anywhere.
    pub fn variable(&self, name: &str) -> Result<Option<u64>, ElfError> {
        Ok(self.find(name, Symbol::is_variable)?.map(|symbol| symbol.value))
    }

    /// What is added to the library's addresses where its code is mapped at `start` from `offset` of the file on.
    pub fn bias(&self, start: u64, offset: u64) -> Option<u64> {
        let code = |s: &&Segment| s.executable && offset < s.offset.saturating_add(s.file_size);
        let segment = self.segments.iter().find(code)?;
        Some(start.wrapping_sub(segment.address.wrapping_sub(segment.offset).wrapping_add(offset)))
    }

    fn find(&self, name: &str, wanted: fn(&Symbol) -> bool) -> Result<Option<Symbol>, ElfError> {
        match (self.gnu_hash, self.dynamic.sysv_hash) {
            (Some(hash), _) => self.find_gnu(&hash, name, wanted),
            (None, Some(hash)) => self.find_sysv(hash, name, wanted),
            (None, None) => Ok(None),
        }
    }

    /// How the kernel would execute the instruction at `offset` of the file.
    pub fn first_instruction(&self, offset: u64) -> Result<FirstInstruction, ElfError> {
        let in_code = |s: &Segment| s.executable && offset >= s.offset && offset - s.offset < s.file_size;
        let Some(segment) = self.segments.iter().find(|s| in_code(s)) else {
            return Err(self.malformed(format!("offset {offset:#x} is not in code")));
        };
        let left = segment.file_size - (offset - segment.offset);
        let code = self.read_file(offset, left.min(4), "code")?;
        classify(self.arch, &code).ok_or_else(|| self.malformed(format!("code ends at offset {offset:#x}")))
    }

    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    pub(super) fn dynamic(&self) -> &Dynamic {
        &self.dynamic
    }

    /// (address, bytes)
    pub(crate) fn eh_frame_hdr(&self) -> Option<(u64, u64)> {
        self.eh_frame_hdr
    }

    fn symbol_entry(&self, number: u32) -> Result<Symbol, ElfError> {
        let Some(table) = self.dynamic.symbols else {
            return Err(self.malformed("there is no symbol table".into()));
        };
        let at = table.saturating_add(u64::from(number) * Symbol::SIZE);
        let entry = self.read(at, Symbol::SIZE, "a symbol")?;
        Symbol::parse(&entry).ok_or_else(|| self.malformed("a symbol is cut short".into()))
    }

    /// File offset of an address in code.
    pub(super) fn code_offset(&self, address: u64) -> Option<u64> {
        let segment = self.segment_of(address)?;
        segment.executable.then(|| address - segment.address + segment.offset)
    }

    pub(super) fn malformed(&self, what: String) -> ElfError {
        ElfError::Malformed { path: self.path.clone(), what }
    }

    pub(super) fn too_large(&self, what: &str) -> ElfError {
        ElfError::TooLarge { path: self.path.clone(), what: what.into() }
    }

    /// `size` bytes of the file from `offset`.
    pub(super) fn read_file(&self, offset: u64, size: u64, what: &str) -> Result<Vec<u8>, ElfError> {
        let end = offset.checked_add(size).filter(|&end| end <= self.len);
        if end.is_none() {
            return Err(self.malformed(format!("{what} reaches past the end of the file")));
        }
        let mut bytes = vec![0; size as usize];
        match self.file.read_exact_at(&mut bytes, offset) {
            Ok(()) => Ok(bytes),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                Err(self.malformed(format!("{what} reaches past the end of the file")))
            }
            Err(source) => Err(ElfError::Io { path: self.path.clone(), source }),
        }
    }

    fn read_headers(&mut self) -> Result<(), ElfError> {
        let size = self.len.min(64);
        let header = self.read_file(0, size, "the ELF header")?;
        if !header.starts_with(&elf::ELFMAG) {
            return Err(ElfError::NotElf { path: self.path.clone() });
        }
        let unsupported = |what: String| ElfError::Unsupported { path: self.path.clone(), what };
        let byte = |at: usize| header.get(at).copied().unwrap_or_default();
        match (elf::FileClass(byte(4)), elf::DataEncoding(byte(5))) {
            (elf::ELFCLASS32, _) => return Err(unsupported("a 32-bit library".into())),
            (elf::ELFCLASS64, elf::ELFDATA2LSB) => {}
            (elf::ELFCLASS64, elf::ELFDATA2MSB) => return Err(unsupported("a big-endian library".into())),
            _ => return Err(self.malformed("the ELF header has an unknown class".into())),
        }
        let fields = || {
            let kind = elf::FileType(u16_at(&header, 16)?);
            let machine = elf::Machine(u16_at(&header, 18)?);
            Some((kind, machine, u64_at(&header, 32)?, u16_at(&header, 54)?, u16_at(&header, 56)?))
        };
        let Some((kind, machine, table, entry_size, entries)) = fields() else {
            return Err(self.malformed("the ELF header is cut short".into()));
        };
        self.arch = match machine {
            elf::EM_X86_64 => Arch::X86_64,
            elf::EM_AARCH64 => Arch::Aarch64,
            other => return Err(unsupported(format!("machine type {other}"))),
        };
        if kind != elf::ET_DYN && kind != elf::ET_EXEC {
            return Err(unsupported(format!("an ELF file of type {kind}")));
        }
        if entry_size != 56 || entries > MAX_PROGRAM_HEADERS {
            return Err(self.malformed("the program headers have no valid size".into()));
        }
        let table = self.read_file(table, 56 * u64::from(entries), "the program header table")?;

        let mut dynamic = None;
        let mut notes = Vec::new();
        for entry in table.chunks_exact(56) {
            let word = |at| u64_at(entry, at).unwrap_or_default();
            let kind = elf::ProgramType(u32_at(entry, 0).unwrap_or_default());
            let flags = elf::ProgramFlags(u32_at(entry, 4).unwrap_or_default());
            let (offset, address) = (word(8), word(16));
            let (file_size, memory_size, align) = (word(32), word(40), word(48));
            match kind {
                elf::PT_LOAD => {
                    if address.checked_add(memory_size.max(file_size)).is_none() {
                        return Err(
                            self.malformed("a segment reaches past the end of the address space".into())
                        );
                    }
                    let executable = flags.0 & elf::PF_X.0 != 0;
                    self.segments.push(Segment { address, offset, file_size, executable });
                }
                elf::PT_DYNAMIC => dynamic = Some((offset, file_size)),
                elf::PT_NOTE => notes.push((offset, file_size, align)),
                elf::PT_GNU_EH_FRAME => self.eh_frame_hdr = Some((address, file_size)),
                _ => {}
            }
        }
        self.headers = header;
        self.headers.extend_from_slice(&table);
        if let Some((offset, size)) = dynamic {
            self.read_dynamic(offset, size)?;
        }
        for (offset, size, align) in notes {
            if size <= MAX_NOTES && self.build_id.is_none() {
                let note = self.read_file(offset, size, "a note segment")?;
                self.build_id = build_id(&note, if align == 8 { 8 } else { 4 });
            }
        }
        Ok(())
    }

    fn read_dynamic(&mut self, offset: u64, size: u64) -> Result<(), ElfError> {
        if size > MAX_DYNAMIC {
            return Err(self.malformed(format!("its dynamic section of {size} bytes is no real one")));
        }
        let raw = self.read_file(offset, size, "the dynamic section")?;
        let mut dynamic = Dynamic::default();
        let (mut rela, mut rela_size, mut plt, mut plt_size, mut relr, mut relr_size) =
            (None, 0, None, 0, None, 0);
        for entry in raw.chunks_exact(16) {
            let (Some(tag), Some(value)) = (u64_at(entry, 0), u64_at(entry, 8)) else { break };
            match elf::DynamicTag(tag as i64) {
                elf::DT_NULL => break,
                elf::DT_STRTAB => dynamic.strings = Some(value),
                elf::DT_STRSZ => dynamic.strings_size = value,
                elf::DT_SYMTAB => dynamic.symbols = Some(value),
                elf::DT_GNU_HASH => dynamic.gnu_hash = Some(value),
                elf::DT_HASH => dynamic.sysv_hash = Some(value),
                elf::DT_SONAME => dynamic.soname = Some(value),
                elf::DT_NEEDED => dynamic.needed.push(value),
                elf::DT_RELA => rela = Some(value),
                elf::DT_RELASZ => rela_size = value,
                elf::DT_JMPREL => plt = Some(value),
                elf::DT_PLTRELSZ => plt_size = value,
                elf::DT_RELR => relr = Some(value),
                elf::DT_RELRSZ => relr_size = value,
                _ => {}
            }
        }
        dynamic.rela = [(rela, rela_size), (plt, plt_size)]
            .into_iter()
            .filter_map(|(at, size)| at.map(|at| (at, size)))
            .collect();
        dynamic.relr = relr.map(|at| (at, relr_size));
        dynamic.raw = raw;
        self.dynamic = dynamic;
        Ok(())
    }

    fn read_gnu_hash(&self) -> Result<Option<GnuHash>, ElfError> {
        let Some(at) = self.dynamic.gnu_hash else { return Ok(None) };
        let header = self.read(at, 16, "the symbol hash table")?;
        let word = |i| u32_at(&header, i).unwrap_or_default();
        let (buckets, first_symbol, bloom_words, bloom_shift) = (word(0), word(4), word(8), word(12));
        if buckets == 0 || bloom_words == 0 {
            return Err(self.malformed("the symbol hash table has no valid size".into()));
        }
        let bloom_at = at.saturating_add(16);
        let buckets_at = bloom_at.saturating_add(8 * u64::from(bloom_words));
        let chains_at = buckets_at.saturating_add(4 * u64::from(buckets));
        Ok(Some(GnuHash { buckets, first_symbol, bloom_words, bloom_shift, bloom_at, buckets_at, chains_at }))
    }

    fn find_gnu(
        &self,
        table: &GnuHash,
        name: &str,
        wanted: fn(&Symbol) -> bool,
    ) -> Result<Option<Symbol>, ElfError> {
        const WHAT: &str = "the symbol hash table";
        let hash = name.bytes().fold(5381u32, |h, b| h.wrapping_mul(33).wrapping_add(b.into()));
        let second = hash.checked_shr(table.bloom_shift).unwrap_or_default();
        let mask = 1u64 << (hash % 64) | 1u64 << (second % 64);
        let word = u64::from(hash / 64 % table.bloom_words);
        if self.u64(table.bloom_at.saturating_add(8 * word), WHAT)? & mask != mask {
            return Ok(None);
        }
        let bucket = u64::from(hash % table.buckets);
        let mut number = self.u32(table.buckets_at.saturating_add(4 * bucket), WHAT)?;
        if number < table.first_symbol {
            return Ok(None);
        }
        for _ in 0..MAX_CHAIN {
            let link = u64::from(number - table.first_symbol);
            let chained = self.u32(table.chains_at.saturating_add(4 * link), WHAT)?;
            if chained | 1 == hash | 1 {
                let symbol = self.symbol_entry(number)?;
                if symbol.is_defined() && wanted(&symbol) && self.is_named(&symbol, name)? {
                    return Ok(Some(symbol));
                }
            }
            number = match number.checked_add(1) {
                Some(next) if chained & 1 == 0 => next,
                _ => return Ok(None),
            };
        }
        Err(self.malformed(format!("{WHAT} has an endless chain")))
    }

    fn find_sysv(
        &self,
        at: u64,
        name: &str,
        wanted: fn(&Symbol) -> bool,
    ) -> Result<Option<Symbol>, ElfError> {
        const WHAT: &str = "the symbol hash table";
        let hash = name.bytes().fold(0u32, |h, b| {
            let h = (h << 4).wrapping_add(b.into());
            let high = h & 0xf000_0000;
            (h ^ (high >> 24)) & !high
        });
        let (buckets, chains) = (self.u32(at, WHAT)?, self.u32(at.saturating_add(4), WHAT)?);
        if buckets == 0 {
            return Ok(None);
        }
        let buckets_at = at.saturating_add(8);
        let chains_at = buckets_at.saturating_add(4 * u64::from(buckets));
        let mut number = self.u32(buckets_at.saturating_add(4 * u64::from(hash % buckets)), WHAT)?;
        for _ in 0..chains.min(MAX_CHAIN) {
            if number == 0 {
                return Ok(None);
            }
            let symbol = self.symbol_entry(number)?;
            if symbol.is_defined() && wanted(&symbol) && self.is_named(&symbol, name)? {
                return Ok(Some(symbol));
            }
            number = self.u32(chains_at.saturating_add(4 * u64::from(number)), WHAT)?;
        }
        match number {
            0 => Ok(None),
            _ => Err(self.malformed(format!("{WHAT} has an endless chain"))),
        }
    }

    fn is_named(&self, symbol: &Symbol, name: &str) -> Result<bool, ElfError> {
        let at = u64::from(symbol.name);
        let Some(strings) = self.dynamic.strings else { return Ok(false) };
        let size = name.len() as u64 + 1;
        if at.saturating_add(size) > self.dynamic.strings_size {
            return Ok(false);
        }
        let bytes = self.read(strings.saturating_add(at), size, "the string table")?;
        Ok(bytes.split_last() == Some((&0, name.as_bytes())))
    }

    /// The string at `at` of the string table.
    fn string(&self, at: u64) -> Result<String, ElfError> {
        let what = "the string table";
        let left = self.dynamic.strings_size.saturating_sub(at);
        let address = self.dynamic.strings.and_then(|s| s.checked_add(at)).filter(|_| left > 0);
        let Some(address) = address else {
            return Err(self.malformed(format!("a name lies outside of {what}")));
        };
        let bytes = self.read(address, left.min(256), what)?;
        let bytes = match bytes.iter().position(|&b| b == 0) {
            Some(_) => bytes,
            None => self.read(address, left.min(MAX_NAME), what)?,
        };
        match bytes.split(|&b| b == 0).next() {
            Some(name) if name.len() < bytes.len() => Ok(String::from_utf8_lossy(name).into_owned()),
            _ => Err(self.malformed(format!("a name of {what} has no end"))),
        }
    }

    fn u32(&self, address: u64, what: &str) -> Result<u32, ElfError> {
        let bytes = self.read(address, 4, what)?;
        u32_at(&bytes, 0).ok_or_else(|| self.malformed(format!("{what} is cut short")))
    }

    fn u64(&self, address: u64, what: &str) -> Result<u64, ElfError> {
        let bytes = self.read(address, 8, what)?;
        u64_at(&bytes, 0).ok_or_else(|| self.malformed(format!("{what} is cut short")))
    }

    /// `size` bytes from an address, all of one segment.
    fn read(&self, address: u64, size: u64, what: &str) -> Result<Vec<u8>, ElfError> {
        if size > self.readable_at(address) {
            return Err(self.malformed(format!("{what} lies outside of the file's segments")));
        }
        let offset = self.segment_of(address).map_or(0, |s| address - s.address + s.offset);
        self.read_file(offset, size, what)
    }

    /// Bytes from `address` to the end of its segment's part in the file.
    fn readable_at(&self, address: u64) -> u64 {
        self.segment_of(address).map_or(0, |s| s.file_size - (address - s.address))
    }

    fn segment_of(&self, address: u64) -> Option<&Segment> {
        self.segments
            .iter()
            .find(|s| address >= s.address && address - s.address < s.file_size)
            .filter(|s| s.offset.checked_add(s.file_size).is_some_and(|end| end <= self.len))
    }
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

const FNV_BASIS: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a: stable over versions of the tool, unlike the hashers of std.
fn fnv1a(seed: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(seed, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// The build-id among the notes of a segment.
fn build_id(notes: &[u8], align: usize) -> Option<String> {
    let mut rest = notes;
    loop {
        let (name_size, size, kind) =
            (u32_at(rest, 0)? as usize, u32_at(rest, 4)? as usize, u32_at(rest, 8)?);
        let name = rest.get(12..)?.get(..name_size)?;
        let description_at = 12usize.checked_add(name_size)?.checked_next_multiple_of(align)?;
        let description = rest.get(description_at..)?.get(..size)?;
        if kind == elf::NT_GNU_BUILD_ID.0 && name == b"GNU\0" && (4..=64).contains(&size) {
            return Some(description.iter().map(|b| format!("{b:02x}")).collect());
        }
        rest = rest.get(description_at.checked_add(size)?.checked_next_multiple_of(align)?..)?;
    }
}

/// `None` when there are not enough bytes to tell.
fn classify(arch: Arch, code: &[u8]) -> Option<FirstInstruction> {
    use FirstInstruction::*;
    match arch {
        Arch::X86_64 => Some(match *code {
            [] => return None,
            [0xf3, 0x0f, 0x1e, 0xfa, ..] => Endbr64,
            // push reg, nop, jmp, call, jcc
            [0x50..=0x57 | 0x70..=0x7f | 0x90 | 0xe8 | 0xe9 | 0xeb, ..] => Emulated,
            [0x41, 0x50..=0x57, ..] | [0x0f, 0x80..=0x8f, ..] => Emulated,
            _ => SingleStepped,
        }),
        Arch::Aarch64 => {
            let word = u32_at(code, 0)?;
            const NOP: u32 = 0xd503_201f;
            Some(match word {
                NOP => Emulated,
                _ if word & 0xffff_f01f == NOP => Hint,
                // adr, adrp
                _ if word & 0x1f00_0000 == 0x1000_0000 => Emulated,
                // b, bl, cbz, tbz, b.cond
                _ if word & 0x7c00_0000 == 0x1400_0000 => Emulated,
                _ if matches!(word & 0x7e00_0000, 0x3400_0000 | 0x3600_0000) => Emulated,
                _ if word & 0xff00_0010 == 0x5400_0000 => Emulated,
                // br, blr, ret
                _ if word & 0xff9f_fc1f == 0xd61f_0000 => Emulated,
                // ldr, ldrsw of a literal
                _ if matches!(word & 0xff00_0000, 0x1800_0000 | 0x5800_0000 | 0x9800_0000) => Emulated,
                _ => SingleStepped,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Arch, FirstInstruction::*, build_id, classify};

    #[test]
    fn first_instructions() {
        let x86 = |code: &[u8]| classify(Arch::X86_64, code);
        assert_eq!(x86(&[0x55]), Some(Emulated)); // push %rbp
        assert_eq!(x86(&[0x41, 0x57]), Some(Emulated)); // push %r15
        assert_eq!(x86(&[0x0f, 0x84, 0, 0]), Some(Emulated)); // je
        assert_eq!(x86(&[0xff, 0x25, 0, 0]), Some(SingleStepped)); // jmp *0(%rip)
        assert_eq!(x86(&[0x48, 0x83, 0xec, 0x18]), Some(SingleStepped)); // sub $24,%rsp
        assert_eq!(x86(&[0x66, 0x50]), Some(SingleStepped)); // push %ax
        assert_eq!(x86(&[0xf3, 0x0f, 0x1e, 0xfa]), Some(Endbr64));
        assert_eq!(x86(&[]), None);

        let arm = |word: u32| classify(Arch::Aarch64, &word.to_le_bytes());
        let emulated = [
            0xd503_201f, // nop
            0x9000_0010, // adrp x16, .
            0x1000_0000, // adr x0, .
            0x1400_0001, // b
            0x9400_0001, // bl
            0x5400_0041, // b.ne
            0xb400_0040, // cbz
            0x3607_0040, // tbz
            0xd61f_0200, // br x16
            0xd65f_03c0, // ret
            0x5800_0050, // ldr x16, literal
        ];
        for word in emulated {
            assert_eq!(arm(word), Some(Emulated), "{word:x}");
        }
        for word in [0xd503_245f, 0xd503_233f, 0xd503_237f] {
            assert_eq!(arm(word), Some(Hint), "{word:x}"); // bti c, paciasp, pacibsp
        }
        for word in [0xa9bf_7bfd, 0xd100_43ff, 0xf940_0000, 0xd53b_d040] {
            assert_eq!(arm(word), Some(SingleStepped), "{word:x}"); // stp, sub sp, ldr, mrs
        }
        assert_eq!(classify(Arch::Aarch64, &[0x1f, 0x20, 0x03]), None);
    }

    #[test]
    fn build_ids() {
        let note = |name: &[u8], kind: u32, description: &[u8]| {
            let mut note = Vec::new();
            note.extend((name.len() as u32).to_le_bytes());
            note.extend((description.len() as u32).to_le_bytes());
            note.extend(kind.to_le_bytes());
            note.extend(name);
            note.resize(note.len().next_multiple_of(4), 0);
            note.extend(description);
            note.resize(note.len().next_multiple_of(4), 0);
            note
        };
        let notes =
            [note(b"GNU\0", 1, &[0; 16]), note(b"Go\0\0", 4, b"abc"), note(b"GNU\0", 3, &[0xab, 0, 1, 2])];
        assert_eq!(build_id(&notes.concat(), 4).as_deref(), Some("ab000102"));
        assert_eq!(build_id(&notes[..2].concat(), 4), None);
        assert_eq!(build_id(&note(b"GNU\0", 3, &[7; 200]), 4), None);
        let mut endless = notes.concat();
        endless[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(build_id(&endless, 4), None);
    }
}
