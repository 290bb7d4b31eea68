//! Resolvers against small libraries of the same shape, against damaged ones, and against the released wheels.
//!
//! The wheels are fetched from PyPI with `pip` into `$MEMSCOPE_WHEELS` (by default `wheels` beside the test's
//! temporary files) and kept there. All of them: `cargo test --test integration resolvers -- --ignored`.

use std::{
    collections::BTreeMap,
    ffi::CStr,
    fs::{self, File},
    io::Write,
    os::unix::fs::{FileExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use crate::exercise;
use memscope::probes::{
    cache::Cache,
    elf::{Arch, ElfError, FirstInstruction, Library, Missing},
    mstx_python,
    torch_npu::{self, MarkArgs, MarkSite, QueueSites, ReportLayout, TorchNpu},
};

const FIXTURES: [&str; 4] =
    ["pool-x86_64.so", "pool-aarch64.so", "pool-old-x86_64.so", "pool-old-aarch64.so"];

fn fixture_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/resolvers").join(name)
}

fn open(path: &Path) -> Result<Library, ElfError> {
    Library::open(File::open(path).unwrap(), path)
}

fn fixture(name: &str) -> Library {
    open(&fixture_path(name)).unwrap()
}

/// A library of these bytes.
fn of_bytes(bytes: &[u8]) -> Result<Library, ElfError> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    Library::open(file, "changed.so")
}

/// Offset of the function that the fixture says is meant.
fn expected(library: &Library, name: &str) -> u64 {
    library.symbol(&format!("expect_{name}")).unwrap().unwrap_or_else(|| panic!("no expect_{name}"))
}

const WITH_DOMAIN: MarkArgs = MarkArgs { text: Some(1), stream: Some(2), domain: Some(3), id: None };
const NONE: MarkArgs = MarkArgs { text: None, stream: None, domain: None, id: None };

fn site(library: &Library, name: &str, args: MarkArgs) -> Result<MarkSite, Missing> {
    Ok(MarkSite { offset: expected(library, name), args })
}

#[test]
fn sites_of_the_current_form_are_found() {
    for name in ["pool-x86_64.so", "pool-aarch64.so"] {
        let library = fixture(name);
        let found = torch_npu::resolve(&library).unwrap();
        let report = found.pool_report.unwrap();
        assert_eq!(
            (report.offset, report.layout),
            (expected(&library, "report"), ReportLayout::WithComponent),
            "{name}"
        );
        assert_eq!(found.mark, site(&library, "mark", WITH_DOMAIN), "{name}");
        assert_eq!(found.range_start, site(&library, "range_start", WITH_DOMAIN), "{name}");
        let end = MarkArgs { id: Some(1), domain: Some(2), ..NONE };
        assert_eq!(found.range_end, site(&library, "range_end", end), "{name}");
        let pop = MarkArgs { domain: Some(1), ..NONE };
        assert_eq!(found.range_pop, site(&library, "range_pop", pop), "{name}");
        assert_eq!(found.range_push.unwrap_err().to_string(), "the library has no Python method for it");
    }
}

#[test]
fn sites_of_the_old_form_are_found() {
    for name in ["pool-old-x86_64.so", "pool-old-aarch64.so"] {
        let library = fixture(name);
        let found = torch_npu::resolve(&library).unwrap();
        let report = found.pool_report.unwrap();
        let layout = ReportLayout::WithoutComponent;
        assert_eq!((report.offset, report.layout), (expected(&library, "report"), layout), "{name}");
        assert_eq!(found.mark, site(&library, "mark", MarkArgs { text: Some(0), ..NONE }), "{name}");
        let start = MarkArgs { text: Some(1), stream: Some(2), ..NONE };
        assert_eq!(found.range_start, site(&library, "range_start", start), "{name}");
        assert_eq!(found.range_end, site(&library, "range_end", MarkArgs { id: Some(1), ..NONE }), "{name}");
        assert!(found.range_pop.is_err() && found.range_push.is_err(), "{name}");
    }
}

