//! `memscope-trace [TARGET] [OPTIONS]`.

use std::{
    collections::HashSet,
    ffi::OsString,
    fs::File,
    io::{BufWriter, Write},
    os::unix::{fs::OpenOptionsExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::ExitStatus,
    str::FromStr,
};

use anyhow::Context;
use clap::{Args, builder::NonEmptyStringValueParser};
use memscope_ebpf::MAX_DEPTH;

use super::{
    ProcArgs, Verdict,
    inefficient::RuleArgs,
    list::{Bytes, Device, List, Seconds, StepRange, step_set, words},
    output,
    progress::Terminal,
    steps::StepArgs,
};
use crate::{
    analysis::inefficient::Report,
    attach::{Mechanism, NativeStackConfig, StackConfig},
    dump::{Format, StackStyle},
    model::Tgid,
    probes::catalogue::Class,
    report::{
        document::Document,
        terminal::{self, View},
    },
    trace::{self, Config, DumpSelection, Targets},
};

/// Bytes of the smallest capture that is worth having.
const SMALLEST_CAPTURE: u64 = 1 << 20;

#[derive(Debug, Args)]
pub struct TraceArgs {
    /// Trace this process (may be given several times)
    #[arg(short, long, value_name = "PID", help_heading = "Whom to trace", conflicts_with_all = ["comm", "all", "program"])]
    pid: Vec<u32>,
    /// Trace the processes whose program has this name, now or later
    #[arg(long, value_name = "NAME", help_heading = "Whom to trace", conflicts_with_all = ["all", "program"],
        value_parser = NonEmptyStringValueParser::new())]
    comm: Option<String>,
    /// Trace every process of this host that uses Ascend libraries, now or later
    #[arg(short, long, help_heading = "Whom to trace", conflicts_with = "program")]
    all: bool,
    /// Start this command and trace it and its children from their first instruction
    #[arg(last = true, value_name = "COMMAND", help_heading = "Whom to trace")]
    program: Vec<OsString>,
    /// End the trace after so many seconds
    #[arg(short, long, value_name = "SECONDS", allow_hyphen_values = true, help_heading = "Whom to trace")]
    duration: Option<Seconds>,
    #[command(flatten, next_help_heading = "Whom to trace")]
    proc: ProcArgs,

    /// What to observe besides memory: operators, or each kernel launch as well [op, kernel]
    #[arg(long, value_name = "LEVEL", default_value = "op", help_heading = "What to look at")]
    level: List<Level>,
    /// What to write to the dump [alloc, free, launch, access, none]; accesses are also written, and looked at, for the
    /// analyses that need them
    #[arg(long, value_name = "LIST", default_value = "alloc,free,launch", help_heading = "What to look at")]
    events: List<EventWord>,
    /// What to look for [leaks, inefficient, decompose, none]
    #[arg(long, value_name = "LIST", default_value = "leaks", help_heading = "What to look at")]
    analysis: List<AnalysisWord>,
    /// Stacks of allocations: the lines of the program that led to them, and the native functions, so many frames at
    /// most [python[:DEPTH], c[:DEPTH], none]
    #[arg(long, value_name = "LIST", default_value = "python", help_heading = "What to look at")]
    call_stack: List<StackWord>,
    /// Report and dump these devices only, by the driver's numbers [npu, npu:N]
    #[arg(long, value_name = "LIST", help_heading = "What to look at")]
    device: Option<List<Device>>,
    /// Report and dump what was allocated in these steps only, such as 3-7,12; it is judged by all steps
    #[arg(long, value_name = "LIST", help_heading = "What to look at")]
    steps: Option<List<StepRange>>,
    #[command(flatten, next_help_heading = "What to look at")]
    step: StepArgs,
    #[command(flatten, next_help_heading = "With --analysis inefficient")]
    rules: RuleArgs,

    /// Directory for dumps
    #[arg(short, long, value_name = "DIR", default_value = "memscopeDumpResults", help_heading = "Output")]
    output: PathBuf,
    /// Formats of the dump; db is what MindStudio Insight opens, capture is compressed, for long traces [csv, db, capture]
    #[arg(long, alias = "data-format", value_name = "LIST", default_value = "csv", help_heading = "Output")]
    format: List<FormatWord>,
    /// Keep the capture of each device of a process below this: of more, the oldest events go, but no block that is alive
    #[arg(long, value_name = "BYTES", help_heading = "Output")]
    max_size: Option<Bytes>,
    /// Write no dump
    #[arg(long, help_heading = "Output", conflicts_with_all = ["output", "format", "max_size", "events"])]
    no_dump: bool,
    /// The report as one JSON document on standard output (what COMMAND writes there goes to standard error)
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// Write the JSON report to this file as well
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    report: Option<PathBuf>,
    /// Write each stack of the dump on one line: for tools that take every line for a row
    #[arg(long, help_heading = "Output")]
    flat_stacks: bool,
    /// Of stacks, show the line of the user's own code, or all lines [user, all]
    #[arg(long, value_name = "WHICH", default_value = "user", help_heading = "Output")]
    show_frames: FramesWord,
    /// List so many of the largest and of the latest blocks with each out-of-memory [default: 3, with --json 10]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000), help_heading = "Output")]
    oom_blocks: Option<u16>,
    /// Exit with code 1 when this is found: a recurring leak, or what keeps the peak up [leaks, inefficient]
    #[arg(long, value_name = "LIST", help_heading = "Output")]
    fail_on: Option<List<FailWord>>,

    /// Size of the buffer between kernel and tracer [default: 16M, with native stacks 64M]
    #[arg(long, value_name = "BYTES", help_heading = "Tuning")]
    ring_size: Option<Bytes>,
    /// With --call-stack c: of a pool's blocks, take native stacks of those from this size on
    #[arg(long, value_name = "BYTES", help_heading = "What to look at")]
    native_min: Option<Bytes>,
    /// Stacks of a thread a second, at most; allocations beyond are counted as without one
    #[arg(long, value_name = "N", default_value_t = StackConfig::default().rate, help_heading = "Tuning",
        value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    stack_rate: u32,
    /// Attach in this way instead of the best one [multi, perf-cookie, perf-site]
    #[arg(long, value_name = "NAME", help_heading = "Tuning")]
    mechanism: Option<MechanismWord>,
    /// Attach programs that do nothing: what the bare probes cost (cargo xtask bench)
    #[arg(long, hide = true)]
    empty_programs: bool,
    /// Also write the records to this file as they come out of the ring buffer (cargo xtask bench)
    #[arg(long, hide = true)]
    record: Option<PathBuf>,
    /// Keep the calls of so many threads in a map, as on kernels without compare-and-swap
    #[arg(long, hide = true)]
    call_threads: Option<u32>,
    /// Do as on kernels that do not describe their structures
    #[arg(long, hide = true)]
    without_btf: bool,
}

