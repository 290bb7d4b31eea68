//! `cargo xtask bed`: the real torch and torch_npu wheels on the simulated CANN.
//!
//! The wheels come from the package index by name and stay as they are, except that torch's CUDA half is
//! deleted (1 GB that nothing here runs) and stand-ins are put where the loader looks next. What CANN must
//! export beside the simulation is read from the wheels' own ELF files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::root;
use crate::sim::elf::{self, Interface};
use crate::sim::stub::{Body, Data, Stub, is_constructor};
use crate::sim::{self, Arch, Layout, Names, execute};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Version of torch_npu; torch's is the same without `.postN`
    #[arg(default_value = DEFAULT_VERSION)]
    pub version: String,
    /// Which CANN's library names to take (default: v9 from torch 2.10 on, else v8)
    #[arg(long, value_enum)]
    pub layout: Option<Layout>,
    /// Print the bed's paths as JSON
    #[arg(long)]
    pub json: bool,
}

pub const DEFAULT_VERSION: &str = "2.7.1";

/// What torch imports at its start; the CUDA packages, which it also names, would be another 2.5 GB.
const LIGHT_PACKAGES: [&str; 10] = [
    "filelock",
    "typing-extensions",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "fsspec",
    "numpy",
    "pyyaml",
];

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The one failure that is about the outside: use the native workload instead.
    #[error(
        "cannot install torch and torch-npu {version} from the package index; without them only the native \
         workload (cargo xtask sim) is there\n{why}"
    )]
    NoWheels { version: String, why: sim::Error },
    #[error("{0:?} is no version like 2.7.1")]
    Version(String),
    #[error("no site-packages under {0}; delete the bed and try again")]
    NoSitePackages(PathBuf),
    #[error(transparent)]
    Sim(#[from] sim::Error),
}

/// A place to run Python programs that use torch_npu.
#[derive(Debug, serde::Serialize)]
pub struct Bed {
    pub dir: PathBuf,
    /// Runs its arguments in the bed: `run python train.py`.
    pub run: PathBuf,
    pub site_packages: PathBuf,
    /// Holds the simulated CANN.
    pub lib64: PathBuf,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let bed = ensure(&args.version, args.layout)?;
    if args.json {
        println!("{}", serde_json::to_string(&bed)?);
    } else {
        println!("{} python PROGRAM", bed.run.display());
    }
    Ok(())
}

/// The bed of a torch_npu version, made now if it is not there. Without `layout`, the one of its time.
pub fn ensure(version: &str, layout: Option<Layout>) -> Result<Bed, Error> {
    let torch = version.split(".post").next().unwrap_or(version);
    let mut numbers = torch.split('.').map(str::parse::<u32>);
    let (Some(Ok(2)), Some(Ok(minor)), Some(Ok(_)), None) =
        (numbers.next(), numbers.next(), numbers.next(), numbers.next())
    else {
        return Err(Error::Version(version.to_owned()));
    };
    let layout = layout.unwrap_or(if minor >= 10 { Layout::V9 } else { Layout::V8 });

    let dir = root().join("target/bed").join(version);
    make_directory(&dir)?;
    let lock = File::create(dir.join(".lock")).map_err(|why| sim::Error::file(&dir, why))?;
    lock.lock().map_err(|why| sim::Error::file(&dir, why))?;

    let installed = dir.join(".installed");
    if !installed.exists() {
        install(&dir, version, torch)?;
        shadow_cuda(&site_packages(&dir)?.join("torch/lib"), &dir.join("cuda"))?;
        write(&installed, "")?;
    }
    let cann = dir.join("cann");
    let bed =
        Bed { run: dir.join("run"), site_packages: site_packages(&dir)?, lib64: cann.join("lib64"), dir };
    // Where set_env.sh of a real CANN points to; torch_npu looks whether they exist.
    for folder in ["runtime", "compiler", "opp"] {
        make_directory(&cann.join(folder))?;
    }
    sim::furnish(layout, &bed.lib64, &names(&bed)?)?;
    bed.write_launcher(layout)?;

    let tried = bed.dir.join(".tried");
    if !tried.exists() {
        // The first import is slow, since it compiles all of torch's Python.
        let check = "import torch, torch_npu; torch.ones(2).npu().add(1).cpu()";
        let mut python = Command::new(&bed.run);
        execute(python.args(["python", "-c", check]).env_remove("PYTHONDONTWRITEBYTECODE"))?;
        write(&tried, "")?;
    }
    Ok(bed)
}

