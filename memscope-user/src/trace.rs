//! A trace from its start to its report: targets, sites, ring buffer, ledger, dump.

use std::{
    collections::{HashMap, HashSet},
    ffi::OsString,
    io,
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{Child, ExitStatus},
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use aya::maps::{MapData, RingBuf};
use memscope_ebpf::Counters;
use nix::sys::signal::Signal;
use tokio::{
    io::unix::AsyncFd,
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::{MissedTickBehavior, interval, sleep, sleep_until},
};

use crate::{
    analysis::{Online, inefficient},
    attach::{
        AttachError, Attached, Attacher, Ending, Mechanism, NativeStackConfig, Scope, StackConfig, Status,
        cost::{self, Effort, Prices, Share},
        kernel, privilege,
        proc::{Proc, ProcError},
        process::{Life, Process, ProcessError},
        spawn::{Held, SpawnError},
    },
    collect::{
        decode::{Decoder, Notice},
        tape::Recorder,
    },
    dump::{Caller, Fact, Format, OutputError, Pipeline, Place, StackStyle, rows_of},
    model::{
        Alloc, Change, DeviceId, Event, EventKind, Ledger, Name, Nanos, Pool, StepRule, StepsFrom, Tgid, Tid,
    },
    probes::catalogue::{CATALOGUE, Class, is_ascend_library},
    report::{
        document::{
            Document, Dump, Ended, Events, NativeStackFacts, ProbeCost, Site, StackFacts,
            Target as TargetFacts, Timing, Trace,
        },
        units,
    },
    stacks::{Found, Interpreter, Memory, Natives, Origins, Reason},
};

/// How often what the programs did not announce is looked for.
const TICK: Duration = Duration::from_millis(50);
/// How often new processes and libraries are looked for that no event announces.
const SCAN: Duration = Duration::from_secs(1);
/// How often what processes that have ended leave in the kernel's maps is cleared away.
const SWEEP: Duration = Duration::from_secs(5);
/// How long events are held back, in processes that mark no step, until it is clear whether one begins before them: at
/// most this old is what the dump and the status line lack.
const HELD: Duration = Duration::from_secs(10);
/// How long is waited for records of programs that were at work when the trace ended.
const LAST_RECORDS: Duration = Duration::from_millis(50);
/// Notes kept; the live display shows all.
const MOST_NOTES: usize = 1000;
/// Records decoded in one go before signals and timers get their turn.
const BATCH: usize = 65536;

#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error(transparent)]
    Proc(#[from] ProcError),
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    #[error("{proc} does not show the command that was started: {source}")]
    Unseen { proc: String, source: io::Error },
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error(
        "process {tgid} ({command}) has no Ascend library mapped: looked for {wanted} in {files} mapped files. \
         If it has not loaded them yet, start it with `memscope-trace -- COMMAND`, or use -a, which waits for it"
    )]
    NoLibraries { tgid: Tgid, command: String, wanted: String, files: usize },
    #[error(
        "process {tgid} ({command}) has Ascend libraries, but none of {sites} sites could be attached; \
         the first said: {reason}"
    )]
    NothingAttached { tgid: Tgid, command: String, sites: usize, reason: String },
    #[error("can not write the recorded stream: {0}; choose another file with --record")]
    Record(io::Error),
    #[error("the event loop can not run: {0}")]
    Loop(#[from] io::Error),
}

/// Whom to trace.
#[derive(Debug, Clone)]
pub enum Targets {
    Processes(Vec<Tgid>),
    /// Those whose program has this name, now or later.
    Called(String),
    /// All that have Ascend libraries, now or later.
    All,
    /// A command to start, and its descendants.
    Command(Vec<OsString>),
}

#[derive(Debug, Clone)]
pub struct Config {
    pub targets: Targets,
    pub proc: Proc,
    /// Ends the trace after this time.
    pub duration: Option<Duration>,
    pub classes: HashSet<Class>,
    pub steps: StepRule,
    pub steps_from: StepsFrom,
    /// Only these steps are reported and dumped; all, when empty.
    pub only_steps: Vec<u32>,
    /// Only these devices are reported and dumped; all, when empty.
    pub only_devices: Vec<u16>,
    pub leaks: bool,
    pub inefficient: Option<inefficient::Config>,
    pub decompose: bool,
    /// Where dumps go; `None` writes none.
    pub output: Option<PathBuf>,
    pub formats: Vec<Format>,
    /// What goes into the dump.
    pub dump: DumpSelection,
    /// How stacks are written there.
    pub dump_stacks: StackStyle,
    /// Bytes of a capture, at most (see [`crate::dump::Config::max_size`]).
    pub max_size: Option<u64>,
    pub ring_bytes: u32,
    pub mechanism: Option<Mechanism>,
    /// Python stacks of allocations; `None` takes none.
    pub stacks: Option<StackConfig>,
    /// Native ones.
    pub native_stacks: Option<NativeStackConfig>,
    /// Standard output belongs to the report alone: a command's goes to standard error.
    pub stdout_is_taken: bool,
    /// Attaches programs that do nothing (see [`crate::attach::Config::empty`]).
    pub empty: bool,
    /// Where records go as they come (see [`crate::collect::tape`]).
    pub record: Option<PathBuf>,
    /// Room for calls between entry and return (see [`crate::attach::Config::in_flight`]).
    pub in_flight: Option<u32>,
}

#[derive(Debug, Clone, Copy)]
pub struct DumpSelection {
    pub memory: bool,
    pub launches: bool,
    pub accesses: bool,
}

/// What the user sees while it runs.
pub trait Progress {
    /// Tracing has begun, or reached another process.
    fn began(&mut self, line: String);
    /// Something worth a line of its own.
    fn note(&mut self, line: String);
    /// A few times a second.
    fn status(&mut self, live: &Live<'_>);
}

/// Figures of the moment.
pub struct Live<'a> {
    pub online: &'a Online,
    pub received: u64,
    pub lost: u64,
    /// What share of the targets' CPU time their probes took, as far as it is known.
    pub probes: Option<f64>,
    pub elapsed: Duration,
}