#[test]
fn methods_of_the_python_module_are_found() {
    for name in FIXTURES {
        let library = fixture(name);
        let found = mstx_python::resolve(&library).unwrap();
        assert_eq!(found.mark, Ok(expected(&library, "module_mark")), "{name}");
        assert_eq!(found.range_start, Ok(expected(&library, "module_start")), "{name}");
        assert_eq!(found.range_end, Ok(expected(&library, "module_end")), "{name}");
    }
}

#[test]
fn nothing_is_found_in_a_library_of_another_kind() {
    let library = open(&std::env::current_exe().unwrap()).unwrap();
    let found = torch_npu::resolve(&library).unwrap();
    let why = found.pool_report.unwrap_err().to_string();
    assert_eq!(why, "the library does not use the profiler's MemoryData record");
    for missing in [found.mark, found.range_start, found.range_end, found.range_push, found.range_pop] {
        assert_eq!(missing.unwrap_err().to_string(), "the library has no Python method for it");
    }
    assert_eq!(
        mstx_python::resolve(&library).unwrap().mark.unwrap_err().to_string(),
        "the module has no such method"
    );
}

#[test]
fn a_library_says_what_it_is() {
    let library = fixture("pool-x86_64.so");
    assert_eq!(library.arch(), Arch::X86_64);
    assert_eq!(library.soname().unwrap().as_deref(), Some("libpool.so"));
    assert_eq!(library.needed().unwrap(), [""; 0]);
    let id = library.build_id().unwrap();
    assert!(id.len() == 40 && id.bytes().all(|b| b.is_ascii_hexdigit()), "{id}");
    assert_eq!(library.key().unwrap(), id);

    let nameless = fixture("pool-old-aarch64.so");
    assert_eq!(
        (nameless.arch(), nameless.build_id(), nameless.soname().unwrap()),
        (Arch::Aarch64, None, None)
    );
    let key = nameless.key().unwrap();
    let bytes = fs::read(fixture_path("pool-old-aarch64.so")).unwrap();
    assert!(key.starts_with(&format!("{:x}-", bytes.len())), "{key}");
    // Another build of the same size has its functions elsewhere.
    let expect = bytes.windows(14).position(|w| w == b"\0expect_report").unwrap();
    let mut other = bytes.clone();
    other[expect + 1] = b'E';
    assert_ne!(of_bytes(&other).unwrap().key().unwrap(), key);
    assert_eq!(of_bytes(&bytes).unwrap().key().unwrap(), key);

    let own = open(&std::env::current_exe().unwrap()).unwrap();
    assert!(own.needed().unwrap().iter().any(|n| n.starts_with("libc.so")), "{:?}", own.needed());
}

#[test]
fn the_first_instruction_tells_the_price() {
    let class = |name| {
        let library = fixture(name);
        library.first_instruction(expected(&library, "report")).unwrap()
    };
    assert_eq!(class("pool-x86_64.so"), FirstInstruction::Emulated); // push
    assert_eq!(class("pool-aarch64.so"), FirstInstruction::SingleStepped); // stp
    assert_eq!(class("pool-old-x86_64.so"), FirstInstruction::Endbr64);
    assert_eq!(class("pool-old-aarch64.so"), FirstInstruction::Hint); // paciasp
    let library = fixture("pool-x86_64.so");
    for outside in [0, 1 << 40, u64::MAX] {
        assert!(matches!(library.first_instruction(outside), Err(ElfError::Malformed { .. })));
    }
}

/// The loader's word for where functions of the C library are, against the file's.
#[test]
fn symbols_are_where_the_loader_finds_them() {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
    for name in [c"malloc", c"qsort", c"clock_gettime", c"fopen"] {
        // SAFETY: dlsym only reads its arguments, a valid handle and a C string.
        let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, CStr::as_ptr(name)) } as u64;
        let mapping = maps.lines().find(|line| {
            let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
            (hex(start)..hex(end)).contains(&address)
        });
        let fields: Vec<&str> = mapping.unwrap().split_ascii_whitespace().collect();
        let start = hex(fields[0].split('-').next().unwrap());
        let library = open(Path::new(fields[5])).unwrap();
        let name = name.to_str().unwrap();
        assert_eq!(library.symbol(name).unwrap(), Some(address - start + hex(fields[2])), "{name}");
    }
}

