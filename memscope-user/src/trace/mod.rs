//! A trace from its start to its report: targets, sites, ring buffer, ledger, dump.

mod closing;
mod rows;
mod tally;
mod targets;

use std::{
    collections::{HashMap, HashSet},
    ffi::OsString,
    io,
    path::PathBuf,
    process::ExitStatus,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use aya::maps::{MapData, RingBuf};
use tokio::{
    io::unix::AsyncFd,
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::{MissedTickBehavior, interval, sleep_until},
};

pub use self::targets::wanted_libraries;
use self::{
    rows::write_rows,
    tally::Look,
    targets::{Missed, Python, Target},
};
use crate::{
    analysis::{Online, inefficient},
    attach::{
        AttachError, Attacher, Mechanism, NativeStackConfig, StackConfig,
        cost::Prices,
        kernel,
        proc::{Proc, ProcError},
        process::ProcessError,
        spawn::{Family, SpawnError},
    },
    collect::{
        decode::{Decoder, Notice},
        tape::Recorder,
    },
    dump::{Caller, Format, OutputError, Pipeline, StackStyle},
    model::{Event, EventKind, Nanos, StepRule, StepSet, StepsFrom, Tgid},
    probes::catalogue::Class,
    report::document::{Document, Timing},
    stacks::{Memory, Natives},
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
/// How long is waited for what the command has started when that has ended: most of it is ending too.
const LAST_RELATIVES: Duration = Duration::from_millis(500);
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
    #[error("{0}; choose another one with --output")]
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
    /// Only these steps are reported and dumped.
    pub only_steps: StepSet,
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
    /// See [`crate::attach::Config::call_threads`].
    pub call_threads: Option<u32>,
    /// See [`Online::with_oom_blocks`].
    pub oom_blocks: Option<usize>,
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
    /// What the command and its descendants are known by.
    family: Option<Family>,
    /// What probes cost here, once that has been measured.
    prices: Arc<OnceLock<Prices>>,
    /// As of the last status.
    last_look: Look,
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
        call_threads: config.call_threads,
        own_numbers: config.proc.has_own_numbers(),
    })?;
    config.proc.check_numbers(kernel::own_tgid())?;
    // SAFETY: the ring buffer keeps its descriptor, and keeps it open, for as long as it lives.
    let mut records = unsafe { AsyncFd::register(records) }.map_err(|e| e.into_parts().1)?;
    let record = config.record.as_deref().map(Recorder::create).transpose().map_err(TraceError::Record)?;
    let (exits, mut exited) = mpsc::unbounded_channel();
    let mut online =
        Online::new(config.steps.clone(), config.leaks).with_steps_from(&config.steps, config.steps_from);
    online = online.showing_steps(config.only_steps.clone()).with_oom_blocks(config.oom_blocks);
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
        family: None,
        prices: Arc::default(),
        last_look: Look::default(),
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
    let mut over: Option<Instant> = None;
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
                if session.is_over() && session.relatives().is_empty() {
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
                if session.root.is_some() && session.is_over() {
                    let since = over.get_or_insert_with(Instant::now);
                    if since.elapsed() > LAST_RELATIVES || session.relatives().is_empty() {
                        break;
                    }
                }
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
        session.note_relatives();
    }
    if let Some(recorder) = session.recorder.take() {
        recorder.close().map_err(TraceError::Record)?;
    }
    let (document, probes) = session.finish();
    Ok(Outcome { document, status, probes })
}

impl Session<'_> {
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
        let (mut queues, mut emptied) = (Vec::new(), false);
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
                        target.is_queue_followed = false;
                        self.attacher.forget_libraries(tgid);
                        mapped.push((tgid, clock(libc::CLOCK_MONOTONIC)));
                    }
                }
                Some(Notice::QueueAllocates(tgid)) => queues.push(tgid),
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
        for tgid in queues {
            self.follow_queue(tgid);
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

    fn show_status(&mut self) {
        self.last_look = self.look();
        let probes = self.share(self.last_look).and_then(|share| share.of_target());
        let live = Live {
            online: &self.online,
            received: self.decoder.received,
            lost: self.last_look.sums.lost,
            probes,
            elapsed: self.started.elapsed(),
        };
        self.progress.status(&live);
    }
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
