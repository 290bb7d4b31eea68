//! What a guest boots: an initramfs with the tracer, the tests and what they need, all of it in memory.

use std::{
    collections::HashMap,
    env, fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail};
use serde::Deserialize;

use super::{
    Arch, LAYOUTS,
    packages::{Packages, dir},
};
use crate::{
    command::{cargo, output, root, run},
    sim::{self, execute},
};

/// What a guest is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tests {
    All,
    Matching(Vec<String>),
    Shell,
}

/// The test programs that a guest runs, in this order: the last one restricts the kernel for good.
const TESTS: [&str; 4] = ["native", "native_stacks", "stacks", "restricted"];
const TRACER: &str = "memscope-trace";

const INIT: &str = include_str!("init.sh");

/// Builds everything for a machine and packs it; the file that the kernel unpacks.
pub fn build(arch: Arch, packages: &mut Packages, tests: &Tests) -> anyhow::Result<PathBuf> {
    let compiler = Compiler::find(arch, packages)?;
    let programs = compiler.programs(tests)?;
    let built = |name| programs.get(name).with_context(|| format!("cargo built no {name}"));

    fs::create_dir_all(dir())?;
    let tree = Tree { arch, dir: tempfile::tempdir_in(dir())? };
    for folder in ["bin", "lib", "proc", "sys", "dev", "tmp", "etc", "usr/bin", "usr/lib", "memscope/deps"] {
        fs::create_dir_all(tree.path(folder))?;
    }
    symlink("lib", tree.path("lib64"))?;
    fs::copy(packages.busybox(arch)?, tree.path("bin/busybox"))?;
    fs::write(tree.path("init"), INIT)?;
    fs::set_permissions(tree.path("init"), fs::Permissions::from_mode(0o755))?;
    let pythons = packages.pythons(arch)?;
    tree.copy(&pythons.programs, "usr/bin")?;
    tree.copy(&pythons.modules, "usr/lib")?;
    tree.copy(&libraries(&pythons.libraries)?, "lib")?;
    let workloads = root().join("tests/workloads/python");
    tree.copy_all(&packages.compiled(&workloads.join("stacks.py"))?, "usr/lib")?;
    fs::create_dir_all(tree.path(&workloads))?;
    tree.copy_all(&workloads, &workloads)?;
    tree.strip(built(TRACER)?, &Path::new("memscope").join(TRACER))?;
    for (n, name) in TESTS.into_iter().enumerate() {
        tree.strip(built(name)?, &Path::new("memscope/deps").join(format!("{n}-{name}")))?;
    }
    for layout in LAYOUTS {
        let built = compiler.sim(layout)?;
        // Where the tests look for it, by the path that was compiled into them.
        let place = root().join("target/sim").join(layout.name());
        tree.strip(&built.workload, &place.join("native-workload"))?;
        for entry in fs::read_dir(&built.lib64)? {
            let file = entry?.path();
            if file.extension().is_some_and(|extension| extension == "so") {
                tree.strip(&file, &place.join("lib64").join(file.file_name().unwrap_or_default()))?;
            }
        }
    }
    tree.pack()
}

/// The root of a guest while it is put together.
struct Tree {
    arch: Arch,
    dir: tempfile::TempDir,
}

impl Tree {
    fn path(&self, inside: impl AsRef<Path>) -> PathBuf {
        let inside = inside.as_ref();
        self.dir.path().join(inside.strip_prefix("/").unwrap_or(inside))
    }

    /// Copies files and directories into a directory.
    fn copy(&self, from: &[PathBuf], to: impl AsRef<Path>) -> anyhow::Result<()> {
        execute(Command::new("cp").arg("-a").args(from).arg(self.path(to)))?;
        Ok(())
    }

    /// Copies all that is in a directory into another.
    fn copy_all(&self, from: &Path, to: impl AsRef<Path>) -> anyhow::Result<()> {
        self.copy(&[from.join(".")], to)
    }

    /// Copies a program without its debug information, which is most of it.
    fn strip(&self, from: &Path, to: &Path) -> anyhow::Result<()> {
        let to = self.path(to);
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent)?;
        }
        let strip = format!("{}-strip", self.arch.tools());
        let status = Command::new(&strip).arg("--strip-debug").arg("-o").arg(&to).arg(from).status();
        if !status.with_context(|| format!("can not start {strip}"))?.success() {
            bail!("{strip} can not copy {}", from.display());
        }
        Ok(())
    }

    /// Not compressed: unpacking would take an emulated machine longer than reading.
    fn pack(&self) -> anyhow::Result<PathBuf> {
        let archive = dir().join(format!("{}.cpio", self.arch.name()));
        let pack = r#"find . | cpio --quiet -o -H newc > "$0""#;
        run(Command::new("sh").current_dir(self.dir.path()).arg("-c").arg(pack).arg(&archive))?;
        Ok(archive)
    }
}

