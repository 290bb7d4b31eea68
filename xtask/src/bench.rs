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
    demo, ebpf, setup, sim,
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
    compare(args, ["aclrtMalloc + aclrtFree, ns a pair"], |mode| {
        let mut command = Command::new(&sim.workload);
        command.args(["--wait-stdin", "--wait-initialized", "pairs", "20000"]);
        Ok([one(command, mode, &[], "cpu_ns_per_pair", Gate::Stdin)?])
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
    compare(args, ["torch.empty + del, ns of CPU a pair"], |mode| {
        let mut command = python("empty_pairs.py");
        command.args(["--pairs", "100000"]);
        Ok([one(command, mode, &[], "cpu_ns_per_pair", Gate::File)?])
    })?;
    let mut training = Training::start(python("training.py"), 300)?;
    compare(args, ["training step, ns of CPU"], |mode| Ok([training.steps(mode)?.cpu]))?;
    drop(training);
    let mut waiting = python("training.py");
    waiting.arg("--wait").env("SIM_CANN_STREAM_LAG_US", DEVICE_US.to_string());
    let mut training = Training::start(waiting, 100)?;
    let what = format!("training step that waits {} ms for its device, ns", DEVICE_US / 1000);
    compare(args, [&what], |mode| Ok([training.steps(mode)?.wall]))?;
    drop(training);
    let mut demo = Demo::start(python("train_leak.py"))?;
    compare(args, ["step of the demo's loop, ns", "step of the demo's loop, ns of CPU"], |mode| {
        demo.steps(mode).map(|step| [step.wall, step.cpu])
    })?;
    drop(demo);
    first_event(args, python("train_leak.py"))
}

/// How the program is told to begin.
#[derive(Clone, Copy)]
enum Gate {
    Stdin,
    File,
}

/// Prints a row for each figure that is measured at once.
fn compare<const N: usize>(
    args: &Args,
    what: [&str; N],
    mut measure: impl FnMut(Mode) -> anyhow::Result<[f64; N]>,
) -> anyhow::Result<()> {
    let modes = [Mode::Untraced, Mode::Bare, Mode::WithoutStacks, Mode::Traced, Mode::EveryStack];
    let mut rows = [const { [const { Vec::new() }; 5] }; N];
    for _ in 0..args.rounds {
        // By turns, so that a slow spell of the machine falls on all of them.
        for (column, mode) in modes.into_iter().enumerate() {
            for (row, figure) in rows.iter_mut().zip(measure(mode)?) {
                row[column].push(figure);
            }
        }
    }
    for (what, figures) in what.into_iter().zip(rows) {
        let noise = spread(&figures[0]);
        let [untraced, bare, without, traced, every] = figures.map(median);
        println!(
            "| {what} | {untraced:.0} | {bare:.0} | {without:.0} | {traced:.0} | {every:.0} | {:.2} | {:.2} | ±{:.0} % |",
            traced / bare,
            traced / untraced,
            noise * 100.0
        );
    }
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

/// How long the device takes for what it was given last, where it is waited for.
const DEVICE_US: u32 = 20_000;

/// What a step takes, in ns.
#[derive(Clone, Copy)]
struct Step {
    wall: f64,
    cpu: f64,
}

/// A loop that goes on while tracers come and go: two processes of the same program differ by more than a tracer costs.
struct Loop {
    program: Child,
    dir: tempfile::TempDir,
}

impl Loop {
    fn start(mut command: Command, begun: &str) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        command.arg("--truth").arg(dir.path().join("truth.jsonl"));
        let program = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        let started = Loop { program, dir };
        wait_for(&started.truth(), begun)?;
        Ok(started)
    }

    fn truth(&self) -> PathBuf {
        self.dir.path().join("truth.jsonl")
    }

    /// What `window` measures while a tracer is attached.
    fn during<T>(
        &mut self,
        mode: Mode,
        window: impl FnOnce(&mut Self) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let tracer = match mode {
            Mode::Untraced => None,
            _ => Some(attach(self.program.id(), self.dir.path(), mode, &[])?),
        };
        let measured = window(self);
        if let Some(mut tracer) = tracer {
            interrupt(&tracer);
            tracer.wait()?;
        }
        measured
    }

    /// Waits until its truth has what is looked for.
    fn told<T>(&mut self, look: impl Fn(&[Value]) -> Option<T>, pause_ms: u64) -> anyhow::Result<T> {
        loop {
            if let Some(found) = look(&lines(&self.truth())) {
                return Ok(found);
            }
            if let Some(status) = self.program.try_wait()? {
                bail!("the program ended: {status}");
            }
            thread::sleep(Duration::from_millis(pause_ms));
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

/// `training.py`, which takes so many steps when it is told to.
struct Training {
    program: Loop,
    window: u32,
    windows: usize,
}

impl Training {
    fn start(command: Command, window: u32) -> anyhow::Result<Self> {
        Ok(Training { program: Loop::start(command, "trained")?, window, windows: 0 })
    }

    fn steps(&mut self, mode: Mode) -> anyhow::Result<Step> {
        let (window, before) = (self.window, self.windows);
        self.windows += 1;
        self.program.during(mode, |program| {
            let stdin = program.program.stdin.as_mut().context("no standard input")?;
            writeln!(stdin, "{window}")?;
            let figures = |line: &Value| {
                Some(Step { wall: line["ns_per_step"].as_f64()?, cpu: line["cpu_ns_per_step"].as_f64()? })
            };
            program.told(|lines| lines.iter().filter_map(figures).nth(before), 5)
        })
    }
}

/// The loop of `cargo xtask demo`, with its pace.
struct Demo(Loop);

impl Demo {
    const WINDOW: u64 = 16;

    fn start(mut command: Command) -> anyhow::Result<Self> {
        command.args(demo::ENDLESS);
        Loop::start(command, "mark").map(Self)
    }

    fn steps(&mut self, mode: Mode) -> anyhow::Result<Step> {
        let step = |line: &Value| {
            let ends = (line["ns"].as_f64()?, line["cpu_ns"].as_f64()?);
            Some((line["step"].as_u64()?, ends))
        };
        let steps = |lines: &[Value]| lines.iter().filter_map(step).collect::<Vec<_>>();
        self.0.during(mode, |program| {
            let (last, _) = program.told(|lines| steps(lines).pop(), 50)?;
            // The one that is being taken now is not whole.
            let from = last + 1;
            let at = |wanted| move |lines: &[Value]| steps(lines).into_iter().find(|(n, _)| *n == wanted);
            let (_, end) = program.told(at(from + Self::WINDOW), 50)?;
            let (_, begin) = program.told(at(from), 50)?;
            let each = |begin: f64, end: f64| (end - begin) / Self::WINDOW as f64;
            Ok(Step { wall: each(begin.0, end.0), cpu: each(begin.1, end.1) })
        })
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
