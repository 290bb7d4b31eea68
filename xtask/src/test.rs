//! `cargo xtask test`: everything that must hold, from a clean checkout on.

use std::process::Command;

use crate::{
    bed,
    command::{cargo, run},
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

pub fn test(args: &Args) -> anyhow::Result<()> {
    setup::ensure()?;
    ebpf::build()?;
    if !args.only_tests {
        run(cargo().args(["fmt", "--all", "--check"]))?;
        run(cargo().args(["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    }
    // The end-to-end tests run the binary: they do not build it themselves.
    run(cargo().args(["build", "--quiet", "--package", "memscope-user"]))?;
    let mut grounds = Vec::new();
    for layout in [sim::Layout::V8, sim::Layout::V9] {
        sim::ensure(layout, None, None)?;
        grounds.push(format!("native:{}", layout.name()));
    }
    if !args.no_wheels {
        for version in BEDS {
            match bed::ensure(version, None) {
                Ok(_) => grounds.push(format!("torch:{version}")),
                Err(e @ bed::Error::NoWheels { .. }) => {
                    eprintln!("tests on torch {version} are left out: {e}")
                }
                Err(e) => return Err(e.into()),
            }
        }
    }
    run(&mut tests(args, &["--workspace", "--exclude", "memscope-e2e"]))?;
    let mut end_to_end = tests(args, &["--package", "memscope-e2e"]);
    run(end_to_end.env("MEMSCOPE_REQUIRE", grounds.join(",")))?;
    if args.no_kernels || args.filter.is_some() {
        return Ok(());
    }
    match vm::run(&vm::Args::smoke()) {
        Err(e) if e.is::<vm::NoArchive>() => eprintln!("tests on other kernels are left out: {e}"),
        outcome => outcome?,
    }
    Ok(())
}

fn tests(args: &Args, which: &[&str]) -> Command {
    let mut command = cargo();
    command.args(["test", "--quiet"]).args(which).args(&args.filter);
    command
}
