//! Packages of several Debian releases and both machines, fetched by name and unpacked, with no trace in the
//! host's own package state.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail};

use super::{Arch, Kernel, RELEASES};
use crate::{
    command::{output, root},
    sim::execute,
};

/// Fetches packages; what was fetched before stays under target/vm.
#[derive(Debug, Default)]
pub struct Packages {
    /// Whether the lists of packages were updated in this run.
    updated: bool,
}

#[derive(Debug, thiserror::Error)]
#[error(
    "apt knows no archive of Debian, which has the kernels: run this on Debian 12, after `apt-get update`"
)]
pub struct NoArchive;

/// Versions of Python by the release that has them: the program has the interpreter in it, without symbols.
const PYTHONS: [(&str, &str); 3] = [("3.9", "bullseye"), ("3.11", "bookworm"), ("3.13", "trixie")];

/// What they and the tests need, of the newest release: its C library serves programs of older ones.
const LIBRARIES: [(&str, &str); 6] = [
    ("libc6", "trixie"),
    ("libgcc-s1", "trixie"),
    ("libexpat1", "trixie"),
    ("zlib1g", "trixie"),
    ("libffi8", "trixie"),
    ("libffi7", "bullseye"),
];

/// Compiles what the program (first argument) imports, of a directory of modules (second), to below a third, for whatever
/// time the modules' files are of.
const COMPILE: &str = r#"
import ast, importlib.util, os, py_compile, sys
program, modules, to = sys.argv[1:]
for node in ast.walk(ast.parse(open(program, encoding="utf-8").read())):
    if isinstance(node, ast.Import):
        for name in node.names:
            importlib.import_module(name.name)
import site
for module in list(sys.modules.values()):
    file = getattr(module, "__file__", None) or ""
    if file.startswith(modules + os.sep) and file.endswith(".py"):
        place = os.path.join(to, os.path.basename(modules), os.path.relpath(importlib.util.cache_from_source(file), modules))
        py_compile.compile(file, place, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
"#;

/// Where packages of Python were unpacked to.
#[derive(Debug)]
pub struct Pythons {
    pub programs: Vec<PathBuf>,
    /// Directories of the standard library.
    pub modules: Vec<PathBuf>,
    /// The directory of shared libraries.
    pub libraries: PathBuf,
}

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

pub fn dir() -> PathBuf {
    root().join("target/vm")
}

impl Packages {
    /// The image of a kernel.
    pub fn kernel(&mut self, kernel: Kernel) -> anyhow::Result<PathBuf> {
        let to = dir().join("kernels").join(kernel.name());
        if !to.is_dir() {
            let (arch, suite) = (kernel.arch.name(), kernel.suite);
            // The name that stays depends on the package of the release's newest kernel.
            let newest = format!("linux-image-cloud-{arch}:{arch}/{suite}");
            let deb = self.download(&newest)?;
            let depends = output("dpkg-deb", &["-f", &deb.to_string_lossy(), "Depends"]).unwrap_or_default();
            let package = depends
                .split([',', '|'])
                .filter_map(|word| word.split_whitespace().next())
                .find(|name| name.starts_with("linux-image-"))
                .with_context(|| format!("{newest} depends on no kernel: {depends:?}"))?;
            self.unpack(&[format!("{package}:{arch}/{suite}")], &to)?;
        }
        let boot = to.join("boot");
        let images = fs::read_dir(&boot).with_context(|| boot.display().to_string())?;
        images
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("vmlinuz-")))
            .with_context(|| format!("no kernel in {}; remove it to fetch it again", boot.display()))
    }

    /// A statically linked busybox.
    pub fn busybox(&mut self, arch: Arch) -> anyhow::Result<PathBuf> {
        let to = dir().join("busybox").join(arch.name());
        if !to.is_dir() {
            self.unpack(&[format!("busybox-static:{}/bookworm", arch.name())], &to)?;
        }
        Ok(to.join("bin/busybox"))
    }

    /// The Python of each release, and one set of libraries for all programs.
    pub fn pythons(&mut self, arch: Arch) -> anyhow::Result<Pythons> {
        let to = dir().join("python").join(arch.name());
        if !to.is_dir() {
            let of_python = PYTHONS.iter().flat_map(|&(version, suite)| {
                let parts = ["python", "libpython"].map(|part| format!("{part}{version}-minimal"));
                parts.into_iter().chain([format!("libpython{version}-stdlib")]).map(move |name| (name, suite))
            });
            let libraries = LIBRARIES.map(|(name, suite)| (name.to_owned(), suite));
            let packages = of_python.chain(libraries);
            let packages: Vec<_> =
                packages.map(|(name, suite)| format!("{name}:{}/{suite}", arch.name())).collect();
            self.unpack(&packages, &to)?;
        }
        let (programs, modules) = (to.join("usr/bin"), to.join("usr/lib"));
        let versions = PYTHONS.map(|(version, _)| format!("python{version}"));
        Ok(Pythons {
            programs: versions.iter().map(|python| programs.join(python)).collect(),
            modules: versions.iter().map(|python| modules.join(python)).collect(),
            libraries: modules.join(arch.tools()),
        })
    }

    /// A directory with a `__pycache__` for each directory of modules, of what a program imports: an emulated machine takes a
    /// minute for compiling it. What is in there is the same for all machines.
    pub fn compiled(&mut self, program: &Path) -> anyhow::Result<PathBuf> {
        let to = dir().join("python").join("compiled");
        if !to.is_dir() {
            let host =
                Arch::ALL.into_iter().find(|arch| arch.is_host()).context("no packages for this machine")?;
            let Pythons { programs, libraries, modules } = self.pythons(host)?;
            let half = tempfile::tempdir_in(dir())?;
            let loader = fs::read_dir(&libraries)?
                .filter_map(|entry| Some(entry.ok()?.path()))
                .find(|path| {
                    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("ld-linux"))
                })
                .with_context(|| format!("no dynamic linker in {}", libraries.display()))?;
            for (python, modules) in programs.iter().zip(&modules) {
                // By the libraries of the packages, not by those of this machine, which may be older.
                let mut command = Command::new(&loader);
                command.arg("--library-path").arg(&libraries).arg(python).args(["-S", "-c", COMPILE]);
                command.args([program, modules, half.path()]);
                execute(
                    command.env("PYTHONHOME", modules.parent().and_then(Path::parent).unwrap_or(modules)),
                )?;
            }
            fs::rename(half.keep(), &to).with_context(|| to.display().to_string())?;
        }
        Ok(to)
    }

    /// Rust's library for a machine that is not this one, for the compiler of the package rustc-web: a sysroot.
    pub fn sysroot(&mut self, arch: Arch) -> anyhow::Result<PathBuf> {
        let version = output("dpkg-query", &["-W", "-f", "${Version}", "rustc-web"])
            .context("the package rustc-web is not installed; run `cargo xtask setup`")?;
        let to = dir().join(format!("sysroot-{}-{version}", arch.name()));
        if !to.is_dir() {
            self.unpack(&[format!("libstd-rust-web-dev:{}={version}", arch.name())], &to)?;
        }
        Ok(to.join("usr"))
    }

    /// Unpacks packages into a directory that is there only once it is whole.
    fn unpack(&mut self, packages: &[String], to: &Path) -> anyhow::Result<()> {
        let parent = to.parent().context("a directory in target/vm")?;
        fs::create_dir_all(parent)?;
        let half = tempfile::tempdir_in(parent)?;
        for package in packages {
            let deb = self.download(package)?;
            execute(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(half.path()))?;
            fs::remove_file(&deb).with_context(|| deb.display().to_string())?;
        }
        fs::rename(half.keep(), to).with_context(|| to.display().to_string())
    }

    fn download(&mut self, package: &str) -> anyhow::Result<PathBuf> {
        self.update()?;
        let folder = dir().join("apt/downloads");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder)?;
        eprintln!("fetching {package}");
        execute(apt().current_dir(&folder).args(["download", package]))?;
        let mut files = fs::read_dir(&folder)?.filter_map(|entry| Some(entry.ok()?.path()));
        files.next().with_context(|| format!("apt-get left no file of {package}"))
    }

    fn update(&mut self) -> anyhow::Result<()> {
        if self.updated {
            return Ok(());
        }
        if !Path::new(KEYRING).is_file() {
            bail!("no {KEYRING}, which Debian's packages are checked with: install debian-archive-keyring");
        }
        let apt_dir = dir().join("apt");
        for folder in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(apt_dir.join(folder))?;
        }
        // As if nothing were installed.
        fs::write(apt_dir.join("status"), "")?;
        fs::write(apt_dir.join("sources.list"), sources()?)?;
        eprintln!("fetching the lists of Debian's packages");
        execute(apt().arg("update"))?;
        self.updated = true;
        Ok(())
    }
}