fn make_directory(path: &Path) -> Result<(), sim::Error> {
    fs::create_dir_all(path).map_err(|why| sim::Error::file(path, why))
}

fn write(path: &Path, text: &str) -> Result<(), sim::Error> {
    fs::write(path, text).map_err(|why| sim::Error::file(path, why))
}

fn install(dir: &Path, version: &str, torch: &str) -> Result<(), Error> {
    let no_wheels = |why| Error::NoWheels { version: version.to_owned(), why };
    let venv = dir.join("venv");
    let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    execute(Command::new(python).args(["-m", "venv"]).arg(&venv)).map_err(no_wheels)?;
    let mut pip = Command::new(venv.join("bin/python"));
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--retries", "1"]);
    // The small wheel first: it says soon whether there is an index, and a build for this Python.
    pip.arg(format!("torch-npu=={version}")).arg(format!("torch=={torch}")).args(LIGHT_PACKAGES);
    execute(&mut pip).map_err(no_wheels)?;

    let site_packages = site_packages(dir)?;
    let hook = "sim_cann_cpu_build";
    let source = root().join("tests/sim-cann/python").join(hook).with_extension("py");
    let target = site_packages.join(hook).with_extension("py");
    fs::copy(&source, &target).map_err(|why| sim::Error::file(&source, why))?;
    write(&target.with_extension("pth"), &format!("import {hook}\n"))?;
    Ok(())
}

fn site_packages(dir: &Path) -> Result<PathBuf, Error> {
    let lib = dir.join("venv/lib");
    let folders = fs::read_dir(&lib).map_err(|why| sim::Error::file(&lib, why))?;
    let mut found = folders.flatten().map(|entry| entry.path().join("site-packages"));
    found.find(|path| path.is_dir()).ok_or(Error::NoSitePackages(lib))
}

/// The shared libraries in a folder, by file name.
fn libraries_in(folder: &Path) -> Result<BTreeMap<String, Interface>, sim::Error> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(|why| sim::Error::file(folder, why))?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.contains(".so") {
            found.insert(name, elf::read(&entry.path())?);
        }
    }
    Ok(found)
}

