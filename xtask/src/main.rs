//! Development tasks: `cargo xtask TASK`.

mod bed;
mod command;
mod ebpf;
mod setup;
mod sim;

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
    }
}