/// The releases that have the kernels, and those of the host, from the archives that the host uses.
fn sources() -> anyhow::Result<String> {
    let format = "$(LABEL) $(CODENAME) $(REPO_URI)";
    let targets = output("apt-get", &["indextargets", "--format", format, "Created-By: Packages"]);
    let targets = targets.unwrap_or_default();
    let mut places = BTreeSet::new();
    for line in targets.lines() {
        let [label @ ("Debian" | "Debian-Security"), codename, uri] = line.split(' ').collect::<Vec<_>>()[..]
        else {
            continue;
        };
        places.insert((uri, codename));
        if label == "Debian" {
            places.extend(RELEASES.map(|(_, suite)| (uri, suite)));
        }
    }
    if places.is_empty() {
        return Err(NoArchive.into());
    }
    let line = |(uri, suite)| format!("deb [arch=amd64,arm64 signed-by={KEYRING}] {uri} {suite} main\n");
    Ok(places.into_iter().map(line).collect())
}

/// apt-get with a state of its own.
fn apt() -> Command {
    let apt_dir = dir().join("apt");
    let mut command = Command::new("apt-get");
    let options = [
        ("Dir::State", apt_dir.clone()),
        ("Dir::State::lists", apt_dir.join("lists")),
        ("Dir::State::status", apt_dir.join("status")),
        ("Dir::Cache", apt_dir.join("cache")),
        ("Dir::Etc::sourcelist", apt_dir.join("sources.list")),
    ];
    for (name, path) in options {
        command.arg("-o").arg(format!("{name}={}", path.display()));
    }
    // Images of containers often switch these caches off; without, each call reads all lists again.
    let plain = [
        "Dir::Etc::sourceparts=-",
        "Dir::Cache::pkgcache=pkgcache.bin",
        "Dir::Cache::srcpkgcache=srcpkgcache.bin",
        "APT::Architectures::=amd64",
        "APT::Architectures::=arm64",
        "Acquire::Languages=none",
        // apt's own user may not write below the repository.
        "APT::Sandbox::User=root",
        "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false",
        "Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false",
    ];
    for option in plain {
        command.args(["-o", option]);
    }
    command.arg("-qq");
    command
}