/// Replaces torch's CUDA half and NVIDIA's libraries by stand-ins in `shadow`, where every function says
/// there is no device, and deletes that half. A torch built without CUDA is left alone.
fn shadow_cuda(torch_lib: &Path, shadow: &Path) -> Result<(), sim::Error> {
    const CUDA_HALF: [&str; 4] = ["libtorch_cuda", "libc10_cuda", "libcaffe2_nvrtc", "libtorch_nvshmem"];
    /// cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE.
    const NO_DEVICE: u32 = 100;
    let is_nvidia = |file: &str| ["libcu", "libnv", "libnccl"].iter().any(|start| file.starts_with(start));

    make_directory(shadow)?;
    let mut libraries = libraries_in(torch_lib)?;
    let (cuda, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut libraries)
        .into_iter()
        .partition(|(file, _)| CUDA_HALF.iter().any(|start| file.starts_with(start)));
    if cuda.is_empty() {
        return Ok(());
    }
    let own: BTreeSet<&str> =
        rest.iter().flat_map(|(_, library)| &library.exports).map(|export| export.name.as_str()).collect();

    // Every library that must be found, with what must be found in it.
    let mut stubs: BTreeMap<&str, Stub> = BTreeMap::new();
    let cuda_files: BTreeSet<&str> = cuda.iter().map(|(file, _)| file.as_str()).collect();
    for needed in rest.iter().flat_map(|(_, library)| &library.needed) {
        if is_nvidia(needed) || cuda_files.contains(needed.as_str()) {
            stubs.entry(needed).or_default();
        }
    }
    let Some(any) = stubs.keys().next().copied() else { return Ok(()) };
    for import in rest.iter().flat_map(|(_, library)| &library.imports) {
        let name = import.name.clone();
        if let Some(version) = &import.version {
            if is_nvidia(&version.library) {
                let stub = stubs.entry(&version.library).or_default();
                stub.versions.entry(version.name.clone()).or_default().insert(name.clone());
                stub.functions.insert(name, Body::Return(NO_DEVICE));
            }
            continue;
        }
        if own.contains(name.as_str()) {
            continue;
        }
        let original = cuda.iter().find_map(|(file, library)| {
            library.exports.iter().find(|export| export.name == name).map(|export| (file.as_str(), export))
        });
        match original {
            // One of NVIDIA's without a version: the loader does not care which library it comes from.
            None if ["cu", "nv", "nccl"].iter().any(|start| name.starts_with(start)) => {
                stubs.entry(any).or_default().functions.insert(name, Body::Return(NO_DEVICE));
            }
            None => {}
            Some((file, export)) => {
                let file = if stubs.contains_key(file) { file } else { any };
                let stub = stubs.entry(file).or_default();
                if export.is_function {
                    let constructs = is_constructor(&name);
                    stub.functions.insert(name, if constructs { Body::Construct } else { Body::ReturnZeros });
                } else {
                    let is_type = name.starts_with("_ZTI");
                    stub.data.insert(
                        name,
                        if is_type { Data::TypeInfo } else { Data::Zeros(export.size.max(16)) },
                    );
                }
            }
        }
    }
    for (file, stub) in &stubs {
        stub.link("cc", host_arch()?, shadow, file)?;
    }
    for (file, _) in &cuda {
        let path = torch_lib.join(file);
        fs::remove_file(&path).map_err(|why| sim::Error::file(&path, why))?;
    }
    Ok(())
}

fn host_arch() -> Result<Arch, sim::Error> {
    Arch::of(std::env::consts::ARCH)
}

/// Which library of CANN a name belongs to, by its begin; the first that fits.
const HOMES: [(&str, &str); 16] = [
    ("Hccl", "libhccl.so"),
    ("hccl", "libhccl.so"),
    ("aclnn", "libopapi.so"),
    ("aclop", "libacl_op_compiler.so"),
    ("aclSetCompileopt", "libacl_op_compiler.so"),
    ("aclGetCompileopt", "libacl_op_compiler.so"),
    ("aclGenGraph", "libacl_op_compiler.so"),
    ("aclCreateGraphDumpOpt", "libacl_op_compiler.so"),
    ("aclDestroyGraphDumpOpt", "libacl_op_compiler.so"),
    ("acltdt", "libacl_tdt_channel.so"),
    ("aclprof", "libmsprofiler.so"),
    ("acl", "libascendcl.so"),
    ("_ZN2ge", "libgraph.so"),
    ("_ZNK2ge", "libgraph.so"),
    ("Msprof", "libprofapi.so"),
    ("rt", "libruntime.so"),
];

fn home_of(name: &str) -> Option<&'static str> {
    HOMES.iter().find(|(start, _)| name.starts_with(start)).map(|(_, library)| *library)
}

