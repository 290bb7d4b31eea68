//! `cargo xtask vm`: the end-to-end tests of the native workload on stock Debian kernels, in QEMU.
//!
//! A guest has the files that the tests need at the paths where the tests look for them on the host, so the test
//! program runs there as it does here.

mod guest;
mod machine;
mod packages;
mod support;

use std::{
    fs, iter,
    panic::resume_unwind,
    sync::{Mutex, PoisonError},
    thread,
};

use anyhow::{Context, bail};
use serde::{Deserialize, Deserializer, Serialize, de::Error};

pub use packages::NoArchive;

use crate::{command::root, ebpf, setup, sim};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Kernels to boot: VERSION or VERSION-MACHINE, like 5.10 or 6.12-arm64 [default: all]
    #[arg(value_name = "KERNEL", value_parser = Choice::parse)]
    kernels: Vec<Choice>,
    /// Run only tests whose name contains one of these
    #[arg(long, value_delimiter = ',')]
    filter: Vec<String>,
    /// A shell in the guest instead of the tests
    #[arg(long, conflicts_with = "filter")]
    shell: bool,
}

/// A machine, by Debian's name of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    Amd64,
    Arm64,
}

impl Arch {
    const ALL: [Self; 2] = [Self::Amd64, Self::Arm64];

    pub fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    pub fn triple(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-gnu",
            Self::Arm64 => "aarch64-unknown-linux-gnu",
        }
    }

    /// What names of GNU tools for this machine begin with.
    pub fn tools(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-linux-gnu",
            Self::Arm64 => "aarch64-linux-gnu",
        }
    }

    pub fn is_host(self) -> bool {
        self.triple().starts_with(std::env::consts::ARCH)
    }
}

/// A kernel to test on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(into = "String")]
pub struct Kernel {
    version: &'static str,
    /// The Debian release that has it.
    suite: &'static str,
    arch: Arch,
}

/// Kernel versions by the Debian release that has them.
const RELEASES: [(&str, &str); 3] = [("5.10", "bullseye"), ("6.1", "bookworm"), ("6.12", "trixie")];

impl Kernel {
    fn all() -> impl Iterator<Item = Self> {
        let of = |arch| RELEASES.map(move |(version, suite)| Self { version, suite, arch });
        Arch::ALL.into_iter().flat_map(of)
    }

    pub fn name(self) -> String {
        format!("{}-{}", self.version, self.arch.name())
    }
}

impl From<Kernel> for String {
    fn from(kernel: Kernel) -> Self {
        kernel.name()
    }
}

impl<'de> Deserialize<'de> for Kernel {
    fn deserialize<D: Deserializer<'de>>(name: D) -> Result<Self, D::Error> {
        let name = String::deserialize(name)?;
        let known = Self::all().find(|kernel| kernel.name() == name);
        known.ok_or_else(|| D::Error::custom(format!("no such kernel: {name}")))
    }
}

/// Kernels as the command line names them.
#[derive(Debug, Clone)]
pub struct Choice(Vec<Kernel>);

impl Choice {
    fn parse(word: &str) -> Result<Self, String> {
        let chosen: Vec<_> = Kernel::all().filter(|k| k.version == word || k.name() == word).collect();
        if chosen.is_empty() {
            let names: Vec<_> = Kernel::all().map(Kernel::name).collect();
            return Err(format!("no such kernel; there are {}", names.join(", ")));
        }
        Ok(Self(chosen))
    }
}

