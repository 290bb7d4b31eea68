//! A file with code: its unwind tables, and what its functions are called.

use std::{fs::File, os::fd::AsRawFd, path::Path, sync::Arc};

use blazesym::symbolize::{
    CodeInfo, Input, Symbolizer,
    source::{Elf, Source},
};
use memmap2::Mmap;
use rustc_hash::FxHashMap;

use super::{
    guard,
    unwind::{Rule, Tables},
};
use crate::{model::Name, probes::elf::Library, text::sanitize};

/// Addresses of which rules and names are kept, for each file.
const MOST: usize = 1 << 17;
/// Characters of a function's name at most; templates can fill pages.
const NAME_MOST: usize = 512;

/// A function at an address, before it is known where the file is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// As people write it.
    pub function: Name,
    /// The source file and line, where the file has debug information.
    pub source: Option<(Name, Option<u32>)>,
    /// As the file writes it, and the distance from there; of the function that the others were inlined into.
    pub symbol: Name,
    pub offset: u64,
}

#[derive(Debug)]
pub struct Module {
    /// As the process names it.
    pub path: Name,
    file: File,
    content: Content,
    rules: FxHashMap<u64, Option<Arc<Rule>>>,
    names: FxHashMap<u64, Arc<[Named]>>,
}

/// What is in the file. Most files are mapped and never looked at.
#[derive(Debug)]
enum Content {
    Unread,
    Read(Box<Read>),
    Unreadable,
}

#[derive(Debug)]
struct Read {
    library: Library,
    bytes: Mmap,
    tables: Option<Tables>,
}

impl Module {
    pub fn new(file: File, path: &Path) -> Self {
        Self {
            path: sanitize(path.as_os_str().as_encoded_bytes()).into(),
            file,
            content: Content::Unread,
            rules: FxHashMap::default(),
            names: FxHashMap::default(),
        }
    }

    fn content(&mut self) -> Option<&Read> {
        if let Content::Unread = self.content {
            self.content = match read(&self.file, &self.path) {
                Some(read) => Content::Read(Box::new(read)),
                None => Content::Unreadable,
            };
        }
        match &self.content {
            Content::Read(read) => Some(read),
            _ => None,
        }
    }

    /// What is added to addresses in the file where its code is mapped at `start` from `offset` of the file on.
    pub fn bias(&mut self, start: u64, offset: u64) -> Option<u64> {
        self.content()?.library.bias(start, offset)
    }

    pub fn rule(&mut self, address: u64) -> Option<Arc<Rule>> {
        if let Some(rule) = self.rules.get(&address) {
            return rule.clone();
        }
        let read = self.content()?;
        let rule = read.tables.and_then(|tables| tables.rule(&read.bytes, address)).map(Arc::new);
        if self.rules.len() < MOST {
            self.rules.insert(address, rule.clone());
        }
        rule
    }

    /// The tables that its rules are from, and the file that they are in.
    pub fn tables(&self) -> Option<(&Tables, &[u8])> {
        match &self.content {
            Content::Read(read) => Some((read.tables.as_ref()?, &read.bytes)),
            _ => None,
        }
    }

    /// The functions at an address, innermost first: one, and those that were inlined there.
    pub fn names(&mut self, address: u64, symbolizer: &Symbolizer) -> Arc<[Named]> {
        if let Some(names) = self.names.get(&address) {
            return names.clone();
        }
        let begin = self.rule(address).map(|rule| rule.function);
        let names: Arc<[Named]> = self
            .look_up(address, begin, symbolizer)
            .unwrap_or_else(|| vec![nameless(address, begin.unwrap_or(address))])
            .into();
        if self.names.len() < MOST {
            self.names.insert(address, names.clone());
        }
        names
    }

    fn look_up(&self, address: u64, begin: Option<u64>, symbolizer: &Symbolizer) -> Option<Vec<Named>> {
        // blazesym looks from an address to the next one, also where there is none.
        address.checked_add(1)?;
        // The descriptor stays open, so this name stays the file's.
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let find = |debug_syms| {
            let source = Source::Elf(Elf { debug_syms, ..Elf::new(&path) });
            let found = symbolizer.symbolize_single(&source, Input::VirtOffset(address)).ok()?.into_sym()?;
            // A symbol without a size is only the nearest one before: it may be another function's.
            let is_near =
                found.size.is_none_or(|size| size == 0) && begin.is_some_and(|begin| found.addr < begin);
            (!is_near && found.addr <= address && !found.name.is_empty()).then_some(found)
        };
        let debug = find(true);
        // Debug information knows lines and what was inlined; the symbol table has the names with all that is around
        // them, and in most files it is all there is.
        let symbol = find(false).or_else(|| debug.clone())?;
        let written: Name = text(&symbol.name).into();
        let offset = address - symbol.addr;
        let named = |name: &str, code: Option<&CodeInfo<'_>>| Named {
            function: text(&demangled(name)).into(),
            source: code.map(|code| {
                (sanitize(code.to_path().as_os_str().as_encoded_bytes()).into(), code.line.filter(|l| *l > 0))
            }),
            symbol: written.clone(),
            offset,
        };
        let (inlined, code) =
            debug.as_ref().map_or((&[][..], None), |debug| (&*debug.inlined, debug.code_info.as_deref()));
        let inlined = inlined.iter().rev().map(|inner| named(&inner.name, inner.code_info.as_ref()));
        Some(inlined.chain([named(&symbol.name, code)]).collect())
    }
}