#[test]
fn both_kinds_of_hash_table_find_the_same() {
    const DT_GNU_HASH: [u8; 8] = 0x6fff_fef5_u64.to_le_bytes();
    const DT_HASH: [u8; 8] = 4u64.to_le_bytes();
    for name in FIXTURES {
        let bytes = fs::read(fixture_path(name)).unwrap();
        let without = |tag: [u8; 8]| {
            let mut bytes = bytes.clone();
            let entries =
                bytes.chunks_exact(8).enumerate().filter(|(_, word)| *word == tag).map(|(i, _)| 8 * i);
            for at in entries.collect::<Vec<_>>() {
                // An unused tag of the range for operating systems.
                bytes[at..at + 8].copy_from_slice(&0x6fff_ff00_u64.to_le_bytes());
            }
            of_bytes(&bytes).unwrap()
        };
        let (gnu, sysv) = (without(DT_HASH), without(DT_GNU_HASH));
        for function in ["expect_report", "expect_mark", "expect_module_mark", "pool_malloc"] {
            let offset = fixture(name).symbol(function).unwrap();
            assert!(offset.is_some(), "{name} {function}");
            assert_eq!(gnu.symbol(function).unwrap(), offset, "{name} {function}");
            assert_eq!(sysv.symbol(function).unwrap(), offset, "{name} {function}");
        }
        for absent in ["", "expect", "expect_report_", "PyArg_ParseTuple"] {
            assert_eq!(gnu.symbol(absent).unwrap(), None, "{name} {absent}");
            assert_eq!(sysv.symbol(absent).unwrap(), None, "{name} {absent}");
        }
    }
}

#[test]
fn what_is_not_a_library_is_refused_with_the_reason() {
    let bytes = fs::read(fixture_path("pool-x86_64.so")).unwrap();
    let with = |at: usize, value: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        of_bytes(&bytes).unwrap_err().to_string()
    };
    assert!(with(4, 1).contains("a 32-bit library is not supported"), "{}", with(4, 1));
    assert!(with(5, 2).contains("big-endian"), "{}", with(5, 2));
    assert!(with(18, 0xf3).contains("machine type 243"), "{}", with(18, 0xf3));
    assert!(with(16, 1).contains("type 1"), "{}", with(16, 1));
    assert!(matches!(of_bytes(b"#!/bin/sh\n"), Err(ElfError::NotElf { .. })));
    assert!(matches!(of_bytes(b""), Err(ElfError::NotElf { .. })));
    assert!(matches!(open(Path::new("/")), Err(ElfError::NotElf { .. })));
    let cut = of_bytes(&bytes[..100]).unwrap_err().to_string();
    assert!(cut.starts_with("changed.so: the program header table reaches past the end"), "{cut}");
}

/// A xorshift generator: the same damage in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}

/// Damage must give an error or a smaller result: no panic, no endless loop, no huge allocation.
#[test]
fn damaged_files_do_no_harm() {
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let values = [0, 1, 0x7f, 0x80, 0xff];
    for name in FIXTURES {
        let bytes = fs::read(fixture_path(name)).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        let slowest = |what: String, begin: Instant| {
            assert!(begin.elapsed() < Duration::from_secs(20), "{name}: {what} takes {:?}", begin.elapsed());
        };
        // Headers and dynamic section, byte by byte; all else at random.
        let headers = (0..1024).chain((0..600).map(|_| random.below(bytes.len())).collect::<Vec<_>>());
        for at in headers {
            let begin = Instant::now();
            let value = values[random.below(values.len())];
            file.write_all_at(&[value], at as u64).unwrap();
            exercise::library(&file);
            file.write_all_at(&bytes[at..=at], at as u64).unwrap();
            slowest(format!("byte {at} = {value}"), begin);
        }
        for round in 0..300 {
            let begin = Instant::now();
            let mut damaged = bytes.clone();
            for _ in 0..1 + random.below(32) {
                let at = random.below(damaged.len() - 8);
                let word = [u64::MAX, 1 << 63, 1 << 32, 0, 1, 0xffff_f000][random.below(6)].to_le_bytes();
                let width = [1, 4, 8][random.below(3)];
                damaged[at..at + width].copy_from_slice(&word[..width]);
            }
            file.write_all_at(&damaged, 0).unwrap();
            exercise::library(&file);
            slowest(format!("round {round}"), begin);
        }
        file.write_all_at(&bytes, 0).unwrap();
        for length in (0..bytes.len()).rev().step_by(61) {
            file.set_len(length as u64).unwrap();
            exercise::library(&file);
        }
    }
}