words! { Level: "level" { Op = "op" | "0", Kernel = "kernel" | "1" } }
words! { EventWord: "kind of event" { Alloc = "alloc", Free = "free", Launch = "launch", Access = "access", None = "none" } }
words! { AnalysisWord: "analysis" { Leaks = "leaks", Inefficient = "inefficient", Decompose = "decompose", None = "none" } }
words! { FormatWord: "format" { Csv = "csv", Db = "db", Capture = "capture" } }
words! { FailWord: "finding" { Leaks = "leaks", Inefficient = "inefficient" } }
words! { FramesWord: "choice of frames" { User = "user", All = "all" } }
words! { MechanismWord: "mechanism" { Multi = "multi", PerfCookie = "perf-cookie", PerfSite = "perf-site" } }

/// `python[:DEPTH]`, `c[:DEPTH]`, `none`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StackWord {
    Python { depth: Option<u32> },
    Native { depth: Option<u32> },
    None,
}

impl FromStr for StackWord {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let (kind, depth) = match word.split_once(':') {
            Some((kind, depth)) => (kind, Some(depth)),
            None => (word, None),
        };
        let depth = match depth.map(str::parse) {
            None => None,
            Some(Ok(depth)) if (1..=MAX_DEPTH as u32).contains(&depth) => Some(depth),
            Some(_) => {
                return Err(format!("{word:?} has no depth: they are whole numbers from 1 to {MAX_DEPTH}"));
            }
        };
        match (kind, depth) {
            ("none", None) => Ok(Self::None),
            ("c", depth) => Ok(Self::Native { depth }),
            ("python", depth) => Ok(Self::Python { depth }),
            _ => Err(format!(
                "{word:?} is no kind of stack; known are: python, python:DEPTH, c, c:DEPTH, none"
            )),
        }
    }
}