/// The files of a directory, and not what is in directories below.
fn libraries(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).with_context(|| dir.display().to_string())?;
    Ok(entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| !path.is_dir()).collect())
}

/// How programs for a machine are built.
struct Compiler {
    arch: Arch,
    environment: Vec<(String, String)>,
}

impl Compiler {
    fn find(arch: Arch, packages: &mut Packages) -> anyhow::Result<Self> {
        let mut environment = Vec::new();
        if !arch.is_host() {
            let variable = |what: &str| {
                format!("CARGO_TARGET_{}_{what}", arch.triple().to_uppercase().replace('-', "_"))
            };
            environment.push((variable("LINKER"), format!("{}-gcc", arch.tools())));
            // What is stripped anyway takes time to make.
            environment.push((String::from("CARGO_PROFILE_DEV_DEBUG"), String::from("false")));
            let installed = output("rustc", &["--print", "target-libdir", "--target", arch.triple()])
                .is_some_and(|dir| Path::new(dir.trim()).is_dir());
            if !installed {
                let sysroot = packages.sysroot(arch)?;
                environment.push((String::from("RUSTC"), String::from(crate::setup::DEBIAN_RUSTC)));
                environment.push((variable("RUSTFLAGS"), format!("--sysroot={}", sysroot.display())));
            }
        }
        Ok(Self { arch, environment })
    }

    fn target(&self) -> Vec<&'static str> {
        if self.arch.is_host() { Vec::new() } else { vec!["--target", self.arch.triple()] }
    }

    /// Builds the tracer and the tests; what was built, by name.
    fn programs(&self, tests: &Tests) -> anyhow::Result<HashMap<String, PathBuf>> {
        let mut programs = if self.arch.is_host() {
            // As `cargo xtask test` has built them: of fewer packages, cargo would build with fewer features.
            self.build(&["test", "--no-run", "--workspace"])?
        } else {
            let tests = TESTS.iter().flat_map(|name| ["--test", name]);
            let arguments: Vec<_> =
                ["test", "--no-run", "--package", "memscope-e2e"].into_iter().chain(tests).collect();
            self.build(&arguments)?
        };
        // An emulated machine takes longer for all the tests than the compiler for its optimisations.
        if *tests == Tests::All || !programs.contains_key(TRACER) {
            programs.extend(self.build(&[
                "build",
                "--release",
                "--package",
                "memscope-user",
                "--bin",
                TRACER,
            ])?);
        }
        Ok(programs)
    }

    /// Runs cargo; the programs and integration tests that it built.
    fn build(&self, arguments: &[&str]) -> anyhow::Result<HashMap<String, PathBuf>> {
        #[derive(Deserialize)]
        struct Message {
            executable: PathBuf,
            target: Target,
            profile: Profile,
        }
        #[derive(Deserialize)]
        struct Target {
            name: String,
            kind: Vec<String>,
        }
        #[derive(Deserialize)]
        struct Profile {
            test: bool,
        }
        let mut command = cargo();
        command.args(arguments).args(self.target()).envs(self.environment.iter().cloned());
        command.args(["--quiet", "--message-format=json-render-diagnostics"]);
        eprintln!("$ cargo {} for {}", arguments.join(" "), self.arch.name());
        let output =
            command.stderr(std::process::Stdio::inherit()).output().context("can not start cargo")?;
        if !output.status.success() {
            bail!("cargo {} for {} failed", arguments.join(" "), self.arch.name());
        }
        // A program's own unit tests have its name, too.
        let is_wanted =
            |message: &Message| message.profile.test == message.target.kind.iter().any(|k| k == "test");
        Ok(String::from_utf8_lossy(&output.stdout)
            .lines()
            .filter_map(|line| serde_json::from_str::<Message>(line).ok())
            .filter(is_wanted)
            .map(|message| (message.target.name, message.executable))
            .collect())
    }

    /// The simulated CANN and the workload.
    fn sim(&self, layout: sim::Layout) -> anyhow::Result<sim::Sim> {
        if self.arch.is_host() {
            return Ok(sim::ensure(layout, None, None)?);
        }
        // A process of its own, because it takes its compiler from the environment.
        let mut command = Command::new(env::current_exe()?);
        command.args(["sim", "--json", "--layout", layout.name()]).args(self.target());
        let output = command
            .envs(self.environment.iter().cloned())
            .stderr(std::process::Stdio::inherit())
            .output()
            .context("can not start xtask again")?;
        if !output.status.success() {
            bail!("the simulated CANN was not built for {}", self.arch.name());
        }
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}
