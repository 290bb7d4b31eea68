//! `cargo xtask sim`: builds the simulated CANN (tests/sim-cann) and the native workload linked to it.

pub mod elf;
pub mod stub;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use stub::{Body, Stub};

use crate::command::{cargo, root};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Which CANN's library names to take
    #[arg(long, value_enum, default_value_t = Layout::V8)]
    pub layout: Layout,
    /// Where to build (default: target/sim/LAYOUT)
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Build for another machine: a Rust target triple (its linker, RUSTC and RUSTFLAGS from the environment)
    #[arg(long, value_name = "TRIPLE")]
    pub target: Option<String>,
    /// Print the paths of what was built as JSON
    #[arg(long)]
    pub json: bool,
}

/// How CANN's libraries are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Layout {
    /// CANN 8: libascendcl.so holds aclrt*
    V8,
    /// CANN 9: libacl_rt.so holds aclrt*, libascendcl.so only needs it
    V9,
}

impl Layout {
    pub fn name(self) -> &'static str {
        match self {
            Self::V8 => "v8",
            Self::V9 => "v9",
        }
    }

    /// The library that exports `aclrtMalloc`.
    pub fn acl(self) -> &'static str {
        match self {
            Self::V8 => "libascendcl.so",
            Self::V9 => "libacl_rt.so",
        }
    }

    fn acl_impl(self) -> &'static str {
        match self {
            Self::V8 => "libascendcl_impl.so",
            Self::V9 => "libacl_rt_impl.so",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    X86_64,
    Aarch64,
}

impl Arch {
    /// By the name that begins a target triple.
    pub fn of(name: &str) -> Result<Self, Error> {
        match name {
            "x86_64" => Ok(Self::X86_64),
            "aarch64" => Ok(Self::Aarch64),
            other => Err(Error::Architecture(other.to_owned())),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot run {program}: {why}; is it installed?")]
    Start { program: String, why: io::Error },
    #[error("{command} failed:\n{output}")]
    Failed { command: String, output: String },
    #[error("cannot use {path}: {why}")]
    File { path: PathBuf, why: io::Error },
    #[error("cannot read the library {path}: {why}")]
    Library { path: PathBuf, why: String },
    #[error("no simulated CANN for {0}: only x86_64 and aarch64 have one")]
    Architecture(String),
    #[error(
        "{library}: {symbol} begins with {code:02x?}, which a uprobe must single-step; it should begin with \
         push %rbp or a jump (frame pointers lost in the build?)"
    )]
    Entry { library: PathBuf, symbol: String, code: [u8; 8] },
}

impl Error {
    pub fn file(path: &Path, why: io::Error) -> Self {
        Self::File { path: path.to_owned(), why }
    }
}

/// The native workload and the libraries it runs on.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub struct Sim {
    /// Holds the libraries.
    pub lib64: PathBuf,
    /// Runs with nothing set in the environment.
    pub workload: PathBuf,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let sim = ensure(args.layout, args.target.as_deref(), args.out.as_deref())?;
    if args.json {
        println!("{}", serde_json::to_string(&sim)?);
    } else {
        println!("libraries: {}\nworkload:  {}", sim.lib64.display(), sim.workload.display());
    }
    Ok(())
}

/// Names that a generated library must export beside what the simulation has, by library.
pub type Names = BTreeMap<String, BTreeSet<String>>;

/// Builds the libraries and the native workload, or finds them built from the sources as they are.
pub fn ensure(layout: Layout, target: Option<&str>, out: Option<&Path>) -> Result<Sim, Error> {
    let directory = match out {
        Some(out) => out.to_owned(),
        None => root().join("target/sim").join(layout.name()).join(target.unwrap_or("")),
    };
    let (lib64, workload) = (directory.join("lib64"), directory.join("native-workload"));
    let build = Build { layout, target, lib64: &lib64 };
    once(&lib64, fingerprint()?, || {
        build.compile()?;
        build.generate(&Names::new())?;
        build.compile_workload(&workload)
    })?;
    Ok(Sim { lib64, workload })
}

/// Makes a directory of the libraries for this machine that exports `names`, too.
pub fn furnish(layout: Layout, lib64: &Path, names: &Names) -> Result<(), Error> {
    let sim = ensure(layout, None, None)?;
    once(lib64, format!("{names:?}\n{}", fingerprint()?), || {
        for library in libraries(layout) {
            replace(&sim.lib64.join(library.file), &lib64.join(library.file))?;
        }
        Build { layout, target: None, lib64 }.generate(names)
    })
}

/// Lets `make` fill a directory, unless it did so before from the same `inputs`. One process at a time.
fn once(directory: &Path, inputs: String, make: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
    fs::create_dir_all(directory).map_err(|why| Error::file(directory, why))?;
    let lock = File::create(directory.join(".lock")).map_err(|why| Error::file(directory, why))?;
    lock.lock().map_err(|why| Error::file(directory, why))?;
    let stamp = directory.join(".inputs");
    if fs::read_to_string(&stamp).is_ok_and(|found| found == inputs) {
        return Ok(());
    }
    make()?;
    fs::write(&stamp, inputs).map_err(|why| Error::file(&stamp, why))
}

