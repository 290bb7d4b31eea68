//! `cargo xtask demo`: the main job, from outside, on a program that knows nothing of it.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use crate::{
    bed,
    command::{cargo, root, run},
    ebpf, setup, sim,
};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Version of torch_npu
    #[arg(default_value = bed::DEFAULT_VERSION)]
    version: String,
    /// Seconds to trace
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Without the real wheels: the native workload
    #[arg(long)]
    native: bool,
}

/// The options of its training loop.
pub const ENDLESS: [&str; 6] = ["--steps", "0", "--stop-file", "/nonexistent", "--step-ms", "250"];

/// The program that is traced. It is ended when dropped.
struct Target(Child);

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn demo(args: &Args) -> anyhow::Result<()> {
    setup::ensure()?;
    ebpf::build()?;
    run(cargo().args(["build", "--quiet", "--package", "memscope-user"]))?;
    let tracer = root().join("target/debug/memscope-trace");
    let dir = root().join("target/demo");
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir)?;
    let truth = dir.join("truth.jsonl");
    let (mut target, torch) = start(args, &truth)?;
    wait_for_step(&truth, &mut target.0, 3)?;

    let pid = target.0.id().to_string();
    let report = dir.join("report.json");
    eprintln!("\nThe program runs as process {pid}. Now, from another terminal so to speak:");
    run(Command::new(&tracer)
        .args(["-p", &pid, "-d", &args.seconds.to_string()])
        .arg("-o")
        .arg(dir.join("memscopeDumpResults"))
        .arg("--report")
        .arg(&report)
        .env("NO_COLOR", "1"))?;
    ensure!(target.0.try_wait()?.is_none(), "the program has ended: it was to run on, untouched");
    drop(target);
    check(&truth, &report, torch)
}

/// Starts the training loop, or the native workload where there are no wheels.
fn start(args: &Args, truth: &Path) -> anyhow::Result<(Target, bool)> {
    if !args.native {
        match bed::ensure(&args.version, None) {
            Ok(bed) => {
                let program = root().join("tests/workloads/torch/train_leak.py");
                eprintln!(
                    "\nA training loop on the unmodified torch_npu {} wheel, which leaks somewhere:",
                    args.version
                );
                let mut command = Command::new(&bed.run);
                command.arg("python").arg(program).arg("--truth").arg(truth);
                command.args(ENDLESS);
                return Ok((Target(spawn(command)?), true));
            }
            Err(e @ bed::Error::NoWheels { .. }) => eprintln!("{e}\nThe native workload stands in."),
            Err(e) => return Err(e.into()),
        }
    }
    let sim = sim::ensure(sim::Layout::V9, None, None)?;
    let mut command = Command::new(sim.workload);
    command.arg("--truth").arg(truth).args(["leak", "--marks", "--steps", "100000", "--step-ms", "250"]);
    Ok((Target(spawn(command)?), false))
}

fn spawn(mut command: Command) -> anyhow::Result<Child> {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let shown: Vec<_> = words.map(|word| word.to_string_lossy().into_owned()).collect();
    eprintln!("$ {} &", shown.join(" "));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().with_context(|| format!("can not start {}", shown.join(" ")))
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn wait_for_step(truth: &Path, target: &mut Child, step: u64) -> anyhow::Result<()> {
    for _ in 0..6000 {
        if lines(truth).iter().any(|line| line["step"].as_u64().is_some_and(|s| s >= step)) {
            return Ok(());
        }
        if let Some(status) = target.try_wait()? {
            bail!("the program ended at once: {status}");
        }
        thread::sleep(Duration::from_millis(20));
    }
    bail!("the program did not come to step {step} in two minutes")
}

/// The report against what the program wrote down of its own leaks.
fn check(truth: &Path, report: &PathBuf, torch: bool) -> anyhow::Result<()> {
    let lines = lines(truth);
    let told = |event: &str| -> BTreeSet<u64> {
        lines.iter().filter(|line| line["event"] == event).filter_map(|line| line["ptr"].as_u64()).collect()
    };
    let report: Value = serde_json::from_slice(&fs::read(report)?)?;
    let device = report["devices"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|device| device["device"] == 0)
        .context("the report has no device 0")?;
    let blocks = |list: &str, pattern: Option<&str>| -> BTreeSet<u64> {
        let all = device[list].as_array().into_iter().flatten();
        let wanted = all.filter(|block| pattern.is_none_or(|pattern| block["pattern"] == pattern));
        wanted
            .filter_map(|block| u64::from_str_radix(block["ptr"].as_str()?.strip_prefix("0x")?, 16).ok())
            .collect()
    };
    let leaked = told("leak");
    let found = blocks("leaks", None);
    let recurring = blocks("leaks", Some("recurring"));
    let wrong: Vec<_> = recurring.difference(&leaked).collect();
    ensure!(wrong.is_empty(), "reported as leaks and none: {wrong:x?}");
    ensure!(recurring.len() >= 3, "only {} leaked blocks were found", recurring.len());

    // What the program leaked while it was traced, from the second whole step on to the last that can be judged.
    let steps = report["steps"].as_array().context("no steps")?;
    ensure!(steps.len() >= 5, "only {} whole steps were seen", steps.len());
    let judged = |at: &Value| at["end_ns"].as_u64();
    let bounds =
        (steps[1]["begin_ns"].as_u64(), steps[..steps.len() - 1].iter().filter_map(judged).next_back());
    let (Some(from), Some(to)) = bounds else { bail!("the steps have no times") };
    let offset = wall_minus_monotonic();
    let not_judged = blocks("not_judged", None);
    let missed: Vec<u64> = lines
        .iter()
        .filter(|line| line["event"] == "leak")
        .filter(|line| {
            let wall = line["ns"].as_i64().map_or(0, |ns| (ns + offset) as u64);
            wall > from && wall < to
        })
        .filter_map(|line| line["ptr"].as_u64())
        .filter(|ptr| !found.contains(ptr) && !not_judged.contains(ptr))
        .collect();
    ensure!(missed.is_empty(), "leaked and not reported: {missed:x?}");
    println!(
        "\nChecked against the program's own account: {} leaked blocks named, none missed, none too many{}.",
        found.intersection(&leaked).count(),
        if torch { ", on the real torch_npu wheel" } else { "" }
    );
    Ok(())
}

fn wall_minus_monotonic() -> i64 {
    let wall =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos() as i64);
    // The programs' times are CLOCK_MONOTONIC, which on Linux is what /proc/uptime counts, less suspends.
    let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
    let seconds: f64 = uptime.split(' ').next().and_then(|s| s.parse().ok()).unwrap_or(0.0);
    wall - (seconds * 1e9) as i64
}
