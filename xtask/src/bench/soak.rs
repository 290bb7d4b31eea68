//! A long trace of a host on which processes come and go, mark, run out of memory and are killed: the tracer stays as it
//! was.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use serde_json::Value;

use super::{interrupt, tracer};
use crate::sim::Sim;

/// Processes at a time besides the one that stays.
const AT_ONCE: usize = 2;
/// What the tracer may keep of each process that has ended: what the report says of it.
const KIB_OF_PROCESS: f64 = 24.0;

/// What the tracer holds.
#[derive(Clone, Copy)]
struct Footprint {
    kib: f64,
    files: usize,
}

pub fn soak(minutes: f64, sim: &Sim) -> anyhow::Result<()> {
    let dir = tempfile::tempdir_in(crate::command::root().join("target"))?;
    let (report, over) = (dir.path().join("report.json"), dir.path().join("over"));
    let mut stays = Command::new(&sim.workload);
    stays.arg("--truth").arg(dir.path().join("stays")).arg("--until-file").arg(&over);
    let mut stays = quiet(stays.args(["verify", "500"])).spawn()?;
    let mut tracer = quiet(
        Command::new(tracer())
            .args(["-a", "--format", "capture", "--max-size", "16M", "-o"])
            .arg(dir.path().join("dump"))
            .arg("--report")
            .arg(&report),
    )
    .spawn()?;
    thread::sleep(Duration::from_secs(2));
    let length = Duration::from_secs_f64(minutes * 60.0);
    let outcome = churn(sim, dir.path(), tracer.id(), length);
    interrupt(&tracer);
    let status = tracer.wait()?;
    fs::write(&over, "")?;
    let survived = stays.wait()?;
    let samples = outcome?;
    ensure!(status.success(), "the tracer failed: {status}");
    ensure!(survived.success(), "the program that checks its own work failed: {survived}");

    let report: Value = serde_json::from_slice(&fs::read(&report)?)?;
    let count = |value: &Value| value.as_array().map_or(0, Vec::len);
    let lost = report["events"]["lost"].as_u64().context("no events")?;
    println!(
        "\n{minutes} minutes: {} events, {lost} lost; {} processes traced, {} notes, {} out of memory",
        report["events"]["received"],
        count(&report["targets"]),
        count(&report["notes"]),
        report["devices"].as_array().into_iter().flatten().map(|device| count(&device["oom"])).sum::<usize>()
    );
    for note in report["notes"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if !note.contains("was killed by")
            && !note.contains("ended with exit code")
            && !note.contains("ran for up to")
        {
            println!("  {note}");
        }
    }
    // The first quarter fills what is bounded.
    let (early, last) = (samples[samples.len() / 4], samples[samples.len() - 1]);
    let each = (last.1.kib - early.1.kib) / (last.0 - early.0).max(1) as f64;
    println!(
        "{each:.1} KiB stay of each process that has ended; descriptors {} then {}",
        early.1.files, last.1.files
    );
    ensure!(lost == 0, "events were lost");
    ensure!(each < KIB_OF_PROCESS, "memory grows by {each:.1} KiB with each process");
    ensure!(last.1.files < early.1.files + 30, "descriptors pile up");
    Ok(())
}

/// Starts processes until the time is over; how many there had been, and what the tracer held, now and then.
fn churn(sim: &Sim, dir: &Path, tracer: u32, length: Duration) -> anyhow::Result<Vec<(usize, Footprint)>> {
    println!("\n| minute | processes | MiB of the tracer | descriptors |");
    println!("|---|---|---|---|");
    let (begin, mut running, mut started) = (Instant::now(), Vec::<Child>::new(), 0);
    let (mut samples, every) = (Vec::new(), length / 20);
    while begin.elapsed() < length {
        if begin.elapsed() >= every * samples.len() as u32 {
            let held = footprint(tracer)?;
            samples.push((started, held));
            let minute = begin.elapsed().as_secs_f64() / 60.0;
            println!("| {minute:.1} | {started} | {:.1} | {} |", held.kib / 1024.0, held.files);
        }
        if running.len() < AT_ONCE {
            running.push(quiet(&mut process(sim, dir, started)).spawn()?);
            started += 1;
        }
        running.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        thread::sleep(Duration::from_millis(5));
    }
    for mut child in running {
        child.wait()?;
    }
    // What is held back of processes without steps.
    thread::sleep(Duration::from_secs(12));
    samples.push((started, footprint(tracer)?));
    Ok(samples)
}

fn process(sim: &Sim, dir: &Path, index: usize) -> Command {
    let scene: &[&str] = match index % 7 {
        0 => &["leak", "--steps", "20", "--marks", "--step-ms", "5"],
        1 => &["--end", "exit", "oom", "--size", "67108864"],
        2 => &["--end", "kill", "pairs", "2000"],
        3 => &["mindspore"],
        4 => &["kernel", "300"],
        5 => &["threads", "4", "500", "--handoff"],
        _ => &["two-devices"],
    };
    let mut command = Command::new(&sim.workload);
    command
        .arg("--truth")
        .arg(dir.join("truth"))
        .args(scene)
        .env("SIM_CANN_HBM_BYTES", (1u64 << 30).to_string());
    command
}

fn quiet(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null())
}

fn footprint(pid: u32) -> anyhow::Result<Footprint> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).context("the tracer has ended")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kib = line.trim().trim_end_matches(" kB").parse()?;
    Ok(Footprint { kib, files: fs::read_dir(format!("/proc/{pid}/fd"))?.count() })
}
