//! The collector: records a second of one core, bytes for each live block, CPU for each million events.

use std::process::{Command, Stdio};

use anyhow::{Context, ensure};

use super::{
    native::{Held, wait_with_cpu},
    tracer, wait_for,
};
use crate::{
    bed,
    command::{cargo, root, run},
    sim::Sim,
};

pub fn bench(sim: &Sim) -> anyhow::Result<()> {
    let example = |name: &str| {
        let mut command = cargo();
        command.args(["run", "--quiet", "--release", "--package", "memscope-user", "--example", name]);
        command
    };
    let dir = tempfile::tempdir()?;
    let stream = dir.path().join("stream");
    println!();
    match bed::ensure(bed::DEFAULT_VERSION, None) {
        Ok(bed) => {
            let mut program = Command::new(&bed.run);
            let truth = dir.path().join("truth.jsonl");
            program.arg("python").arg(root().join("tests/workloads/torch/train_leak.py"));
            program.arg("--truth").arg(&truth).args(["--steps", "0"]);
            let mut program = program.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
            let recorded = wait_for(&truth, "mark").and_then(|()| record(program.id(), &stream));
            program.kill()?;
            program.wait()?;
            recorded?;
            println!("Stream: a training loop on the real wheels, ten seconds of it");
        }
        Err(e @ bed::Error::NoWheels { .. }) => {
            let mut held = Held::start(sim, &["leak", "--steps", "2000", "--marks", "--step-ms", "0"])?;
            let stream = stream.to_string_lossy();
            let mut tracer = held.trace(&["--no-dump", "--record", &stream])?;
            held.play()?;
            tracer.wait()?;
            println!("Stream: the native workload ({e})");
        }
        Err(e) => return Err(e.into()),
    }
    run(example("collector_cost").arg("--").arg(&stream))?;
    run(&mut example("ledger_cost"))?;
    println!("\n| what the collector writes | events | seconds of CPU for a million |");
    println!("|---|---|---|");
    for (what, words) in [
        ("nothing", &["--no-dump"][..]),
        ("csv", &["--format", "csv"]),
        ("capture", &["--format", "capture"]),
    ] {
        let mut held = Held::start(sim, &["pairs", "1000000", "--size", "65536"])?;
        let mut tracer = held.trace(words)?;
        held.play()?;
        let (status, seconds) = wait_with_cpu(&mut tracer)?;
        ensure!(status.success(), "the tracer failed: {status}");
        let report = held.report()?;
        let received = report["events"]["received"].as_f64().context("no events")?;
        println!("| {what} | {received:.0} | {:.2} |", seconds / received * 1e6);
    }
    Ok(())
}

fn record(pid: u32, stream: &std::path::Path) -> anyhow::Result<()> {
    let status = Command::new(tracer())
        .args(["-p", &pid.to_string(), "-d", "10", "--no-dump", "--quiet", "--record"])
        .arg(stream)
        .stdout(Stdio::null())
        .status()?;
    ensure!(status.success(), "the tracer failed: {status}");
    Ok(())
}
