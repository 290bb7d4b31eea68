//! `cargo xtask test`: everything that must hold, from a clean checkout on.

use std::{panic::resume_unwind, process::Command, thread};

use crate::{
    bed,
    command::{cargo, root, run},
    ebpf, setup, sim, vm,
};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Only the tests, without formatting and lints
    #[arg(long)]
    only_tests: bool,
    /// Without the real wheels: the native workload only
    #[arg(long)]
    no_wheels: bool,
    /// Without the oldest and the newest kernel in QEMU: this kernel only (`cargo xtask vm` runs all tests on all)
    #[arg(long)]
    no_kernels: bool,
    /// Run only tests whose name contains this
    filter: Option<String>,
}

/// torch_npu of the 8.x layout of CANN, and of the 9.x layout.
pub const BEDS: [&str; 2] = ["2.7.1", "2.14.0"];

const PY_SPY: &str = "py-spy==0.4.3";

pub fn test(args: &Args) -> anyhow::Result<()> {
    setup::ensure()?;
    // Unpacking the wheels takes as long as compiling, and neither keeps all CPUs busy.
    let grounds = thread::scope(|scope| {
        let grounds = scope.spawn(|| grounds(!args.no_wheels));
        compile(args)?;
        grounds.join().unwrap_or_else(|panic| resume_unwind(panic))
    })?;
    let mut command = tests(args);
    run(command.env("MEMSCOPE_REQUIRE", grounds.join(",")))?;
    if args.no_kernels || args.filter.is_some() {
        return Ok(());
    }
    match vm::run(&vm::Args::smoke()) {
        Err(e) if e.is::<vm::NoArchive>() => eprintln!("tests on other kernels are left out: {e}"),
        outcome => outcome?,
    }
    Ok(())
}

fn compile(args: &Args) -> anyhow::Result<()> {
    ebpf::build()?;
    if !args.only_tests {
        run(cargo().args(["fmt", "--all", "--check"]))?;
        run(cargo().args(["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    }
    run(tests(args).arg("--no-run"))
}

/// What the end-to-end tests run on.
fn grounds(with_wheels: bool) -> anyhow::Result<Vec<String>> {
    let mut grounds = Vec::new();
    for layout in [sim::Layout::V8, sim::Layout::V9] {
        sim::ensure(layout, None, None)?;
        grounds.push(format!("native:{}", layout.name()));
    }
    for version in BEDS.into_iter().filter(|_| with_wheels) {
        match bed::ensure(version, None) {
            Ok(_) => grounds.push(format!("torch:{version}")),
            Err(e @ bed::Error::NoWheels { .. }) => {
                eprintln!("tests on torch {version} are left out: {e}")
            }
            Err(e) => return Err(e.into()),
        }
    }
    match py_spy() {
        Ok(()) => grounds.push(String::from("py-spy")),
        Err(e) => eprintln!("the comparison with py-spy is left out: {e}"),
    }
    Ok(grounds)
}

/// Installs py-spy from PyPI where the test looks for it.
fn py_spy() -> Result<(), sim::Error> {
    let place = root().join("target/py-spy");
    if place.join("bin/py-spy").is_file() {
        return Ok(());
    }
    sim::execute(Command::new("python3").args(["-m", "venv"]).arg(&place))?;
    let mut pip = Command::new(place.join("bin/python"));
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--retries", "1", "--only-binary", ":all:"]);
    sim::execute(pip.arg(PY_SPY)).map(|_| ())
}

/// One command for all of them: packages are compiled side by side. It also builds the tool, which the end-to-end tests
/// run.
fn tests(args: &Args) -> Command {
    let mut command = cargo();
    command.args(["test", "--quiet", "--workspace"]).args(&args.filter);
    command
}
