//! `cargo xtask bench`: what tracing costs, measured in one run against the same program untraced and with bare
//! probes. Figures are medians; the spread of the untraced rounds is this machine's noise.

mod bpftrace;
mod burst;
mod collector;
mod host;
mod native;
mod offline;
mod soak;

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
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
    /// Rounds of each kind
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Without the real wheels
    #[arg(long)]
    native: bool,
    /// Measure the verbs that read dumps instead, over a dump of so many rows
    #[arg(long, value_name = "ROWS", num_args = 0..=1, default_missing_value = "10000000")]
    offline: Option<u64>,
    /// Let processes come and go for so long instead, and see that the tracer stays as it was
    #[arg(long, value_name = "MINUTES", num_args = 0..=1, default_missing_value = "10")]
    soak: Option<f64>,
    /// Only these parts of the measurement
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Part>,
    /// Seconds of the highest event rate
    #[arg(long, default_value_t = 60)]
    burst_seconds: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Traced against untraced and against bare probes
    Probes,
    /// Against bpftrace
    Bpftrace,
    /// The collector by itself
    Collector,
    /// Attaching, detaching, and what an attached tracer costs without hits
    Host,
    /// The highest event rate
    Burst,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Untraced,
    /// The same sites, with programs that do nothing.
    Bare,
    WithoutStacks,
    Traced,
    /// With the stack of every allocation, however many come.
    EveryStack,
}

pub fn bench(args: &Args) -> anyhow::Result<()> {
    setup::ensure()?;
    ebpf::build()?;
    if let Some(rows) = args.offline {
        return offline::bench(rows);
    }
    run(cargo().args(["build", "--quiet", "--release", "--package", "memscope-user"]))?;
    let sim = sim::ensure(sim::Layout::V9, None, None)?;
    if let Some(minutes) = args.soak {
        return soak::soak(minutes, &sim);
    }
    let wanted = |part| args.only.is_empty() || args.only.contains(&part);
    if wanted(Part::Probes) {
        probes(args, &sim)?;
    }
    if wanted(Part::Bpftrace) {
        bpftrace::bench(args.rounds, &sim)?;
    }
    if wanted(Part::Collector) {
        collector::bench(&sim)?;
    }
    if wanted(Part::Host) {
        host::bench(args.rounds, &sim)?;
    }
    if wanted(Part::Burst) {
        burst::bench(args.burst_seconds, &sim)?;
    }
    Ok(())
}

fn probes(args: &Args, sim: &sim::Sim) -> anyhow::Result<()> {
    println!(
        "\n| measured | untraced | bare probes | without stacks | traced | every stack | traced / bare | traced / untraced | noise |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    compare(args, "aclrtMalloc + aclrtFree, ns a pair", |mode| {
        let mut command = Command::new(&sim.workload);
        command.args(["--wait-stdin", "--wait-initialized", "pairs", "20000"]);
        one(command, mode, &[], "cpu_ns_per_pair", Gate::Stdin)
    })?;
    if args.native {
        return Ok(());
    }
    let bed = match bed::ensure(bed::DEFAULT_VERSION, None) {
        Ok(bed) => bed,
        Err(e @ bed::Error::NoWheels { .. }) => {
            eprintln!("measurements on the real wheels are left out: {e}");
            return Ok(());
        }
        Err(e) => return Err(e.into()),
    };
    let python = |program: &str| {
        let mut command = Command::new(&bed.run);
        command.arg("python").arg(root().join("tests/workloads/torch").join(program));
        command
    };
    compare(args, "torch.empty + del, ns of CPU a pair", |mode| {
        let mut command = python("empty_pairs.py");
        command.args(["--pairs", "100000"]);
        one(command, mode, &[], "cpu_ns_per_pair", Gate::File)
    })?;
    let mut training = Training::start(python("training.py"))?;
    compare(args, "training step, ns of CPU", |mode| training.steps(mode))?;
    drop(training);
    first_event(args, python("train_leak.py"))
}