/// The sources that a build depends on: names, sizes and times.
fn fingerprint() -> Result<String, Error> {
    let mut text = String::new();
    let mut folders =
        ["tests/sim-cann", "tests/workloads/native", "xtask/src/sim"].map(|f| root().join(f)).to_vec();
    let mut files = vec![root().join("xtask/src/sim.rs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(|why| Error::file(&folder, why))? {
            let path = entry.map_err(|why| Error::file(&folder, why))?.path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    for file in files {
        let meta = fs::metadata(&file).map_err(|why| Error::file(&file, why))?;
        text.push_str(&format!("{} {} {:?}\n", file.display(), meta.len(), meta.modified().ok()));
    }
    Ok(text)
}

/// Runs a command to its end; its output is shown only when it fails.
pub fn execute(command: &mut Command) -> Result<Vec<u8>, Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|why| Error::Start { program, why })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let command = format!("{command:?}");
    let output = [output.stderr, output.stdout].concat();
    Err(Error::Failed { command, output: String::from_utf8_lossy(&output).into_owned() })
}

/// Makes every function begin with `push %rbp`, like most of a C library's, which is cheap to probe: frame
/// pointers, and no path through a function that goes without them.
const FRAMES: [&str; 2] = ["-Cforce-frame-pointers=yes", "-Cllvm-args=-enable-shrink-wrap=false"];

/// One library of tests/sim-cann.
struct Library {
    /// The example that it is.
    example: &'static str,
    file: &'static str,
    /// For DT_NEEDED, in order. Those that are no library of tests/sim-cann are generated.
    needed: Vec<&'static str>,
}

fn libraries(layout: Layout) -> Vec<Library> {
    let library = |example, file, needed: &[&'static str]| Library { example, file, needed: needed.to_vec() };
    let acl = layout.acl();
    vec![
        library("ascend_hal", "libascend_hal.so", &[]),
        library("runtime", "libruntime.so", &["libascend_hal.so", "libruntime_common.so", "libprofapi.so"]),
        library("acl_impl", layout.acl_impl(), &["libruntime.so"]),
        library("ms_tools_ext", "libms_tools_ext.so", &[]),
        library("nnopbase", "libnnopbase.so", &[acl, "libruntime.so"]),
        library("opapi", "libopapi.so", &["libnnopbase.so", "libopapi_nn.so"]),
        library("hccl", "libhccl.so", &["libruntime.so", "libhcomm.so"]),
        library("acl_op_compiler", "libacl_op_compiler.so", &[acl, "libacl_op_executor.so"]),
        library("atb", "libatb.so", &[acl]),
        library("mindspore_memory_pool", "libmindspore_memory_pool.so", &[acl]),
    ]
}

/// Where names that a library of tests/sim-cann is asked for and does not have are put: generated libraries
/// that it needs.
const RESTS: [(&str, &str); 4] = [
    ("libruntime.so", "libruntime_common.so"),
    ("libopapi.so", "libopapi_nn.so"),
    ("libhccl.so", "libhcomm.so"),
    ("libacl_op_compiler.so", "libacl_op_executor.so"),
];

/// A directory of simulated libraries, for one machine.
struct Build<'a> {
    layout: Layout,
    /// Target triple; None: this machine.
    target: Option<&'a str>,
    lib64: &'a Path,
}