/// What a trace came to.
pub struct Outcome {
    pub document: Document,
    /// Of the command, where one was started.
    pub status: Option<ExitStatus>,
    /// Silent by now. Dropping them detaches, which takes time: when the report is out.
    pub probes: Attacher,
}

struct Target {
    process: Process,
    scope: Scope,
    torch_npu: Option<String>,
    python: Python,
    /// The longest time between its having Ascend libraries and their being probed, where it began, or loaded them,
    /// during the trace.
    late: Option<Duration>,
    /// CPU time that it had used when it was attached, and last.
    cpu: (Duration, Duration),
    ended: Option<Ending>,
}

/// What is known of a target's Python interpreter.
enum Python {
    /// It has none yet, or one that is not ready. It was not understood so many times.
    Looking {
        refusals: u32,
    },
    Ready {
        version: String,
    },
    Refused {
        why: String,
    },
}

impl Default for Python {
    fn default() -> Self {
        Self::Looking { refusals: 0 }
    }
}

/// Times that an interpreter may not be understood: one that is just starting up looks like no other.
const REFUSALS: u32 = 3;

/// Processes that ended before they could be looked at, but for their events.
#[derive(Default)]
struct Missed {
    last: Option<Tgid>,
    processes: u64,
    events: u64,
}

impl Missed {
    fn count(&mut self, tgid: Tgid) {
        self.processes += u64::from(self.last.replace(tgid) != Some(tgid));
        self.events += 1;
    }

    fn note(&self) -> Option<String> {
        let last = self.last?;
        Some(format!(
            "{} of up to {} that ended before they could be looked at, the last {last}, are not in the figures",
            units::count_of(self.events, "event"),
            units::count_of(self.processes, "process")
        ))
    }
}

struct Session<'p> {
    config: Config,
    attacher: Attacher,
    decoder: Decoder,
    online: Online,
    dump: Option<Pipeline>,
    targets: HashMap<Tgid, Target>,
    order: Vec<Tgid>,
    /// Processes that were judged to be of no interest, by their start time.
    strangers: HashMap<Tgid, Option<u64>>,
    exits: mpsc::UnboundedSender<Tgid>,
    started: Instant,
    timing: Timing,
    notes: Vec<String>,
    notes_left_out: u64,
    missed: Missed,
    last_sweep: Instant,
    recorder: Option<Recorder>,
    progress: &'p mut dyn Progress,
    root: Option<Tgid>,
    /// What probes cost here, once that has been measured.
    prices: Arc<OnceLock<Prices>>,
    /// As of the last status.
    last_share: Option<Share>,
    /// A target was gone before it could be asked how much CPU time it had used in the end.
    is_end_missed: bool,
}

/// Runs a trace to its end. Signals: SIGINT, SIGTERM and SIGHUP end it with a report.
pub async fn run(config: Config, progress: &mut dyn Progress) -> Result<Outcome, TraceError> {
    let started_ns = now();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let dump = match &config.output {
        Some(output) => Some(Pipeline::start(crate::dump::Config {
            output: output.clone(),
            formats: config.formats.clone(),
            stacks: config.dump_stacks,
            max_size: config.max_size,
            caller: Caller::of_sudo(),
        })?),
        None => None,
    };
    let (attacher, records) = Attacher::new(crate::attach::Config {
        ring_bytes: config.ring_bytes,
        classes: config.classes.clone(),
        mechanism: config.mechanism,
        empty: config.empty,
        stacks: config.stacks,
        native_stacks: config.native_stacks,
        in_flight: config.in_flight,
        own_numbers: config.proc.has_own_numbers(),
    })?;
    config.proc.check_numbers(kernel::own_tgid())?;
    // SAFETY: the ring buffer keeps its descriptor, and keeps it open, for as long as it lives.
    let mut records = unsafe { AsyncFd::register(records) }.map_err(|e| e.into_parts().1)?;
    let record = config.record.as_deref().map(Recorder::create).transpose().map_err(TraceError::Record)?;
    let (exits, mut exited) = mpsc::unbounded_channel();
    let mut online =
        Online::new(config.steps.clone(), config.leaks).with_steps_from(&config.steps, config.steps_from);
    if let Some(inefficient) = &config.inefficient {
        online = online.with_inefficient(inefficient.clone());
    }
    if config.decompose {
        online = online.with_decompose();
    }
    let proc = config.proc.clone();
    let read_text = move |tgid, address, most| read_text(&Memory::of(&proc, tgid).ok()?, address, most);
    let mut session = Session {
        online,
        config,
        attacher,
        decoder: Decoder::new(clock_offset(), Box::new(read_text)),
        dump,
        targets: HashMap::new(),
        order: Vec::new(),
        strangers: HashMap::new(),
        exits,
        started: Instant::now(),
        timing: Timing { started_ns, ..Timing::default() },
        notes: Vec::new(),
        notes_left_out: 0,
        missed: Missed::default(),
        last_sweep: Instant::now(),
        recorder: record,
        progress,
        root: None,
        prices: Arc::default(),
        last_share: None,
        is_end_missed: false,
    };
    if let Some(why) = session.attacher.stacks_refused() {
        session.note(format!("no Python stacks: {why}"));
    }
    if let Some(why) = session.attacher.native_stacks_refused() {
        session.note(format!("no native stacks: {why}"));
    }
    session.decoder.stacks.native = session
        .attacher
        .native_stacks()
        .map(|wanted| Natives::new(session.config.proc.clone(), wanted.depth));
    let mut child = session.start()?;
    session.attacher.drop_privileges();
    session.measure_prices();
    let deadline = session.config.duration.map(|d| tokio::time::Instant::now() + d);
    let mut tick = interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last_status = Instant::now();
    let mut last_scan = Instant::now();
    let mut interrupted = false;
    loop {
        tokio::select! {
            biased;
            _ = interrupt.recv() => {
                // A command of ours gets the terminal's Ctrl-C as well: its end is the end of the trace.
                if child.is_none() || std::mem::replace(&mut interrupted, true) {
                    break;
                }
            }
            _ = terminate.recv() => break,
            _ = hangup.recv() => break,
            () = async { match deadline { Some(at) => sleep_until(at).await, None => std::future::pending().await } } => break,
            Some(tgid) = exited.recv() => {
                session.drain(records.get_mut(), usize::MAX);
                session.target_exited(tgid);
                if session.is_over() {
                    break;
                }
            }
            ready = records.readable_mut() => {
                let mut ready = ready?;
                let emptied = session.drain(ready.get_inner_mut(), BATCH);
                if emptied {
                    ready.clear_ready();
                }
            }
            _ = tick.tick() => {
                session.drain(records.get_mut(), BATCH);
                session.release();
                if last_scan.elapsed() >= SCAN {
                    last_scan = Instant::now();
                    session.scan();
                }
            }
        }
        if last_status.elapsed() >= Duration::from_millis(250) {
            last_status = Instant::now();
            session.show_status();
        }
    }
    session.attacher.silence();
    // Programs that had begun before may still be at it.
    let silent = Instant::now();
    while {
        session.drain(records.get_mut(), usize::MAX);
        session.unaccounted() > 0 && silent.elapsed() < LAST_RECORDS
    } {
        std::thread::sleep(Duration::from_millis(1));
    }
    let status = match (&mut child, session.root) {
        (Some(child), Some(root)) if !session.is_target(root) => child.wait().ok(),
        _ => None,
    };
    if let (Some(status), Some(root)) = (status, session.root) {
        session.root_ended(root, status);
    }
    if let Some(recorder) = session.recorder.take() {
        recorder.close().map_err(TraceError::Record)?;
    }
    let (document, probes) = session.finish();
    Ok(Outcome { document, status, probes })
}