fn read(file: &File, path: &str) -> Option<Read> {
    guard::install();
    let library = Library::open(file.try_clone().ok()?, path).ok()?;
    // SAFETY: the bytes may change under us when someone writes into the file, which the process has mapped as well:
    // every read of them is checked, and none is believed twice. What is gone is zeros.
    let bytes = unsafe { Mmap::map(file) }.ok()?;
    let tables = Tables::of(&library, &bytes);
    Some(Read { library, bytes, tables })
}

/// A function without a symbol, by where it begins in the file: the same for every call of it.
fn nameless(address: u64, begin: u64) -> Named {
    let name: Name = format!("fn_{begin:x}").into();
    Named { function: name.clone(), source: None, symbol: name, offset: address - begin }
}

/// As people write a function's name: of Rust and C++; others as they are.
pub fn demangled(name: &str) -> String {
    if let Ok(name) = rustc_demangle::try_demangle(name) {
        return format!("{name:#}");
    }
    let options = cpp_demangle::DemangleOptions::default().no_return_type();
    let demangled = name.starts_with("_Z").then(|| cpp_demangle::Symbol::new(name).ok()).flatten();
    demangled
        .and_then(|symbol| symbol.demangle_with_options(&options).ok())
        .unwrap_or_else(|| name.to_owned())
}

fn text(name: &str) -> String {
    let name = sanitize(name.as_bytes());
    match name.char_indices().nth(NAME_MOST) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write, path::PathBuf};

    use super::*;
    use crate::stacks::code::fuzzing::*;

    /// Files whose tables and symbols lie, or that are cut short while they are looked at: no panic, no end of the process.
    #[test]
    fn fuzz_modules() {
        let fixtures = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/resolvers"));
        let files =
            ["pool-x86_64.so", "pool-aarch64.so"].map(|name| fs::read(fixtures.join(name)).expect("there"));
        rounds("modules", 30, |random| {
            let mut bytes = random.pick(&files).clone();
            // One in five is whole, until it is cut short.
            if !random.one_in(5) {
                damage(&mut bytes, &[b"\x7fELF", &[0xff; 8], b"_ZN", b"zR\0", b"_R"], random);
            }
            let mut file = tempfile::tempfile().expect("a file");
            file.write_all(&bytes).expect("room");
            let shrinking = file.try_clone().expect("a descriptor");
            let mut module = Module::new(file, Path::new("damaged.so"));
            let symbolizer = Symbolizer::builder().enable_demangling(false).build();
            for round in 0..60 {
                let address = match round % 3 {
                    0 => random.below(bytes.len()) as u64,
                    _ => random.next() >> random.below(64),
                };
                let _ = module.bias(address, random.below(1 << 20) as u64);
                let _ = module.rule(address);
                let names = module.names(address, &symbolizer);
                assert!(names.iter().all(|name| name.function.chars().count() <= NAME_MOST + 1));
                if round == 30 {
                    shrinking.set_len(random.below(bytes.len()) as u64).expect("it is ours");
                }
            }
        });
    }

    /// Found by `cargo xtask fuzz modules`.
    #[test]
    fn a_table_that_points_before_its_frames_has_no_rules() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/resolvers/pool-x86_64.so");
        let mut bytes = fs::read(path).expect("there");
        let library = Library::open(File::open(path).expect("there"), path).expect("a library");
        let (address, size) = library.eh_frame_hdr().expect("a table");
        let segment =
            library.segments().iter().find(|s| s.address <= address && address < s.address + s.file_size);
        let at = (address - segment.expect("loaded").address + segment.expect("loaded").offset) as usize;
        let rules = |bytes: &[u8]| {
            let mut file = tempfile::tempfile().expect("a file");
            file.write_all(bytes).expect("room");
            let mut module = Module::new(file, Path::new("damaged.so"));
            (0..2 * bytes.len() as u64).filter(|address| module.rule(*address).is_some()).count()
        };
        assert_ne!(rules(&bytes), 0);
        // Four bytes of its own, two numbers, and then pairs: where a function begins, and its entry, both from here.
        for pair in bytes[at + 12..at + size as usize].chunks_exact_mut(8) {
            pair[4..].copy_from_slice(&(8 - address as i32).to_le_bytes());
        }
        assert_eq!(rules(&bytes), 0);
    }

    /// Found by `cargo xtask fuzz modules`.
    #[test]
    fn the_last_address_has_no_name() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/resolvers/pool-x86_64.so");
        let mut module = Module::new(File::open(path).expect("there"), Path::new("whole.so"));
        let names = module.names(u64::MAX, &Symbolizer::builder().enable_demangling(false).build());
        assert_eq!(&*names[0].function, "fn_ffffffffffffffff");
    }

    #[test]
    fn names_are_as_people_write_them() {
        assert_eq!(
            demangled("_ZN2at6native3addERKNS_6TensorES3_"),
            "at::native::add(at::Tensor const&, at::Tensor const&)"
        );
        assert_eq!(
            demangled("_ZN4core3ops8function6FnOnce9call_once17h0123456789abcdefE"),
            "core::ops::function::FnOnce::call_once"
        );
        assert_eq!(demangled("aclrtMalloc"), "aclrtMalloc");
        assert_eq!(demangled("_Znonsense"), "_Znonsense");
    }
}