#[test]
fn fuzz_elf() {
    let files = exercise::libraries();
    crate::fuzzing::rounds("elf", 20, |random| {
        let mut bytes = random.pick(&files).clone();
        crate::fuzzing::damage(&mut bytes, &[b"\x7fELF", b"GNU\0", b"expect_report", b"MSTX"], random);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        exercise::library(&file);
    });
}

/// A file that claims to be larger than any library must not be read into memory.
#[test]
fn a_huge_sparse_file_is_not_loaded() {
    let mut bytes = fs::read(fixture_path("pool-x86_64.so")).unwrap();
    let huge = 1u64 << 40;
    // The size in the file of the first PT_LOAD.
    let table = bytes[64..].chunks_exact(56).position(|entry| entry[..4] == [1, 0, 0, 0]).unwrap();
    let at = 64 + 56 * table + 32;
    bytes[at..at + 8].copy_from_slice(&huge.to_le_bytes());
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes).unwrap();
    file.set_len(2 * huge).unwrap();
    let library = Library::open(file, "huge.so").unwrap();
    assert!(matches!(torch_npu::resolve(&library), Err(ElfError::TooLarge { .. })));
}

mod cache {
    use super::*;

    const FILE: &str = "resolved-v1.json";

    /// A cache that has resolved the fixture, its directory, and the text it keeps.
    fn filled() -> (tempfile::TempDir, Cache, String) {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("memscope-trace");
        let cache = Cache::at(&directory);
        let library = fixture("pool-x86_64.so");
        assert_eq!(cache.torch_npu(&library).unwrap(), torch_npu::resolve(&library).unwrap());
        let text = fs::read_to_string(directory.join(FILE)).unwrap();
        (parent, cache, text)
    }

    fn directory(parent: &tempfile::TempDir) -> PathBuf {
        parent.path().join("memscope-trace")
    }

    /// The text with another offset for the report, to see whether it is believed.
    fn altered(text: &str) -> String {
        let offset = expected(&fixture("pool-x86_64.so"), "report");
        assert!(text.contains(&offset.to_string()));
        text.replace(&offset.to_string(), "4242")
    }

    fn report(cache: &Cache, library: &Library) -> u64 {
        cache.torch_npu(library).unwrap().pool_report.unwrap().offset
    }

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn what_was_found_is_kept_privately_and_used() {
        let (parent, cache, text) = filled();
        let directory = directory(&parent);
        assert_eq!((mode(&directory), mode(&directory.join(FILE))), (0o700, 0o600));
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
        fs::write(directory.join(FILE), altered(&text)).unwrap();
        assert_eq!(report(&cache, &fixture("pool-x86_64.so")), 4242);
        // A second file is added; the first stays.
        let other = fixture("pool-aarch64.so");
        assert_eq!(report(&cache, &other), expected(&other, "report"));
        assert_eq!(report(&cache, &fixture("pool-x86_64.so")), 4242);
        let module = fixture("pool-x86_64.so");
        assert_eq!(cache.mstx_python(&module).unwrap(), mstx_python::resolve(&module).unwrap());
    }

    /// A file with the same build-id in another place can be a forgery.
    #[test]
    fn an_entry_is_bound_to_its_file() {
        let (parent, cache, text) = filled();
        fs::write(directory(&parent).join(FILE), altered(&text)).unwrap();
        let copy = parent.path().join("copy.so");
        fs::copy(fixture_path("pool-x86_64.so"), &copy).unwrap();
        let copy = open(&copy).unwrap();
        assert_eq!(copy.key().unwrap(), fixture("pool-x86_64.so").key().unwrap());
        assert_eq!(report(&cache, &copy), expected(&copy, "report"));
    }