impl FormatWord {
    pub(super) fn format(self) -> Format {
        match self {
            Self::Csv => Format::Csv,
            Self::Db => Format::Db,
            Self::Capture => Format::Capture,
        }
    }
}

impl TraceArgs {
    fn config(self) -> anyhow::Result<Config> {
        let targets = if !self.pid.is_empty() {
            let mut pids = self.pid;
            pids.sort_unstable();
            pids.dedup();
            Targets::Processes(pids.into_iter().map(Tgid).collect())
        } else if let Some(name) = self.comm {
            Targets::Called(name)
        } else if self.all {
            Targets::All
        } else if !self.program.is_empty() {
            Targets::Command(self.program)
        } else {
            anyhow::bail!("whom to trace? -p PID, --comm NAME, -a, or -- COMMAND; --help shows examples");
        };
        let off = self.events.none(EventWord::None).map_err(|why| anyhow::anyhow!("--events: {why}"))?;
        let no_analysis =
            self.analysis.none(AnalysisWord::None).map_err(|why| anyhow::anyhow!("--analysis: {why}"))?;
        let has = |word| !off && self.events.0.contains(&word);
        let memory = has(EventWord::Alloc) || has(EventWord::Free);
        let launches = has(EventWord::Launch);
        let mut classes = HashSet::from([Class::Memory, Class::Mark, Class::Op, Class::Context]);
        if self.level.0.contains(&Level::Kernel) {
            classes.insert(Class::Launch);
        }
        let looks_for = |word| !no_analysis && self.analysis.0.contains(&word);
        let inefficient = looks_for(AnalysisWord::Inefficient).then(|| self.rules.config()).transpose()?;
        if inefficient.is_none() && self.rules.given() {
            anyhow::bail!("--rules, --type, --mem-size and thresholds need --analysis inefficient");
        }
        let decompose = looks_for(AnalysisWord::Decompose);
        if inefficient.is_some() || decompose || has(EventWord::Access) {
            classes.insert(Class::Access);
            if classes.contains(&Class::Launch) {
                classes.insert(Class::LaunchAccess);
            }
        }
        if let Some(size) = self.max_size {
            anyhow::ensure!(
                self.format.0.contains(&FormatWord::Capture),
                "--max-size needs --format capture: other formats can not let go of what is old"
            );
            anyhow::ensure!(size.0 >= SMALLEST_CAPTURE, "--max-size {}: from 1M on", size.0);
        }
        let (steps, steps_from) = self.step.parse()?;
        let (python, native) = stacks(&self.call_stack.0)?;
        if native.is_none() && self.native_min.is_some() {
            anyhow::bail!("--native-min needs --call-stack c");
        }
        // A copied stack takes the room of two hundred events.
        let ring_size =
            self.ring_size.map_or(if native.is_some() { 64 << 20 } else { 16 << 20 }, |size| size.0);
        let devices = self.device.map(|list| list.0).unwrap_or_default();
        let only_devices = if devices.contains(&Device::All) {
            Vec::new()
        } else {
            devices.iter().filter_map(|d| if let Device::One(n) = d { Some(*n) } else { None }).collect()
        };
        Ok(Config {
            targets,
            proc: self.proc.open()?,
            duration: self.duration.map(|seconds| seconds.0),
            classes,
            steps,
            steps_from,
            only_steps: step_set(self.steps),
            only_devices,
            leaks: looks_for(AnalysisWord::Leaks),
            inefficient,
            decompose,
            output: (!self.no_dump).then_some(self.output),
            formats: self.format.0.iter().map(|word| word.format()).collect(),
            dump: DumpSelection { memory, launches, accesses: !off },
            max_size: self.max_size.map(|size| size.0),
            dump_stacks: if self.flat_stacks { StackStyle::Flat } else { StackStyle::Lines },
            ring_bytes: u32::try_from(ring_size)
                .ok()
                .filter(|n| (64 << 10..=1 << 30).contains(n))
                .ok_or_else(|| anyhow::anyhow!("--ring-size {ring_size}: from 64K to 1G"))?,
            mechanism: self.mechanism.map(|word| match word {
                MechanismWord::Multi => Mechanism::UprobeMulti,
                MechanismWord::PerfCookie => Mechanism::PerfCookie,
                MechanismWord::PerfSite => Mechanism::PerfSite,
            }),
            stacks: python.map(|depth| StackConfig {
                depth,
                rate: self.stack_rate,
                without_btf: self.without_btf,
            }),
            native_stacks: native.map(|depth| NativeStackConfig {
                depth,
                rate: self.stack_rate,
                pool_bytes: self.native_min.map_or(NativeStackConfig::default().pool_bytes, |bytes| bytes.0),
            }),
            stdout_is_taken: self.json,
            empty: self.empty_programs,
            record: self.record,
            call_threads: self.call_threads,
            oom_blocks: self.oom_blocks.map(usize::from),
        })
    }
}