impl Session<'_> {
    fn start(&mut self) -> Result<Option<Child>, TraceError> {
        match self.config.targets.clone() {
            Targets::Processes(tgids) => {
                for tgid in tgids {
                    let process = Process::open(&self.config.proc, tgid)?;
                    self.attach_required(process)?;
                }
                Ok(None)
            }
            Targets::Called(name) => {
                self.announce_processes();
                self.scan();
                if self.targets.is_empty() {
                    self.progress.note(format!(
                        "no process called {name:?} uses Ascend libraries yet; waiting (Ctrl-C ends)"
                    ));
                }
                Ok(None)
            }
            Targets::All => {
                self.announce_processes();
                self.scan();
                if self.targets.is_empty() {
                    self.progress.note("no process uses Ascend libraries yet; waiting (Ctrl-C ends)".into());
                }
                Ok(None)
            }
            Targets::Command(words) => {
                let held = Held::start(&words, self.config.stdout_is_taken)?;
                let tgid = self.config.proc.number_of(held.pid()).map_err(|source| TraceError::Unseen {
                    proc: self.config.proc.root().display().to_string(),
                    source,
                })?;
                self.root = Some(tgid);
                let process = Process::open(&self.config.proc, tgid)?;
                self.adopt(process, Scope::Host)?;
                Ok(Some(held.release()?))
            }
        }
    }

    /// Has processes announced that begin from now on. Without, they are found when they have lived for a second.
    fn announce_processes(&mut self) {
        let this = Process::open(&self.config.proc, Tgid(std::process::id()));
        let announced =
            this.map_err(TraceError::from).and_then(|this| Ok(self.attacher.announce_processes(&this)?));
        self.introduce_sites();
        if let Err(e) = announced {
            self.note(format!("processes that live for less than a second may not be seen: {e}"));
        }
    }

    /// Another process begins, whose linker may be one that announces nothing yet.
    fn begins(&mut self, tgid: Tgid) {
        self.strangers.remove(&tgid);
        if let Targets::All | Targets::Called(_) = self.config.targets
            && let Ok(process) = Process::open(&self.config.proc, tgid)
        {
            let _ = self.attacher.attach_linker(&process);
            self.introduce_sites();
        }
    }

    /// Attaches to a process that the user named: without sites there is nothing to wait for.
    fn attach_required(&mut self, process: Process) -> Result<(), TraceError> {
        let (tgid, command) = (process.tgid, process.command.clone());
        let files = process.mapped_files()?.len();
        let attached = self.adopt(process, Scope::Process(tgid))?;
        if attached.memory_sites > 0 {
            return Ok(());
        }
        let memory: Vec<_> = self
            .attacher
            .sites()
            .iter()
            .filter(|s| {
                s.scope == Scope::Process(tgid) && s.found.is_some() && s.probe.class != Class::Context
            })
            .collect();
        match memory.iter().find_map(|s| s.failure().map(str::to_owned)) {
            Some(reason) => Err(TraceError::NothingAttached { tgid, command, sites: memory.len(), reason }),
            None if !memory.is_empty() => Ok(()),
            None => Err(TraceError::NoLibraries { tgid, command, wanted: wanted_libraries(), files }),
        }
    }

    /// Makes a process a target and attaches what it has so far.
    fn adopt(&mut self, mut process: Process, scope: Scope) -> Result<Attached, TraceError> {
        let tgid = process.tgid;
        if process.is_environment_denied {
            self.note(format!(
                "may not read the environment of process {tgid} ({}): if ASCEND_RT_VISIBLE_DEVICES is set there, its devices \
                 are shown by the numbers that it uses itself; without CAP_DAC_READ_SEARCH that can not be known: {}",
                process.command,
                privilege::how_to_get(&[])
            ));
        }
        self.watch(&mut process)?;
        self.attacher.judge(tgid, true)?;
        self.decoder.set_visible_devices(tgid, process.visible_devices.clone());
        self.strangers.remove(&tgid);
        let used = self.config.proc.cpu_time(tgid).unwrap_or_default();
        self.order.retain(|known| *known != tgid);
        self.order.push(tgid);
        self.targets.insert(
            tgid,
            Target {
                process,
                scope,
                torch_npu: None,
                python: Python::default(),
                late: None,
                cpu: (used, used),
                ended: None,
            },
        );
        self.attach(tgid)
    }

    /// Tells [`Session::target_exited`] when the process ends.
    fn watch(&self, process: &mut Process) -> Result<(), TraceError> {
        let Some(life) = process.take_life() else { return Ok(()) };
        let (exits, tgid) = (self.exits.clone(), process.tgid);
        match life {
            Life::Pidfd(pidfd) => {
                // SAFETY: an OwnedFd keeps its descriptor open for as long as it lives.
                let pidfd = unsafe { AsyncFd::register(pidfd) }.map_err(|e| e.into_parts().1)?;
                tokio::spawn(async move {
                    let _ = pidfd.readable().await;
                    let _ = exits.send(tgid);
                });
            }
            Life::Directory(directory) => {
                tokio::spawn(async move {
                    while !directory.has_ended() {
                        sleep(TICK).await;
                    }
                    let _ = exits.send(tgid);
                });
            }
        }
        Ok(())
    }

    /// Attaches what a target has mapped since the last look.
    fn attach(&mut self, tgid: Tgid) -> Result<Attached, TraceError> {
        // First, so that the first allocation has its stack.
        self.look_for_python(tgid);
        let Some(target) = self.targets.get_mut(&tgid) else { return Ok(Attached::default()) };
        if let Some(native) = &mut self.decoder.stacks.native {
            native.look(&target.process);
        }
        let result = self.attacher.attach(&target.process, target.scope);
        self.introduce_sites();
        let attached = result?;
        let Some(target) = self.targets.get_mut(&tgid) else { return Ok(attached) };
        let denied = (!attached.denied.is_empty()).then(|| denied(&target.process, &attached.denied));
        if target.torch_npu.is_none() {
            target.torch_npu = self.attacher.torch_npu_version(&target.process);
        }
        if attached.relevant {
            self.timing.attached_ns.get_or_insert_with(now);
            let line = self.began_line(tgid, &attached);
            self.progress.began(line);
        }
        if let Some(line) = denied {
            self.note(line);
        }
        Ok(attached)
    }

    /// Tells the decoder what the numbers in records are.
    fn introduce_sites(&mut self) {
        for index in self.attacher.take_new_sites() {
            let site = &self.attacher.sites()[index];
            let layout = site.found.and_then(|found| found.report_layout);
            self.decoder.set_site(index, site.probe, layout);
            if let Some(recorder) = &mut self.recorder {
                recorder.site(index, site.probe, layout);
            }
        }
    }

    /// Has stacks taken of a target once its interpreter is ready and understood.
    fn look_for_python(&mut self, tgid: Tgid) {
        if !self.attacher.takes_stacks() {
            return;
        }
        let Some(target) = self.targets.get_mut(&tgid) else { return };
        let Python::Looking { refusals } = target.python else { return };
        let interpreter = match Interpreter::find(&target.process) {
            Ok(Found::None | Found::NotReady) => return,
            Ok(Found::Ready(interpreter)) => interpreter,
            Err(_) if refusals + 1 < REFUSALS => {
                target.python = Python::Looking { refusals: refusals + 1 };
                return;
            }
            Err(refusal) => {
                let why = refusal.to_string();
                let line = format!("no Python stacks of process {tgid} ({}): {why}", target.process.command);
                target.python = Python::Refused { why };
                return self.note(line);
            }
        };
        let memory = match Memory::of(&self.config.proc, tgid) {
            Ok(memory) => memory,
            Err(e) => {
                return self.note(format!("no Python stacks of process {tgid}: its memory is shut ({e})"));
            }
        };
        let mapped = target.process.mapped_files().unwrap_or_default();
        let origins = Origins::of(mapped.iter().filter_map(|file| file.path.to_str()));
        target.python = Python::Ready { version: interpreter.version.clone() };
        if let Err(e) = self.attacher.take_stacks(&target.process, &interpreter, clock(libc::CLOCK_MONOTONIC))
        {
            return self.note(format!("no Python stacks of process {tgid}: {e}"));
        }
        self.decoder.stacks.begin(tgid, memory, *interpreter, origins);
    }

    /// Keeps up with threads that come and go.
    fn tend_threads(&mut self) {
        let proc = self.config.proc.clone();
        let mut full = false;
        for (tgid, target) in self.targets.iter().filter(|(_, target)| target.ended.is_none()) {
            self.attacher.note_robust_lists(&target.process);
            full |= self.decoder.stacks.tally(*tgid).is_some_and(|tally| tally.has(Reason::NoRoom));
        }
        if full {
            self.attacher.forget_ended_threads(|tid| !proc.has_thread(tid));
        }
    }

    fn began_line(&self, tgid: Tgid, attached: &Attached) -> String {
        let target = &self.targets[&tgid];
        let mut what = Vec::new();
        if let Some(version) = &target.torch_npu {
            what.push(format!("torch_npu {version}"));
        }
        let devices = target.process.open_devices();
        if let Python::Ready { version } = &target.python {
            what.push(format!("Python {version}"));
        }
        if !devices.is_empty() {
            let list: Vec<_> = devices.iter().map(u16::to_string).collect();
            what.push(format!("NPU {}", list.join(", ")));
        }
        if let Some(container) = &target.process.container {
            what.push(format!("container {}", container.id.get(..12).unwrap_or(&container.id)));
        }
        if let Some(pid) = target.process.own_pid {
            what.push(format!("there process {pid}"));
        }
        let missing =
            self.attacher.sites().iter().filter(|s| s.scope == target.scope && s.failure().is_some()).count();
        let mut sites = format!(
            "{} in {}",
            units::count_of(attached.reached as u64, "site"),
            units::count_of(attached.libraries as u64, "library")
        );
        if missing > 0 {
            sites.push_str(&format!(", {missing} not found (memscope-trace probes -p {tgid})"));
        }
        let what = if what.is_empty() { sites } else { format!("{}; {sites}", what.join(", ")) };
        format!("tracing {tgid} ({}): {what}", target.process.command)
    }

    /// Looks for processes that are to be traced, and for libraries whose loading nothing announced.
    fn scan(&mut self) {
        let known: Vec<Tgid> =
            self.targets.iter().filter(|(_, t)| t.ended.is_none()).map(|(tgid, _)| *tgid).collect();
        for tgid in known {
            self.try_attach(tgid);
        }
        if self.attacher.takes_stacks() {
            self.tend_threads();
        }
        if self.last_sweep.elapsed() >= SWEEP {
            self.last_sweep = Instant::now();
            self.attacher.sweep();
        }
        let proc = self.config.proc.clone();
        let wanted: Option<String> = match &self.config.targets {
            Targets::Called(name) => Some(name.clone()),
            Targets::All | Targets::Command(_) => None,
            Targets::Processes(_) => return,
        };
        let descendants_only = matches!(self.config.targets, Targets::Command(_));
        let attacher = &mut self.attacher;
        self.strangers.retain(|tgid, start| {
            let is_there = proc.start_time(*tgid) == *start;
            if !is_there {
                attacher.forget_verdict(*tgid);
            }
            is_there
        });
        for tgid in proc.processes() {
            let is_wanted = match &wanted {
                Some(name) => proc.comm(tgid) == *name,
                None => !self.strangers.contains_key(&tgid),
            };
            if self.is_target(tgid) || !is_wanted {
                continue;
            }
            if !descendants_only {
                self.consider(tgid);
            } else if self.descends(tgid) {
                // Not announced: its parent is linked statically, and so has no dynamic linker to probe.
                self.meet(tgid);
            }
        }
    }

    /// Makes a process a target if it has Ascend libraries.
    fn consider(&mut self, tgid: Tgid) {
        if Some(tgid) == self.config.proc.own_tgid() {
            return;
        }
        let Ok(process) = Process::open(&self.config.proc, tgid) else { return };
        let Ok(files) = process.mapped_files() else { return };
        if !files.iter().any(|file| is_ascend_library(&file.path)) {
            return;
        }
        let scope = if let Targets::All = self.config.targets { Scope::Host } else { Scope::Process(tgid) };
        self.adopt_newcomer(process, scope);
    }

    /// Attaches what the dynamic linker has announced. The process runs on meanwhile.
    fn attach_mapped(&mut self, tgid: Tgid, since: u64) {
        let attached = self.try_attach(tgid);
        if self.is_fresh(&attached)
            && let Some(target) = self.targets.get_mut(&tgid)
        {
            let late = Duration::from_nanos(clock(libc::CLOCK_MONOTONIC).saturating_sub(since));
            target.late = Some(target.late.unwrap_or_default().max(late));
        }
    }

    /// Whether allocation sites were attached that no process had been probed at before.
    fn is_fresh(&self, attached: &Attached) -> bool {
        attached.sites.iter().any(|site| self.attacher.sites()[*site].probe.class == Class::Memory)
    }

    fn try_attach(&mut self, tgid: Tgid) -> Attached {
        match self.attach(tgid) {
            Ok(attached) => return attached,
            // It is ending: its pidfd will say so.
            Err(TraceError::Attach(AttachError::Process(ProcessError::NoSuchProcess(_)))) => {}
            Err(e) => self.note(format!("libraries that {tgid} has loaded are not traced: {e}")),
        }
        Attached::default()
    }

    fn note(&mut self, line: String) {
        if self.notes.contains(&line) {
            return;
        }
        self.progress.note(line.clone());
        if self.notes.len() < MOST_NOTES {
            self.notes.push(line);
        } else {
            self.notes_left_out += 1;
        }
    }

    /// Decodes what is in the ring buffer, at most `most` records; whether it was emptied.
    fn drain(&mut self, records: &mut RingBuf<MapData>, most: usize) -> bool {
        let mut mapped: Vec<(Tgid, u64)> = Vec::new();
        let mut emptied = false;
        let mut events = Vec::new();
        for _ in 0..most {
            let Some(record) = records.next() else {
                emptied = true;
                break;
            };
            if let Some(recorder) = &mut self.recorder {
                recorder.record(&record);
            }
            let notice = self.decoder.decode(&record, |event| events.push(event));
            drop(record);
            for event in events.drain(..) {
                self.observe(event);
            }
            match notice {
                None => {}
                Some(Notice::Mapped(tgid, _)) if mapped.iter().any(|(known, _)| *known == tgid) => {}
                Some(Notice::Mapped(tgid, since)) => mapped.push((tgid, since)),
                Some(Notice::Exec(tgid)) if !self.is_target(tgid) => self.begins(tgid),
                Some(Notice::Exec(tgid)) => {
                    if let Some(target) = self.targets.get_mut(&tgid) {
                        target.process.refresh();
                        target.torch_npu = None;
                        target.python = Python::default();
                        self.attacher.forget_libraries(tgid);
                        mapped.push((tgid, clock(libc::CLOCK_MONOTONIC)));
                    }
                }
                Some(Notice::Distrust { site, why }) => self.distrust(site, why),
            }
        }
        for (tgid, since) in mapped {
            if self.is_target(tgid) {
                self.attach_mapped(tgid, since);
            } else {
                self.meet(tgid);
            }
        }
        emptied
    }

    fn distrust(&mut self, site: usize, why: String) {
        let Some(state) = self.attacher.sites().get(site) else { return };
        if state.is_attached() {
            let line = format!("{} in {}: {why}", state.probe.site, state.file);
            self.attacher.disable(site, why);
            self.note(line);
        }
    }

    /// A process that host-wide sites were hit by, and that is not a target yet. Whether it is one now.
    fn meet(&mut self, tgid: Tgid) -> bool {
        if self.strangers.contains_key(&tgid) {
            return false;
        }
        match &self.config.targets {
            Targets::All => {
                self.consider(tgid);
                self.is_target(tgid)
            }
            Targets::Called(name) if self.config.proc.comm(tgid) == *name => {
                self.consider(tgid);
                self.is_target(tgid)
            }
            Targets::Command(_) if self.descends(tgid) => match Process::open(&self.config.proc, tgid) {
                Ok(process) => {
                    self.adopt_newcomer(process, Scope::Host);
                    true
                }
                Err(_) => false,
            },
            _ => {
                let _ = self.attacher.judge(tgid, false);
                self.strangers.insert(tgid, self.config.proc.start_time(tgid));
                false
            }
        }
    }

    /// Makes a process a target that began during the trace. Only a command itself is held until its sites are
    /// attached.
    fn adopt_newcomer(&mut self, process: Process, scope: Scope) {
        let tgid = process.tgid;
        let age = self.config.proc.age(tgid).unwrap_or_default();
        match self.adopt(process, scope) {
            Ok(attached) if self.is_fresh(&attached) && age < self.started.elapsed() => {
                if let Some(target) = self.targets.get_mut(&tgid) {
                    target.late = Some(age);
                }
            }
            Ok(_) => {}
            // Its pidfd will say so.
            Err(TraceError::Attach(AttachError::Process(ProcessError::NoSuchProcess(_)))) => {}
            Err(e) => self.note(format!("process {tgid} is not traced: {e}")),
        }
    }

    /// Whether a process is a child, grandchild, … of a target.
    fn descends(&self, tgid: Tgid) -> bool {
        let mut at = tgid;
        for _ in 0..64 {
            let Some((parent, _)) = self.config.proc.parent_and_session(at) else { return false };
            if self.targets.contains_key(&parent) {
                return true;
            }
            if parent.0 <= 1 {
                return false;
            }
            at = parent;
        }
        false
    }

    fn observe(&mut self, event: Event) {
        // What a process begins with is no event of one that is not looked at yet.
        let is_begin = event.kind == EventKind::Exec;
        if !self.is_target(event.tgid) && (is_begin || !self.meet(event.tgid)) {
            // Whoever is of no interest is there, or was judged.
            let is_gone = || self.config.proc.start_time(event.tgid).is_none();
            if !is_begin && !self.strangers.contains_key(&event.tgid) && is_gone() {
                self.missed.count(event.tgid);
            }
            self.decoder.forget(event.tgid);
            return;
        }
        self.take(event);
    }

    fn take(&mut self, event: Event) {
        self.timing.first_event_ns.get_or_insert(event.time);
        let (dump, config) = (self.dump.as_ref(), &self.config);
        self.online.feed(event, |event, change, ledger| write_rows(dump, config, event, change, ledger));
    }

    /// Lets go of events that have waited for a step to begin before them for as long as is allowed.
    fn release(&mut self) {
        let (dump, config) = (self.dump.as_ref(), &self.config);
        let before = Nanos(now().0.saturating_sub(HELD.as_nanos() as u64));
        self.online.release(before, |event, change, ledger| write_rows(dump, config, event, change, ledger));
    }

    fn target_exited(&mut self, tgid: Tgid) {
        let Some(target) = self.targets.get_mut(&tgid).filter(|target| target.ended.is_none()) else {
            return;
        };
        let ending = self.attacher.ending(tgid);
        let line = ended_line(&target.process, &ending);
        target.ended = Some(ending);
        match self.config.proc.cpu_time(tgid) {
            Some(used) => target.cpu.1 = used,
            None => self.is_end_missed = true,
        }
        self.attacher.forget(tgid);
        self.decoder.forget(tgid);
        self.take(Event { time: now(), tgid, tid: crate::model::Tid(tgid.0), kind: EventKind::Exit });
        if let Some(line) = line {
            self.note(line);
        }
    }

    /// The command that was started here, of which its parent is told the end on every kernel.
    fn root_ended(&mut self, root: Tgid, status: ExitStatus) {
        let Some(Target { process, ended: Some(ending), .. }) = self.targets.get_mut(&root) else { return };
        if ending.status.is_none() {
            ending.status = Some(status);
            if let Some(line) = ended_line(process, ending) {
                self.note(line);
            }
        }
    }

    /// Whether it is traced and has not ended: another process may have its id by now.
    fn is_target(&self, tgid: Tgid) -> bool {
        self.targets.get(&tgid).is_some_and(|target| target.ended.is_none())
    }

    /// Whether there is nothing left to wait for.
    fn is_over(&self) -> bool {
        match self.config.targets {
            Targets::All => false,
            Targets::Command(_) | Targets::Called(_) | Targets::Processes(_) => {
                self.targets.values().all(|t| t.ended.is_some())
            }
        }
    }

    /// What happened at all sites so far. Each counter is a call into the kernel: one pass for all who ask.
    fn sums(&self) -> Sums {
        let mut sums = Sums::default();
        for (site, counters) in self.attacher.tallies() {
            sums.lost += lost(&counters);
            match site.probe.shape.has_return() {
                true => sums.with_return += counters.entries(),
                false => sums.entry += counters.entries(),
            }
        }
        sums
    }

    /// Hits of which there is no record, for no reason that was counted.
    fn unaccounted(&self) -> u64 {
        let (mut due, mut lost_total) = (0, 0);
        for (_, counters) in self.attacher.tallies() {
            due += counters.hits;
            lost_total += lost(&counters);
        }
        due.saturating_sub(self.decoder.received + lost_total + self.attacher.open_calls())
    }

    /// Has it measured what a hit costs, on a thread of its own: the trace does not wait for it.
    fn measure_prices(&self) {
        let (prices, proc, mechanism) =
            (self.prices.clone(), self.config.proc.clone(), self.attacher.mechanism());
        let measuring = move || match cost::measure(&proc, Some(mechanism), Effort::BRIEF) {
            Ok((_, measured)) => {
                let _ = prices.set(measured);
            }
            Err(e) => tracing::debug!("what a probe costs is not known: {e}"),
        };
        let _ = std::thread::Builder::new().name("cost".into()).spawn(measuring);
    }

    /// What the probes have cost the targets so far.
    fn share(&mut self, sums: Sums) -> Option<Share> {
        let prices = *self.prices.get()?;
        let mut used = Duration::ZERO;
        for (tgid, target) in &mut self.targets {
            if target.ended.is_none()
                && let Some(now) = self.config.proc.cpu_time(*tgid)
            {
                target.cpu.1 = now;
            }
            used += target.cpu.1.saturating_sub(target.cpu.0);
        }
        Some(Share::new(prices, sums.entry, sums.with_return, used.as_nanos() as u64))
    }

    fn show_status(&mut self) {
        let sums = self.sums();
        self.last_share = self.share(sums);
        let probes = self.last_share.and_then(|share| share.of_target());
        let live = Live {
            online: &self.online,
            received: self.decoder.received,
            lost: sums.lost,
            probes,
            elapsed: self.started.elapsed(),
        };
        self.progress.status(&live);
    }

    fn finish(mut self) -> (Document, Attacher) {
        let (dump, config) = (self.dump.as_ref(), &self.config);
        self.online.finish(|event, change, ledger| write_rows(dump, config, event, change, ledger));
        let dump = self.dump.take().map(|dump| {
            let mut summary = dump.finish();
            // Rows without a device, of a process image that had none: no file was due.
            summary.files.retain(|file| file.rows > 0 || file.failure.is_some());
            let complete = summary.is_complete();
            let missing: u64 = summary.files.iter().map(|file| file.missing_rows).sum();
            let removed: u64 = summary.files.iter().map(|file| file.removed_rows).sum();
            let reason = summary
                .files
                .iter()
                .find_map(|file| file.failure.as_ref())
                .map(|why| format!("{why}; missing: {}", units::count_of(missing, "row")))
                .or_else(|| {
                    (summary.dropped_rows > 0).then(|| {
                        let dropped = units::were(summary.dropped_rows, "row");
                        format!("{dropped} dropped: the disk could not keep up")
                    })
                })
                .or_else(|| summary.crashed.then(|| "the writer failed".to_owned()))
                .or_else(|| {
                    (removed > 0).then(|| {
                        format!("the oldest {removed} rows had to go for --max-size; the blocks alive then are all there")
                    })
                });
            let path = common_parent(summary.files.iter().map(|f| f.path.as_path()));
            (path, complete, reason)
        });
        // Hits until the end by CPU time until some time before would be too much.
        let share = if self.is_end_missed { self.last_share } else { self.share(self.sums()) };
        let probe_cost = share.map(ProbeCost::from);
        let mut received = self.decoder.received;
        let mut lost_total = 0;
        let mut sites = Vec::new();
        let unmatched = self.unaccounted();
        for (state, counters) in self.attacher.tallies() {
            lost_total += lost(&counters);
            // Seen as well, though not sent.
            received += counters.unsent;
            // A stand-in that was not needed is of no interest.
            if matches!(state.status, Status::Superseded(_)) && counters.entries() == 0 {
                continue;
            }
            sites.push(Site {
                site: state.probe.site.to_owned(),
                file: Some(state.file.to_string()).filter(|f| !f.is_empty()),
                build_id: state.build_id.as_deref().map(str::to_owned),
                offset: state.found.map(|f| f.offset),
                attached: matches!(state.status, Status::Attached | Status::Ended),
                hits: counters.entries(),
                lost: lost(&counters),
                reason: match &state.status {
                    Status::Superseded(why) => Some(why.clone()),
                    _ => state.failure().map(str::to_owned),
                },
            });
        }
        if unmatched > 0 {
            lost_total += unmatched;
            self.notes.push(format!(
                "of {} no return was seen (more threads within calls at a time than can be followed, or calls left by \
                 other ways): what they did is lost",
                units::count_of(unmatched, "call")
            ));
        }
        if lost_total > unmatched {
            self.notes.push(format!(
                "{} lost: figures are a lower bound, and a block whose free was lost looks \
                 leaked; a larger --ring-size (now {} bytes) helps, or fewer events: --level op, --events none",
                units::were(lost_total - unmatched, "event"),
                self.config.ring_bytes
            ));
        }
        if self.decoder.malformed > 0 {
            self.notes.push(format!(
                "{} could not be decoded: a fault of the tracer",
                units::count_of(self.decoder.malformed, "record")
            ));
        }
        self.notes.extend(self.missed.note());
        if self.notes_left_out > 0 {
            let more = units::count_of(self.notes_left_out, "more note");
            self.notes.push(format!("{more}, said while tracing"));
        }
        for tgid in &self.order {
            if let Some(Target { late: Some(late), process, .. }) = self.targets.get(tgid) {
                self.notes.push(format!(
                    "process {tgid} ({}) ran for up to {} ms with Ascend libraries that were not probed yet: what it \
                     did then is not traced",
                    process.command,
                    late.as_millis() + 1
                ));
            }
        }
        let targets = self
            .order
            .iter()
            .filter_map(|tgid| {
                let target = self.targets.get(tgid)?;
                let process = self.online.ledger.process(*tgid);
                let mut devices: Vec<DeviceId> = process
                    .map(|p| p.devices().iter().filter_map(|d| d.device).collect())
                    .unwrap_or_default();
                devices.sort_unstable();
                Some(TargetFacts {
                    pid: *tgid,
                    command: target.process.command.clone(),
                    container: target.process.container.clone(),
                    own_pid: target.process.own_pid,
                    ended: target.ended.as_ref().map(|ending| Ended {
                        exit_code: ending.status.and_then(|status| status.code()),
                        signal: ending.status.and_then(|status| status.signal()).map(signal_name),
                        within: ending.within.clone(),
                    }),
                    devices,
                    torch_npu: target.torch_npu.clone(),
                    python: match &target.python {
                        Python::Ready { version } => Some(version.clone()),
                        Python::Looking { .. } | Python::Refused { .. } => None,
                    },
                    stacks: self.attacher.takes_stacks().then(|| {
                        let why = match &target.python {
                            Python::Refused { why } => Some(why.clone()),
                            _ => None,
                        };
                        StackFacts::new(self.decoder.stacks.tally(*tgid), why)
                    }),
                    native_stacks: self.attacher.native_stacks().map(|wanted| {
                        let natives = self.decoder.stacks.native.as_ref();
                        let tally = natives.and_then(|natives| natives.tally(*tgid));
                        NativeStackFacts::new(tally, wanted.pool_bytes)
                    }),
                })
            })
            .collect();
        let trace = Trace {
            offline: false,
            targets,
            sites,
            events: Events { received, lost: lost_total },
            dump: dump.and_then(|(path, complete, reason)| {
                Some(Dump { path: path?.display().to_string(), complete, reason })
            }),
            timing: Timing { ended_ns: now(), ..self.timing },
            probe_cost,
            notes: self.notes,
        };
        let mut document = Document::new(trace, &self.online);
        document.select(&self.config.only_devices, &self.config.only_steps);
        if let StepRule::Matching(pattern) = &self.config.steps
            && document.steps.iter().all(|step| step.inferred)
            && self.config.steps_from != StepsFrom::Ops
        {
            let seen = document.marks_seen(5);
            let seen = if seen.is_empty() { "there were none".to_owned() } else { format!("seen: {seen}") };
            document.notes.push(format!("no mark or range matched --step-mark {pattern}; {seen}"));
        }
        (document, self.attacher)
    }
}