    #[test]
    fn a_damaged_file_is_ignored_and_replaced() {
        let (parent, cache, text) = filled();
        let file = directory(&parent).join(FILE);
        let library = fixture("pool-x86_64.so");
        let right = expected(&library, "report");
        let cut = &altered(&text)[..text.len() / 2];
        let deep = "[".repeat(100_000);
        for damaged in ["", "null", "{\"entries\":[{}]}", cut, deep.as_str(), &"x".repeat(2 << 20)] {
            fs::write(&file, damaged).unwrap();
            assert_eq!(report(&cache, &library), right);
            assert_eq!(fs::read_to_string(&file).unwrap(), text);
        }
        // An entry of another form is resolved anew.
        fs::write(&file, text.replace("pool_report", "pool_rapport")).unwrap();
        assert_eq!(report(&cache, &library), right);
    }

    #[test]
    fn what_others_can_write_is_not_believed() {
        let (parent, cache, text) = filled();
        let directory = directory(&parent);
        let file = directory.join(FILE);
        let library = fixture("pool-x86_64.so");
        let right = expected(&library, "report");
        let set_mode =
            |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        let believed = || {
            fs::write(&file, altered(&text)).unwrap();
            report(&cache, &library)
        };
        assert_eq!(believed(), 4242);
        for mode in [0o777, 0o720, 0o702] {
            set_mode(&directory, mode);
            assert_eq!(believed(), right, "directory with mode {mode:o}");
        }
        set_mode(&directory, 0o700);
        for mode in [0o620, 0o602] {
            set_mode(&file, mode);
            assert_eq!(believed(), right, "file with mode {mode:o}");
        }
        if nix::unistd::geteuid().is_root() {
            let owner = |id| Some(nix::unistd::Uid::from_raw(id));
            set_mode(&file, 0o600);
            nix::unistd::chown(&directory, owner(12345), None).unwrap();
            assert_eq!(believed(), right, "directory of another user");
            nix::unistd::chown(&directory, owner(0), None).unwrap();
            nix::unistd::chown(&file, owner(12345), None).unwrap();
            assert_eq!(believed(), right, "file of another user");
        }
    }

    #[test]
    fn links_are_not_followed() {
        let (parent, cache, text) = filled();
        let directory = directory(&parent);
        let library = fixture("pool-x86_64.so");
        let right = expected(&library, "report");
        // The file is a link: not read, and what it leads to not written.
        let victim = parent.path().join("victim");
        fs::write(&victim, altered(&text)).unwrap();
        fs::remove_file(directory.join(FILE)).unwrap();
        symlink(&victim, directory.join(FILE)).unwrap();
        assert_eq!(report(&cache, &library), right);
        assert_eq!(fs::read_to_string(&victim).unwrap(), altered(&text));
        // The directory is a link.
        let elsewhere = parent.path().join("elsewhere");
        fs::rename(&directory, &elsewhere).unwrap();
        symlink(&elsewhere, &directory).unwrap();
        fs::write(elsewhere.join(FILE), altered(&text)).unwrap();
        assert_eq!(report(&cache, &library), right);
        assert_eq!(fs::read_to_string(elsewhere.join(FILE)).unwrap(), altered(&text));
    }

    #[test]
    fn the_oldest_entries_go_first() {
        let (parent, cache, text) = filled();
        let file = directory(&parent).join(FILE);
        let mut kept: serde_json::Value = serde_json::from_str(&text).unwrap();
        let entries = kept["entries"].as_array_mut().unwrap();
        let first = entries.remove(0);
        for n in 0..255 {
            let mut entry = first.clone();
            entry["key"] = format!("other {n}").into();
            entries.push(entry);
        }
        entries.push(first);
        fs::write(&file, kept.to_string()).unwrap();
        let copy = parent.path().join("copy.so");
        fs::copy(fixture_path("pool-x86_64.so"), &copy).unwrap();
        report(&cache, &open(&copy).unwrap());
        let now: serde_json::Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        let keys: Vec<&str> =
            now["entries"].as_array().unwrap().iter().map(|e| e["key"].as_str().unwrap()).collect();
        assert_eq!((keys.len(), keys[0]), (256, "other 1"));
        assert!(keys[255].starts_with("torch_npu "), "{}", keys[255]);
    }