/// How the program is told to begin.
#[derive(Clone, Copy)]
enum Gate {
    Stdin,
    File,
}

fn compare(
    args: &Args,
    what: &str,
    mut measure: impl FnMut(Mode) -> anyhow::Result<f64>,
) -> anyhow::Result<()> {
    let modes = [Mode::Untraced, Mode::Bare, Mode::WithoutStacks, Mode::Traced, Mode::EveryStack];
    let mut figures = [const { Vec::new() }; 5];
    for _ in 0..args.rounds {
        // By turns, so that a slow spell of the machine falls on all of them.
        for (mode, figures) in modes.iter().zip(&mut figures) {
            figures.push(measure(*mode)?);
        }
    }
    let noise = spread(&figures[0]);
    let [untraced, bare, without, traced, every] = figures.map(median);
    println!(
        "| {what} | {untraced:.0} | {bare:.0} | {without:.0} | {traced:.0} | {every:.0} | {:.2} | {:.2} | ±{:.0} % |",
        traced / bare,
        traced / untraced,
        noise * 100.0
    );
    Ok(())
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// Half the distance of the extremes, relative to their middle.
fn spread(figures: &[f64]) -> f64 {
    let low = figures.iter().copied().fold(f64::INFINITY, f64::min);
    let high = figures.iter().copied().fold(0.0, f64::max);
    (high - low) / (high + low)
}

/// Runs a program once, held until the tracer is attached; a figure of its truth.
fn one(mut command: Command, mode: Mode, extra: &[&str], figure: &str, gate: Gate) -> anyhow::Result<f64> {
    let dir = tempfile::tempdir()?;
    let truth = dir.path().join("truth.jsonl");
    let go = dir.path().join("go");
    match gate {
        Gate::Stdin => {
            // The native workload wants its options before the scene.
            let words: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
            command = Command::new(command.get_program());
            command.arg("--truth").arg(&truth).args(words).stdin(Stdio::piped());
        }
        Gate::File => {
            command.arg("--truth").arg(&truth).arg("--wait-file").arg(&go).stdin(Stdio::null());
        }
    }
    let mut program = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    wait_for(&truth, "ready")?;
    let mut tracer = match mode {
        Mode::Untraced => None,
        _ => Some(attach(program.id(), dir.path(), mode, extra)?),
    };
    match gate {
        Gate::Stdin => {
            let mut stdin = program.stdin.take().context("no standard input")?;
            writeln!(stdin, "go")?;
        }
        Gate::File => fs::write(&go, "")?,
    }
    let status = program.wait()?;
    ensure!(status.success(), "the program failed: {status}");
    if let Some(tracer) = &mut tracer {
        tracer.wait()?;
    }
    let lines = lines(&truth);
    let line = lines.iter().rfind(|line| line[figure].is_number());
    line.and_then(|line| line[figure].as_f64()).with_context(|| format!("the program told no {figure}"))
}

/// A training loop that goes on while tracers come and go: two processes of the same program differ by more than a
/// tracer costs.
struct Training {
    program: Child,
    dir: tempfile::TempDir,
    windows: usize,
}

impl Training {
    const STEPS: u32 = 300;

    fn start(mut command: Command) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        command.arg("--truth").arg(dir.path().join("truth.jsonl"));
        let program = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        let training = Training { program, dir, windows: 0 };
        wait_for(&training.truth(), "trained")?;
        Ok(training)
    }

    fn truth(&self) -> PathBuf {
        self.dir.path().join("truth.jsonl")
    }

    /// CPU time of a step, in ns.
    fn steps(&mut self, mode: Mode) -> anyhow::Result<f64> {
        let tracer = match mode {
            Mode::Untraced => None,
            _ => Some(attach(self.program.id(), self.dir.path(), mode, &[])?),
        };
        writeln!(self.program.stdin.as_mut().context("no standard input")?, "{}", Self::STEPS)?;
        self.windows += 1;
        let told = |lines: Vec<Value>| {
            let windows = lines.into_iter().filter_map(|line| line["cpu_ns_per_step"].as_f64());
            windows.collect::<Vec<_>>()
        };
        let figure = loop {
            if let Some(figure) = told(lines(&self.truth())).get(self.windows - 1) {
                break *figure;
            }
            if let Some(status) = self.program.try_wait()? {
                bail!("the program ended: {status}");
            }
            thread::sleep(Duration::from_millis(5));
        };
        if let Some(mut tracer) = tracer {
            interrupt(&tracer);
            tracer.wait()?;
        }
        Ok(figure)
    }
}

