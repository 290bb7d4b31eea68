//! Development tasks: `cargo xtask TASK`.

mod bed;
mod bench;
mod command;
mod demo;
mod ebpf;
mod fuzz;
mod setup;
mod sim;
mod test;
mod vm;

use clap::Parser;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Development tasks of memscope-trace")]
enum Task {
    /// Install what building and testing need (Debian, Ubuntu; as root), or say how
    Setup,
    /// Build the BPF programs for x86_64 and aarch64
    BuildEbpf,
    /// Build the simulated CANN and the native workload
    Sim(sim::Args),
    /// Make a test bed: the real torch and torch_npu on the simulated CANN
    Bed(bed::Args),
    /// Trace a leaking training loop on the real wheels, and check what the report says of it
    Demo(demo::Args),
    /// Everything that must hold: formatting, lints, unit and end-to-end tests
    Test(test::Args),
    /// Boot old and new kernels in QEMU and run the end-to-end tests of the native workload in each
    Vm(vm::Args),
    /// Measure what tracing costs
    Bench(bench::Args),
    /// Damage what readers read, and see that they bear it
    Fuzz(fuzz::Args),
}

fn main() -> anyhow::Result<()> {
    match Task::parse() {
        Task::Setup => setup::ensure(),
        Task::BuildEbpf => {
            setup::ensure()?;
            ebpf::build()
        }
        Task::Sim(args) => sim::run(&args),
        Task::Bed(args) => bed::run(&args),
        Task::Demo(args) => demo::demo(&args),
        Task::Test(args) => test::test(&args),
        Task::Vm(args) => vm::run(&args),
        Task::Bench(args) => bench::bench(&args),
        Task::Fuzz(args) => fuzz::fuzz(&args),
    }
}