/// Puts what an event changed into the dump, as far as it is wanted there.
fn write_rows(dump: Option<&Pipeline>, config: &Config, event: &Event, change: &Change, ledger: &Ledger) {
    let Some(dump) = dump else { return };
    let selection = config.dump;
    let wanted = match &event.kind {
        EventKind::Alloc(_) | EventKind::Free(_) | EventKind::Map { .. } | EventKind::Unmap { .. } => {
            selection.memory
        }
        EventKind::Op { .. } | EventKind::Launch { .. } => selection.launches,
        EventKind::Access(_) => selection.accesses,
        _ => true,
    };
    let step = ledger.process(event.tgid).map(|process| process.steps().current());
    if !wanted || step.is_some_and(|step| !selects(&config.only_steps, step.0)) {
        return;
    }
    rows_of(event, change, ledger, |mut row| {
        if config.decompose
            && let Fact::Event(EventKind::Alloc(alloc)) = &row.fact
        {
            row.owner = ledger.process(event.tgid).and_then(|process| owner(process, alloc, event.tid));
        }
        match row.place() {
            Some(Place::Npu(device)) if !selects(&config.only_devices, device.0) => {}
            _ => dump.push(row),
        }
    });
}

/// Labels of what a thread allocates now: the operator, and what the program calls it.
fn owner(process: &crate::model::Process, alloc: &Alloc, tid: Tid) -> Option<Name> {
    let op = process.current_op(tid).filter(|_| !matches!(alloc.pool, Pool::Hal | Pool::Host));
    match (op, process.label(tid, alloc.stack.as_deref())) {
        (Some(op), Some(label)) => Some(format!("ops@{op}@{label}").into()),
        (Some(op), None) => Some(format!("ops@{op}").into()),
        (None, label) => label,
    }
}