    #[test]
    fn two_tracers_can_write_at_once() {
        let (parent, cache, _) = filled();
        let file = directory(&parent).join(FILE);
        std::thread::scope(|scope| {
            for name in ["pool-aarch64.so", "pool-old-aarch64.so", "pool-old-x86_64.so"] {
                let (cache, file, parent) = (&cache, &file, &parent);
                scope.spawn(move || {
                    for round in 0..20 {
                        let copy = parent.path().join(format!("{round}-{name}"));
                        fs::copy(fixture_path(name), &copy).unwrap();
                        let library = open(&copy).unwrap();
                        assert_eq!(report(cache, &library), expected(&library, "report"));
                        let text = fs::read_to_string(file).unwrap();
                        serde_json::from_str::<serde_json::Value>(&text).unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn without_a_directory_everything_is_resolved() {
        let library = fixture("pool-x86_64.so");
        let right = expected(&library, "report");
        assert_eq!(report(&Cache::none(), &library), right);
        assert_eq!(report(&Cache::at("/proc/no/such/place"), &library), right);
    }
}

// ---- released wheels

/// A row of `wheels.tsv`.
struct Wheel {
    in_every_run: bool,
    version: &'static str,
    python: &'static str,
    arch: &'static str,
    build_id: &'static str,
    has_domain: bool,
    offsets: BTreeMap<&'static str, Option<u64>>,
}

fn wheels() -> Vec<Wheel> {
    let table = include_str!("../../tests/fixtures/resolvers/wheels.tsv");
    let sites = ["report", "mark", "range_start", "range_end", "range_push", "range_pop"];
    let rows = table.lines().filter(|line| !line.starts_with('#')).map(|line| {
        let fields: Vec<&str> = line.split('\t').collect();
        let offset = |text: &str| text.strip_prefix("0x").map(|hex| u64::from_str_radix(hex, 16).unwrap());
        Wheel {
            in_every_run: fields[0] == "default",
            version: fields[2],
            python: fields[3],
            arch: fields[4],
            build_id: fields[5],
            has_domain: fields[6] == "domain",
            offsets: sites.into_iter().zip(fields[7..].iter().map(|text| offset(text))).collect(),
        }
    });
    rows.collect()
}

impl Wheel {
    fn name(&self) -> String {
        format!("{}-{}-{}", self.version, self.python, self.arch)
    }

    /// The library of the wheel, fetched if need be; why not, otherwise.
    fn library(&self) -> Result<PathBuf, String> {
        let wheels = std::env::var_os("MEMSCOPE_WHEELS").map(PathBuf::from);
        let wheels = wheels.unwrap_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("wheels"));
        let directory = wheels.join(self.name());
        let library = directory.join("libtorch_npu.so");
        if library.exists() {
            return Ok(library);
        }
        fs::create_dir_all(&directory).map_err(|e| e.to_string())?;
        let scratch = tempfile::tempdir_in(&directory).map_err(|e| e.to_string())?;
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]);
        pip.args(["--timeout", "20", "--retries", "1", "--implementation", "cp", "--abi", self.python]);
        pip.args(["--python-version", &self.python[2..], "--dest"]).arg(scratch.path());
        for platform in
            ["manylinux2014", "manylinux_2_17", "manylinux_2_24", "manylinux_2_28", "manylinux_2_31", "linux"]
        {
            pip.args(["--platform", &format!("{platform}_{}", self.arch)]);
        }
        run(pip.arg(format!("torch-npu=={}", self.version)))?;
        let unpack = "import glob, sys, zipfile; \
                      zipfile.ZipFile(glob.glob(sys.argv[1] + '/*.whl')[0]).extract('torch_npu/lib/libtorch_npu.so', sys.argv[1])";
        run(Command::new("python3").args(["-c", unpack]).arg(scratch.path()))?;
        let unpacked = scratch.path().join("torch_npu/lib/libtorch_npu.so");
        fs::rename(unpacked, &library).map_err(|e| e.to_string())?;
        Ok(library)
    }

    fn check(&self, path: &Path) {
        let name = self.name();
        let library = open(path).unwrap();
        assert_eq!(library.build_id(), Some(self.build_id), "{name}: another build than the table's");
        let begin = Instant::now();
        let found = torch_npu::resolve(&library).unwrap();
        println!("{name}: {:?}", begin.elapsed());
        let TorchNpu { pool_report, mark, range_start, range_end, range_push, range_pop } = found;
        let report = pool_report.unwrap();
        assert_eq!(Some(report.offset), self.offsets["report"], "{name}");
        let layout =
            if self.has_domain { ReportLayout::WithComponent } else { ReportLayout::WithoutComponent };
        assert_eq!(report.layout, layout, "{name}");
        let domain = |n| self.has_domain.then_some(n);
        let start = MarkArgs { text: Some(1), stream: Some(2), domain: domain(3), id: None };
        let mark_args = if self.has_domain { start } else { MarkArgs { text: Some(0), ..NONE } };
        let sites = [
            ("mark", mark, mark_args),
            ("range_start", range_start, start),
            ("range_end", range_end, MarkArgs { id: Some(1), domain: domain(2), ..NONE }),
            ("range_push", range_push, start),
            ("range_pop", range_pop, MarkArgs { domain: Some(1), ..NONE }),
        ];
        for (what, found, args) in sites {
            let found = found.map_err(|missing| missing.to_string());
            match self.offsets[what] {
                Some(offset) => assert_eq!(found, Ok(MarkSite { offset, args }), "{name} {what}"),
                None => assert!(found.is_err(), "{name} {what}: {found:?}"),
            }
        }
    }
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|e| format!("python3: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}

fn check_wheels(wanted: impl Fn(&Wheel) -> bool) {
    let mut skipped = Vec::new();
    for wheel in wheels().into_iter().filter(wanted) {
        match wheel.library() {
            Ok(path) => wheel.check(&path),
            Err(why) => skipped.push(format!("{}: {why}", wheel.name())),
        }
    }
    if !skipped.is_empty() {
        eprintln!("SKIPPED, not to be had from PyPI:\n{}", skipped.join("\n"));
    }
}

/// An x86_64 wheel of each form and an aarch64 one: 75 MB.
#[test]
fn sites_of_released_wheels_are_found() {
    check_wheels(|wheel| wheel.in_every_run);
}

/// Checked by what they are called with, in the running wheel and in its code.
#[test]
fn what_the_task_queue_tells_is_found_in_released_wheels() {
    let known = [
        ("2.1.0.post8-cp310-x86_64", None),
        ("2.7.1-cp311-x86_64", Some(QueueSites { enqueue: 0x2d7_dc80, run: 0x2d8_0280 })),
        ("2.14.0-cp311-aarch64", Some(QueueSites { enqueue: 0x4da_e400, run: 0x4da_ec20 })),
    ];
    for wheel in wheels() {
        let Some((name, sites)) = known.iter().find(|(name, _)| *name == wheel.name()) else { continue };
        match wheel.library() {
            Ok(path) => {
                let found = torch_npu::resolve_queue(&open(&path).unwrap()).unwrap();
                assert_eq!(found.ok(), *sites, "{name}");
            }
            Err(why) => eprintln!("SKIPPED, not to be had from PyPI: {name}: {why}"),
        }
    }
}

#[test]
#[ignore = "fetches every wheel of the table, 2.3 GB"]
fn sites_of_all_wheels_are_found() {
    check_wheels(|_| true);
}

/// A cached result is there at once.
#[test]
fn a_second_look_at_a_wheel_is_fast() {
    let wheel = wheels().into_iter().find(|w| w.version == "2.7.1" && w.in_every_run).unwrap();
    let Ok(path) = wheel.library() else { return eprintln!("SKIPPED: {} is not to be had", wheel.name()) };
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::at(directory.path().join("cache"));
    let first = cache.torch_npu(&open(&path).unwrap()).unwrap();
    let begin = Instant::now();
    assert_eq!(cache.torch_npu(&open(&path).unwrap()).unwrap(), first);
    assert!(begin.elapsed() < Duration::from_millis(100), "{:?}", begin.elapsed());
}
