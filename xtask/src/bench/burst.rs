//! As many events as the cores can make, for a minute, while the collector has to share them.

use std::time::Instant;

use anyhow::{Context, ensure};

use super::native::{Held, wait_with_cpu};
use crate::sim::Sim;

pub fn bench(seconds: u64, sim: &Sim) -> anyhow::Result<()> {
    let threads = std::thread::available_parallelism()?.to_string();
    println!(
        "\n| {threads} threads that do nothing but allocate and free, {seconds} s | million events | a second | lost | cores of the collector |"
    );
    println!("|---|---|---|---|---|");
    let mut lost_total = 0;
    for (what, words) in [
        ("no dump", &["--no-dump"][..]),
        ("capture of 1 GiB at most", &["--format", "capture", "--max-size", "1G"]),
    ] {
        let mut held =
            Held::start(sim, &["--loop-seconds", &seconds.to_string(), "threads", &threads, "100000"])?;
        let mut tracer = held.trace(words)?;
        let begin = Instant::now();
        held.play()?;
        let took = begin.elapsed().as_secs_f64();
        let (status, cpu) = wait_with_cpu(&mut tracer)?;
        ensure!(status.success(), "the tracer failed: {status}");
        let report = held.report()?;
        let events = |name: &str| report["events"][name].as_f64().context("no events");
        let (received, lost) = (events("received")?, events("lost")?);
        println!(
            "| {what} | {:.1} | {:.2} | {lost:.0} | {:.2} |",
            received / 1e6,
            received / took / 1e6,
            cpu / took
        );
        for note in report["notes"].as_array().into_iter().flatten() {
            println!("\n  note: {note}");
        }
        lost_total += lost as u64;
    }
    ensure!(lost_total == 0, "events were lost with the default ring: {lost_total}");
    Ok(())
}