/// That a process did not end well.
fn ended_line(process: &Process, ending: &Ending) -> Option<String> {
    let status = ending.status?;
    let how = match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was killed by {}", signal_name(signal)),
        (None, Some(code)) if code != 0 => format!("ended with exit code {code}"),
        _ => return None,
    };
    let within = match ending.within.as_slice() {
        [] => String::new(),
        within => format!(", within {}", within.join(", ")),
    };
    Some(format!("process {} ({}) {how}{within}", process.tgid, process.command))
}

fn signal_name(signal: i32) -> String {
    Signal::try_from(signal).map_or_else(|_| format!("signal {signal}"), |signal| signal.as_str().to_owned())
}

/// Over all sites: records lost, and entries of functions without and with a return probe.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    lost: u64,
    entry: u64,
    with_return: u64,
}

fn lost(counters: &Counters) -> u64 {
    counters.ring_full + counters.map_full
}

/// Whether a list that is empty for "all" has it.
fn selects<T: PartialEq>(list: &[T], item: T) -> bool {
    list.is_empty() || list.contains(&item)
}

/// The directory that holds all files; the file itself where there is one.
fn common_parent<'a>(mut paths: impl Iterator<Item = &'a std::path::Path>) -> Option<PathBuf> {
    let mut common = paths.next()?.to_path_buf();
    for path in paths {
        while !path.starts_with(&common) {
            common.pop();
        }
    }
    Some(common)
}