/// Which stacks to take: Python's and native ones. Of two words of a kind the last counts.
fn stacks(words: &[StackWord]) -> anyhow::Result<(Option<u32>, Option<u32>)> {
    let (mut python, mut native) = (None, None);
    for word in words {
        match *word {
            StackWord::Python { depth } => python = Some(depth.unwrap_or(StackConfig::default().depth)),
            StackWord::Native { depth } => native = Some(depth.unwrap_or(NativeStackConfig::default().depth)),
            StackWord::None if words.len() > 1 => anyhow::bail!("--call-stack: none goes with nothing else"),
            StackWord::None => {}
        }
    }
    Ok((python, native))
}

pub(super) fn run(args: TraceArgs, quiet: bool) -> anyhow::Result<Verdict> {
    let json = args.json;
    let view = View {
        colour: output::has_colour(),
        all_frames: args.show_frames == FramesWord::All,
        ..View::with_oom_blocks(args.oom_blocks)
    };
    // Before the trace: afterwards it would be too late to say that the file can not be written.
    let report = args.report.as_deref().map(create_report).transpose()?;
    let fail_on = |word| args.fail_on.as_ref().is_some_and(|list| list.0.contains(&word));
    let (fail_on_leaks, fail_on_inefficient) = (fail_on(FailWord::Leaks), fail_on(FailWord::Inefficient));
    let config = args.config()?;
    if fail_on_leaks && !config.leaks {
        anyhow::bail!("--fail-on leaks needs --analysis leaks");
    }
    if fail_on_inefficient && config.inefficient.is_none() {
        anyhow::bail!("--fail-on inefficient needs --analysis inefficient");
    }
    let mut progress = Terminal::new(quiet);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut outcome = runtime.block_on(trace::run(config, &mut progress))?;
    if fail_on_leaks && !outcome.document.leaks_judged() {
        outcome.document.notes.push(NOTHING_JUDGED.to_owned());
    }
    progress.end();
    print(&outcome.document, json, view)?;
    if let Some(mut file) = report {
        serde_json::to_writer(&mut file, &outcome.document).context("can not write the report")?;
        file.flush().context("can not write the report")?;
    }
    Ok(match outcome.status {
        Some(status) if !status.success() => Verdict::Passed(exit_code(status)),
        _ if fail_on_leaks && outcome.document.has_leaks() => Verdict::Findings,
        _ if fail_on_leaks && !outcome.document.leaks_judged() => Verdict::NotJudged,
        _ if fail_on_inefficient
            && outcome.document.inefficient.as_ref().is_some_and(Report::lowers_a_peak) =>
        {
            Verdict::Findings
        }
        _ => Verdict::Fine,
    })
}

/// Why `--fail-on leaks` is neither 0 nor 1.
pub(super) const NOTHING_JUDGED: &str =
    "--fail-on leaks had nothing to judge: fewer than three steps were seen";

fn create_report(path: &Path) -> anyhow::Result<BufWriter<File>> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let file =
        options.open(path).with_context(|| format!("can not write the report to {}", path.display()))?;
    Ok(BufWriter::new(file))
}

fn print(document: &Document, json: bool, view: View) -> anyhow::Result<()> {
    match json {
        true => output::print_report(document),
        false => output::print(terminal::render(document, view)),
    }
}

/// As a shell has it: the code, or 128 and the signal.
fn exit_code(status: ExitStatus) -> u8 {
    status.code().or_else(|| status.signal().map(|s| 128 + s)).unwrap_or(2).clamp(0, 255) as u8
}