impl Args {
    /// What must hold on other kernels before anything else, on those of this machine that differ most in what they
    /// can do: some minutes. All tests on all kernels take an hour.
    pub fn smoke() -> Self {
        let [(oldest, _), .., (newest, _)] = RELEASES;
        let kernels = Kernel::all()
            .filter(|kernel| kernel.arch.is_host())
            .filter(|kernel| kernel.version == oldest || kernel.version == newest);
        let filter = [
            "leaks_on_the_9x",
            "leaks_are_named",
            "losses_",
            "nothing_is_left",
            "the_kernel_takes",
            "what_the_interpreter_says",
        ]
        .map(str::to_owned);
        Self { kernels: vec![Choice(kernels.collect())], filter: filter.into(), shell: false }
    }
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let asked = |kernel: &Kernel| args.kernels.iter().any(|choice| choice.0.contains(kernel));
    let kernels: Vec<_> = Kernel::all().filter(|k| args.kernels.is_empty() || asked(k)).collect();
    let tests = match (&args.filter[..], args.shell) {
        (_, true) => guest::Tests::Shell,
        ([_, ..], _) => guest::Tests::Matching(args.filter.clone()),
        _ => guest::Tests::All,
    };
    let reports = boot_all(&kernels, &tests)?;
    if tests == guest::Tests::Shell {
        return Ok(());
    }
    write_support(&reports, &tests)?;
    let failed: Vec<_> = reports.iter().filter(|report| !report.passed()).collect();
    if !failed.is_empty() {
        let told: Vec<_> = failed.iter().map(|report| report.complaint()).collect();
        bail!("{} of {} kernels failed\n{}", failed.len(), reports.len(), told.join("\n"));
    }
    Ok(())
}

/// Keeps what there is to say of kernels, and writes the document once every one has passed: a kernel that failed, or tests
/// that did, are then run again alone.
fn write_support(reports: &[machine::Report], tests: &guest::Tests) -> anyhow::Result<()> {
    let mut news = false;
    for report in reports {
        news |= match tests {
            guest::Tests::All => report.keep().map(|()| true)?,
            _ => report.keep_tests()?,
        };
    }
    if !news {
        return Ok(());
    }
    let kept: Vec<_> = Kernel::all().map(machine::Report::kept).collect::<anyhow::Result<_>>()?;
    let passed = |report: Option<machine::Report>| report.filter(machine::Report::passed);
    match kept.into_iter().map(passed).collect::<Option<Vec<_>>>() {
        Some(kept) => {
            let file = root().join("docs/support.md");
            fs::write(&file, support::document(&kept)).with_context(|| file.display().to_string())?;
            eprintln!("written: {}", file.display());
        }
        None => eprintln!("docs/support.md is not written before all kernels have passed"),
    }
    Ok(())
}

fn boot_all(kernels: &[Kernel], tests: &guest::Tests) -> anyhow::Result<Vec<machine::Report>> {
    setup::ensure()?;
    setup::install(&machine::needs(kernels))?;
    ebpf::build()?;
    let mut packages = packages::Packages::default();
    let mut machines = Vec::new();
    for arch in Arch::ALL {
        let of_arch: Vec<_> = kernels.iter().copied().filter(|kernel| kernel.arch == arch).collect();
        if of_arch.is_empty() {
            continue;
        }
        let system = guest::build(arch, &mut packages, tests)?;
        for kernel in of_arch {
            machines.push((kernel, packages.kernel(kernel)?, system.clone()));
        }
    }
    // Guests wait a lot, for the kernel's grace periods above all, and a second one works meanwhile.
    let waiting = Mutex::new(machines.iter());
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        let boots = iter::from_fn(next);
        boots.map(|(kernel, image, system)| machine::boot(*kernel, image, system, tests)).collect::<Vec<_>>()
    };
    let mut reports = thread::scope(|scope| {
        let side_by_side = if *tests == guest::Tests::Shell { 1 } else { 2 };
        let workers: Vec<_> = (0..side_by_side).map(|_| scope.spawn(work)).collect();
        let done =
            workers.into_iter().map(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic)));
        done.flatten().collect::<anyhow::Result<Vec<_>>>()
    })?;
    reports.sort_by_key(|report| kernels.iter().position(|kernel| *kernel == report.kernel));
    Ok(reports)
}

/// The layouts of CANN that the tests want.
const LAYOUTS: [sim::Layout; 2] = [sim::Layout::V8, sim::Layout::V9];