impl Build<'_> {
    fn arch(&self) -> Result<Arch, Error> {
        let name = self.target.and_then(|triple| triple.split('-').next()).unwrap_or(std::env::consts::ARCH);
        Arch::of(name)
    }

    /// The C compiler that links for the target.
    fn compiler(&self) -> String {
        let native = || std::env::var("CC").unwrap_or_else(|_| String::from("cc"));
        let cross = |triple: &str| format!("{}-gcc", triple.replace("-unknown", ""));
        self.target.filter(|triple| !triple.starts_with(std::env::consts::ARCH)).map_or_else(native, cross)
    }

    /// Compiles the libraries of tests/sim-cann.
    fn compile(&self) -> Result<(), Error> {
        let (arch, compiler) = (self.arch()?, self.compiler());
        let libraries = libraries(self.layout);
        // A library links to the ones it needs by their names alone, so those that can only be generated once
        // all exports are known stand there empty at first.
        for file in libraries.iter().flat_map(|library| &library.needed) {
            let compiled = libraries.iter().any(|library| library.file == *file);
            if !compiled && !self.lib64.join(file).exists() {
                Stub::default().link(&compiler, arch, self.lib64, file)?;
            }
        }
        for library in &libraries {
            let mut arguments = vec![format!("-Clink-arg=-Wl,-soname,{}", library.file)];
            arguments.push(String::from("-Clink-arg=-Wl,--no-as-needed,-rpath,$ORIGIN"));
            for needed in &library.needed {
                arguments.push(format!("-Clink-arg={}", self.lib64.join(needed).display()));
            }
            arguments.extend(FRAMES.map(String::from));
            let built = self.cargo("sim-cann", &["--example", library.example], &arguments)?;
            if arch == Arch::X86_64 {
                check_entries(&built)?;
            }
            replace(&built, &self.lib64.join(library.file))?;
        }
        Ok(())
    }

    /// Generates the libraries that have nothing but entry points: ACL's front, and what `names` asks for
    /// beside the simulation, answering 0. ACL's names go by libascendcl.so.
    fn generate(&self, names: &Names) -> Result<(), Error> {
        let (arch, compiler) = (self.arch()?, self.compiler());
        let libraries = libraries(self.layout);
        let mut exports = BTreeSet::new();
        for library in &libraries {
            let interface = elf::read(&self.lib64.join(library.file))?;
            exports.extend(interface.exports.into_iter().map(|export| export.name));
        }
        // Every library to generate, with what it must export.
        let mut stubs = BTreeMap::<&str, BTreeSet<&String>>::new();
        for file in libraries.iter().flat_map(|library| &library.needed) {
            stubs.entry(file).or_default();
        }
        for (library, names) in names {
            let library = if library == "libascendcl.so" { self.layout.acl() } else { library };
            let rest = RESTS.iter().find(|(simulated, _)| *simulated == library).map(|(_, rest)| *rest);
            let names = names.iter().filter(|name| !exports.contains(*name));
            stubs.entry(rest.unwrap_or(library)).or_default().extend(names);
        }
        for library in &libraries {
            stubs.remove(library.file);
        }
        for (file, names) in stubs {
            let mut stub = Stub::returning(names.into_iter().cloned(), 0);
            if file == self.layout.acl() {
                stub.needed = vec![self.lib64.join(self.layout.acl_impl())];
                let bodies = exports.iter().filter(|name| name.starts_with("acl"));
                for body in bodies {
                    if let Some(name) = body.strip_suffix("Impl") {
                        stub.functions.insert(name.to_owned(), Body::Jump(body.clone()));
                    }
                }
            }
            stub.link(&compiler, arch, self.lib64, file)?;
        }
        if self.layout == Layout::V9 {
            let shell = Stub { needed: vec![self.lib64.join(self.layout.acl())], ..Stub::default() };
            shell.link(&compiler, arch, self.lib64, "libascendcl.so")?;
        }
        Ok(())
    }

    /// Compiles the native workload, which looks for its libraries in lib64 beside it.
    fn compile_workload(&self, file: &Path) -> Result<(), Error> {
        let mut arguments = vec![String::from("-Clink-arg=-Wl,-rpath,$ORIGIN/lib64")];
        arguments.push(format!("-Clink-arg=-Wl,-rpath-link,{}", self.lib64.display()));
        for needed in [self.layout.acl(), "libruntime.so", "libms_tools_ext.so"] {
            arguments.push(format!("-Clink-arg={}", self.lib64.join(needed).display()));
        }
        arguments.extend(FRAMES.map(String::from));
        let target = ["--bin", "native-workload", "--features", "linked"];
        let built = self.cargo("native-workload", &target, &arguments)?;
        replace(&built, file)
    }

    /// Builds one target of a package and gives the file.
    fn cargo(&self, package: &str, target: &[&str], arguments: &[String]) -> Result<PathBuf, Error> {
        let mut command = cargo();
        command.args(["rustc", "--quiet", "--profile", "cann", "--package", package]);
        command.arg("--message-format=json-render-diagnostics").args(target);
        if let Some(triple) = self.target {
            let variable = format!("CARGO_TARGET_{}_LINKER", triple.to_uppercase().replace('-', "_"));
            if std::env::var_os(&variable).is_none() {
                command.env(variable, self.compiler());
            }
            command.args(["--target", triple]);
        }
        let output = execute(command.arg("--").args(arguments))?;
        let name = target[1];
        let file = output.split(|&byte| byte == b'\n').find_map(|line| {
            let message: serde_json::Value = serde_json::from_slice(line).ok()?;
            let ours = message["reason"] == "compiler-artifact" && message["target"]["name"] == name;
            let file = message["executable"].as_str().or(message["filenames"][0].as_str())?;
            ours.then(|| PathBuf::from(file))
        });
        file.ok_or_else(|| Error::Failed {
            command: format!("{command:?}"),
            output: format!("it named no file built for {name}"),
        })
    }
}

/// Puts a copy of `from` at `to` in one step: processes that run on the old file keep it.
fn replace(from: &Path, to: &Path) -> Result<(), Error> {
    let directory = to.parent().unwrap_or(Path::new("."));
    let copy = tempfile::NamedTempFile::new_in(directory).map_err(|why| Error::file(directory, why))?;
    fs::copy(from, copy.path()).map_err(|why| Error::file(from, why))?;
    copy.persist(to).map_err(|error| Error::file(to, error.error))?;
    Ok(())
}

/// Uprobes emulate `push %rbp` and direct jumps; on anything else here they would single-step.
fn check_entries(library: &Path) -> Result<(), Error> {
    let emulated = |code: u8| matches!(code, 0x50..=0x57 | 0xe9 | 0xeb);
    match elf::entries(library)?.into_iter().find(|(_, code)| !emulated(code[0])) {
        None => Ok(()),
        Some((symbol, code)) => Err(Error::Entry { library: library.to_owned(), symbol, code }),
    }
}
