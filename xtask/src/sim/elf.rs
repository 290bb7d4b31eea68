//! The dynamic interface of a shared library: what it exports, imports and needs.

use std::fs::File;
use std::path::Path;

use object::elf::{DT_NEEDED, SHT_DYNSYM, STB_WEAK, STT_FUNC, STT_GNU_IFUNC};
use object::read::elf::{Dyn as _, ElfFile64, Sym as _};
use object::{Endianness, Object as _, ObjectSection as _, ObjectSymbol as _, ReadCache, SymbolKind};

use super::Error;

#[derive(Debug, Default)]
pub struct Interface {
    /// DT_NEEDED, in order.
    pub needed: Vec<String>,
    pub imports: Vec<Import>,
    pub exports: Vec<Export>,
}

/// An undefined symbol that is not weak.
#[derive(Debug)]
pub struct Import {
    pub name: String,
    pub version: Option<Version>,
}

/// A symbol version, and the library that must define it.
#[derive(Debug)]
pub struct Version {
    pub name: String,
    pub library: String,
}

#[derive(Debug)]
pub struct Export {
    pub name: String,
    pub is_function: bool,
    pub size: u64,
}

fn with_elf<T>(
    path: &Path,
    read: impl FnOnce(&ReadCache<File>) -> Result<T, object::Error>,
) -> Result<T, Error> {
    let failed = |why: String| Error::Library { path: path.to_owned(), why };
    let file = File::open(path).map_err(|error| failed(error.to_string()))?;
    read(&ReadCache::new(file)).map_err(|error| failed(error.to_string()))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Reads the interface of the library at `path`.
pub fn read(path: &Path) -> Result<Interface, Error> {
    with_elf(path, parse)
}

fn parse(data: &ReadCache<File>) -> Result<Interface, object::Error> {
    let elf = ElfFile64::<Endianness, _>::parse(data)?;
    let (endian, sections) = (elf.endian(), elf.elf_section_table());
    let symbols = sections.symbols(endian, data, SHT_DYNSYM)?;
    let versions = sections.versions(endian, data)?;
    let mut interface = Interface::default();

    if let Some((entries, link)) = sections.dynamic(endian, data)? {
        let strings = sections.strings(endian, data, link)?;
        for entry in entries.iter().filter(|entry| entry.tag(endian) == DT_NEEDED) {
            interface.needed.push(text(entry.string(endian, strings)?));
        }
    }
    for (index, symbol) in symbols.enumerate() {
        let name = text(symbol.name(endian, symbols.strings())?);
        if name.is_empty() {
            continue;
        }
        if !symbol.is_undefined(endian) {
            let is_function = matches!(symbol.st_type(), STT_FUNC | STT_GNU_IFUNC);
            interface.exports.push(Export { name, is_function, size: symbol.st_size(endian) });
        } else if symbol.st_bind() != STB_WEAK {
            let version = match &versions {
                Some(table) => table.version(table.version_index(endian, index).index())?,
                None => None,
            };
            let version = version.and_then(|version| {
                Some(Version { name: text(version.name()), library: text(version.file()?) })
            });
            interface.imports.push(Import { name, version });
        }
    }
    Ok(interface)
}

/// The first bytes of the code of each function that the library at `path` exports.
pub fn entries(path: &Path) -> Result<Vec<(String, [u8; 8])>, Error> {
    with_elf(path, |data| {
        let elf = object::File::parse(data)?;
        let mut entries = Vec::new();
        let exported = elf.dynamic_symbols().filter(|symbol| symbol.is_definition());
        for symbol in exported.filter(|symbol| symbol.kind() == SymbolKind::Text) {
            let Some(section) = symbol.section_index() else { continue };
            let code = elf.section_by_index(section)?.data_range(symbol.address(), 8)?.unwrap_or_default();
            let mut first = [0; 8];
            first.iter_mut().zip(code).for_each(|(target, byte)| *target = *byte);
            entries.push((symbol.name()?.to_owned(), first));
        }
        Ok(entries)
    })
}