impl Drop for Training {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

fn attach(pid: u32, dir: &Path, mode: Mode, extra: &[&str]) -> anyhow::Result<Child> {
    let said = dir.join("tracer.txt");
    let mut command = Command::new(tracer());
    command.args(["-p", &pid.to_string()]).args(extra);
    command.args(match mode {
        Mode::Untraced | Mode::Traced => &[][..],
        Mode::Bare => &["--empty-programs", "--no-dump"],
        Mode::WithoutStacks => &["--call-stack", "none"],
        Mode::EveryStack => &["--stack-rate", "1000000"],
    });
    if mode != Mode::Bare {
        command.arg("-o").arg(dir.join("dump"));
    }
    let child = command.stdout(Stdio::null()).stderr(fs::File::create(&said)?).spawn()?;
    for _ in 0..2000 {
        if fs::read_to_string(&said)?.contains("tracing ") {
            return Ok(child);
        }
        thread::sleep(Duration::from_millis(5));
    }
    bail!("the tracer did not attach: {}", fs::read_to_string(&said)?)
}

/// Lets a tracer end with its report.
fn interrupt(tracer: &Child) {
    // SAFETY: kill takes two integers; the child is ours and not yet waited for.
    unsafe { libc::kill(tracer.id() as i32, libc::SIGINT) };
}

fn tracer() -> PathBuf {
    root().join("target/release/memscope-trace")
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn wait_for(truth: &Path, event: &str) -> anyhow::Result<()> {
    for _ in 0..12_000 {
        if lines(truth).iter().any(|line| line["event"] == event) {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(5));
    }
    bail!("the program never said {event}")
}

/// From the start of the tracer to the first event of a busy process.
fn first_event(args: &Args, mut command: Command) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let truth = dir.path().join("truth.jsonl");
    let mut program = command
        .arg("--truth")
        .arg(&truth)
        .args(["--steps", "0", "--stop-file", "/nonexistent"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let result = wait_for(&truth, "mark").and_then(|()| {
        let mut times = Vec::new();
        for _ in 0..args.rounds {
            let report = dir.path().join("report.json");
            let begin = Instant::now();
            let unix = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_nanos() as u64;
            let status = Command::new(tracer())
                .args(["-p", &program.id().to_string(), "-d", "1", "--no-dump", "--quiet", "--report"])
                .arg(&report)
                .stdout(Stdio::null())
                .status()?;
            ensure!(status.success(), "the tracer failed: {status}");
            let report: Value = serde_json::from_slice(&fs::read(&report)?)?;
            let first = report["timing"]["first_event_ns"].as_u64().context("no event")?;
            times.push((first.saturating_sub(unix) as f64 / 1e6, begin.elapsed().as_secs_f64() - 1.0));
        }
        let (first, beyond): (Vec<f64>, Vec<f64>) = times.into_iter().unzip();
        println!(
            "\nStart of the tracer to its first event: {:.0} ms (median of {})",
            median(first),
            args.rounds
        );
        println!(
            "Time beyond the traced second, start and detaching and report: {:.0} ms",
            median(beyond) * 1e3
        );
        Ok(())
    });
    program.kill()?;
    program.wait()?;
    result
}