/// What could not be read of a process's files: sites in them, and an interpreter, stay unknown.
fn denied(process: &Process, files: &[String]) -> String {
    let more = match files.len().saturating_sub(1) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!(
        "may not read {}{more} of process {} ({}): what is in there is not traced, and without its interpreter there are no \
         Python stacks. CAP_DAC_READ_SEARCH reads files of others, CAP_CHECKPOINT_RESTORE those that are gone from the disk: {}",
        files.first().map_or("", String::as_str),
        process.tgid,
        process.command,
        privilege::how_to_get(&[])
    )
}

/// The libraries that are looked for, for people.
pub fn wanted_libraries() -> String {
    let mut names: Vec<&str> = CATALOGUE.iter().flat_map(|p| p.libraries.iter().copied()).collect();
    names.sort_unstable();
    names.dedup();
    names.join(", ")
}

fn now() -> Nanos {
    Nanos(clock(libc::CLOCK_REALTIME))
}

fn clock(id: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec of ours.
    unsafe { libc::clock_gettime(id, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Wall clock minus monotonic clock in ns, the one offset of a trace. Of a few readings the one that was
/// interrupted least.
fn clock_offset() -> i64 {
    let reading = || {
        let before = clock(libc::CLOCK_MONOTONIC);
        let wall = clock(libc::CLOCK_REALTIME);
        let after = clock(libc::CLOCK_MONOTONIC);
        (after - before, wall as i64 - (before + (after - before) / 2) as i64)
    };
    (0..5).map(|_| reading()).min().map(|(_, offset)| offset).unwrap_or_default()
}

/// A text in a target's memory, up to its NUL.
fn read_text(memory: &Memory, address: u64, most: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; most];
    let mut filled = 0;
    // To the end of the page first: the next one may not be there.
    for end in [most.min(4096 - (address as usize & 4095)), most] {
        if filled >= end {
            continue;
        }
        match memory.read_some(address.checked_add(filled as u64)?, &mut bytes[filled..end]) {
            Some(n) => filled += n,
            None if filled == 0 => return None,
            None => break,
        }
        if bytes[..filled].contains(&0) {
            break;
        }
    }
    bytes.truncate(filled);
    if let Some(end) = bytes.iter().position(|b| *b == 0) {
        bytes.truncate(end);
    }
    Some(bytes)
}