/// What the wheels want of CANN: names they import, and names they look up at run time.
fn names(bed: &Bed) -> Result<Names, sim::Error> {
    let cached = bed.dir.join("names.json");
    if let Some(names) = fs::read(&cached).ok().and_then(|text| serde_json::from_slice(&text).ok()) {
        return Ok(names);
    }
    let mut names = read_names(&bed.site_packages)?;
    // torch_npu looks for these two in LD_PRELOAD: the one opens the gate of marks, the other makes the pool
    // report its blocks.
    for file in ["libmspti.so", "libascend_kernel_hook.so"] {
        names.entry(file.to_owned()).or_default();
    }
    write(&cached, &serde_json::to_string(&names).unwrap_or_default())?;
    Ok(names)
}

fn read_names(site_packages: &Path) -> Result<Names, sim::Error> {
    const SYSTEM: [&str; 8] = [
        "libc.so",
        "libm.so",
        "libdl.so",
        "librt.so",
        "libpthread.so",
        "libstdc++.so",
        "libgcc_s.so",
        "ld-linux",
    ];
    let package = site_packages.join("torch_npu");
    let torch = libraries_in(&site_packages.join("torch/lib"))?;
    let mut npu = libraries_in(&package.join("lib"))?;
    npu.extend(libraries_in(&package)?);
    // Needs ATB, which is not simulated; it is loaded only for operators that use it.
    npu.remove("libop_plugin_atb.so");

    let mut names = Names::new();
    let own: BTreeSet<&str> = torch
        .values()
        .chain(npu.values())
        .flat_map(|library| &library.exports)
        .map(|export| export.name.as_str())
        .collect();
    for library in npu.values() {
        for needed in &library.needed {
            let known = torch.contains_key(needed) || npu.contains_key(needed);
            if !known && !SYSTEM.iter().any(|start| needed.starts_with(start)) {
                names.entry(needed.clone()).or_default();
            }
        }
        for import in &library.imports {
            let foreign = import.version.is_none() && !own.contains(import.name.as_str());
            if let Some(library) = home_of(&import.name).filter(|_| foreign) {
                names.entry(library.to_owned()).or_default().insert(import.name.clone());
            }
        }
    }
    let main = package.join("lib/libtorch_npu.so");
    let bytes = fs::read(&main).map_err(|why| sim::Error::file(&main, why))?;
    for name in identifiers(&bytes).filter(|name| name.starts_with("acl") || name.starts_with("Hccl")) {
        let Some(library) = home_of(name) else { continue };
        let names = names.entry(library.to_owned()).or_default();
        // An operator has two phases, of which the wheel may spell out only one.
        let phase2 = name.strip_suffix("GetWorkspaceSize").unwrap_or(name);
        if phase2.starts_with("aclnn") {
            names.extend([phase2.to_owned(), format!("{phase2}GetWorkspaceSize")]);
        } else {
            names.insert(name.to_owned());
        }
    }
    Ok(names)
}

/// The texts in `bytes` that could be the name of a C function.
fn identifiers(bytes: &[u8]) -> impl Iterator<Item = &str> {
    let texts = bytes.split(|byte| !(b' '..=b'~').contains(byte)).filter(|text| text.len() > 5);
    texts
        .filter(|text| text.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_'))
        .filter_map(|text| std::str::from_utf8(text).ok())
}

impl Bed {
    /// Writes `run`, which sets what set_env.sh of a real CANN would.
    fn write_launcher(&self, layout: Layout) -> Result<(), sim::Error> {
        let version = if layout == Layout::V9 { "9.1.0" } else { "8.3.RC1" };
        let text = format!(
            r#"#!/bin/sh
# Runs its arguments with torch_npu on the simulated CANN.
bed=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd) || exit
export ASCEND_HOME_PATH="$bed/cann" ASCEND_OPP_PATH="$bed/cann/opp"
export LD_LIBRARY_PATH="$bed/cann/lib64:$bed/cuda${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
export PATH="$bed/venv/bin:$PATH"
export SIM_CANN_VERSION="${{SIM_CANN_VERSION:-{version}}}"
exec "$@"
"#
        );
        write(&self.run, &text)?;
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&self.run, executable).map_err(|why| sim::Error::file(&self.run, why))
    }
}
