//! Whom a trace looks at: processes that are named, that come, load libraries, run another program, end.

use std::{
    os::unix::process::ExitStatusExt,
    process::{Child, ExitStatus},
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use tokio::{io::unix::AsyncFd, time::sleep};

use super::{SCAN, SWEEP, Session, TICK, Targets, TraceError, clock, now};
use crate::{
    attach::{
        AttachError, Attached, Ending, Scope, privilege,
        process::{Life, Process, ProcessError},
        spawn::{Family, Held},
    },
    model::{Event, EventKind, Tgid, Tid},
    probes::catalogue::{CATALOGUE, Class, is_ascend_library},
    report::units,
    stacks::{Found, Interpreter, Origins, Reason},
};

pub(super) struct Target {
    pub(super) process: Process,
    pub(super) scope: Scope,
    pub(super) torch_npu: Option<String>,
    pub(super) python: Python,
    pub(super) is_queue_followed: bool,
    /// The longest time between its having Ascend libraries and their being probed, where it began, or loaded them,
    /// during the trace.
    pub(super) late: Option<Duration>,
    /// CPU time that it had used when it was attached, and last.
    pub(super) cpu: (Duration, Duration),
    pub(super) ended: Option<Ending>,
}

/// What is known of a target's Python interpreter.
pub(super) enum Python {
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

/// How far the age of a process may be off, at most: two clock ticks, and some.
const AGE_ERROR: Duration = Duration::from_millis(50);

/// Processes named that run on after the command.
const RELATIVES_NAMED: usize = 10;

/// Processes that ended before they could be looked at, but for their events.
#[derive(Default)]
pub(super) struct Missed {
    last: Option<Tgid>,
    processes: u64,
    events: u64,
}

impl Missed {
    pub(super) fn count(&mut self, tgid: Tgid) {
        self.processes += u64::from(self.last.replace(tgid) != Some(tgid));
        self.events += 1;
    }

    pub(super) fn note(&self) -> Option<String> {
        let last = self.last?;
        Some(format!(
            "{} of up to {} that ended before they could be looked at, the last {last}, are not in the figures",
            units::count_of(self.events, "event"),
            units::count_of(self.processes, "process")
        ))
    }
}

impl Session<'_> {
    pub(super) fn start(&mut self) -> Result<Option<Child>, TraceError> {
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
                let family = Family::unique();
                let held = Held::start(&words, self.config.stdout_is_taken, &family)?;
                self.family = Some(family);
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
    pub(super) fn begins(&mut self, tgid: Tgid) {
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
                is_queue_followed: false,
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
        if target.torch_npu.is_some() && target.process.allocates_in_queue {
            self.follow_queue(tgid);
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
        let inherited = self.attacher.inherited(tgid);
        if let Some(version) = inherited.and_then(|image| self.decoder.stacks.inherit(tgid, image)) {
            target.python = Python::Ready { version: version.to_owned() };
            return;
        }
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
        let mapped = target.process.mapped_files().unwrap_or_default();
        let origins = Origins::of(mapped.iter().filter_map(|file| file.path.to_str()));
        let (version, image) = (interpreter.version.clone(), clock(libc::CLOCK_MONOTONIC));
        let known =
            self.decoder.stacks.begin(tgid, image, &self.config.proc, (*interpreter).clone(), origins);
        if let Err(e) = known {
            return self.note(format!("no Python stacks of process {tgid}: its memory is shut ({e})"));
        }
        target.python = Python::Ready { version };
        if let Err(e) = self.attacher.take_stacks(&target.process, &interpreter, image) {
            self.note(format!("no Python stacks of process {tgid}: {e}"));
        }
    }

    /// Has the stacks of calls taken that torch_npu's task queue runs operators for. What allocates in there has none itself.
    pub(super) fn follow_queue(&mut self, tgid: Tgid) {
        let Some(target) = self.targets.get_mut(&tgid) else { return };
        if !self.attacher.takes_stacks() || std::mem::replace(&mut target.is_queue_followed, true) {
            return;
        }
        let followed = self.attacher.follow_queue(&target.process);
        self.introduce_sites();
        if let Err(why) = followed {
            self.note(format!(
                "what the task queue of process {tgid} allocates (TASK_QUEUE_ENABLE=2) has no Python stacks: {why}"
            ));
        }
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
    pub(super) fn scan(&mut self) {
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
    pub(super) fn attach_mapped(&mut self, tgid: Tgid, since: u64) {
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

    /// A process that host-wide sites were hit by, and that is not a target yet. Whether it is one now.
    pub(super) fn meet(&mut self, tgid: Tgid) -> bool {
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
            Targets::Command(_) if self.may_be_within_exec(tgid) => false,
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

    /// Whether a process is a child, grandchild, … of a target, or was when its parents lived.
    fn descends(&self, tgid: Tgid) -> bool {
        // Nearly all of a host: they need no closer look, every second.
        let is_older = |age| age > self.started.elapsed() + AGE_ERROR;
        if self.config.proc.age(tgid).is_some_and(is_older) {
            return false;
        }
        self.has_living_ancestor(tgid)
            || self.family.as_ref().is_some_and(|family| family.has(&self.config.proc, tgid))
    }

    /// Whether a process shows no environment as yet, by which it would be known: whose it is will be seen later.
    fn may_be_within_exec(&self, tgid: Tgid) -> bool {
        let proc = &self.config.proc;
        !proc.shows_environment(tgid) && proc.age(tgid).is_some_and(|age| age < SCAN)
    }

    fn has_living_ancestor(&self, tgid: Tgid) -> bool {
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

    pub(super) fn target_exited(&mut self, tgid: Tgid) {
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
        self.take(Event { time: now(), tgid, tid: Tid(tgid.0), kind: EventKind::Exit });
        if let Some(line) = line {
            self.note(line);
        }
    }

    /// The command that was started here, of which its parent is told the end on every kernel.
    pub(super) fn root_ended(&mut self, root: Tgid, status: ExitStatus) {
        let Some(Target { process, ended: Some(ending), .. }) = self.targets.get_mut(&root) else { return };
        if ending.status.is_none() {
            ending.status = Some(status);
            if let Some(line) = ended_line(process, ending) {
                self.note(line);
            }
        }
    }

    /// Whether it is traced and has not ended: another process may have its id by now.
    pub(super) fn is_target(&self, tgid: Tgid) -> bool {
        self.targets.get(&tgid).is_some_and(|target| target.ended.is_none())
    }

    /// Whether there is nothing left to wait for.
    pub(super) fn is_over(&self) -> bool {
        match self.config.targets {
            Targets::All => false,
            Targets::Command(_) => self.root.is_none_or(|root| !self.is_target(root)),
            Targets::Called(_) | Targets::Processes(_) => self.targets.values().all(|t| t.ended.is_some()),
        }
    }

    /// What the command has started that has not ended.
    pub(super) fn relatives(&self) -> Vec<Tgid> {
        let Some(family) = &self.family else { return Vec::new() };
        let proc = &self.config.proc;
        let mut relatives: Vec<Tgid> = proc.processes();
        relatives
            .retain(|tgid| Some(*tgid) != self.root && (self.is_target(*tgid) || family.has(proc, *tgid)));
        relatives.sort_unstable();
        relatives
    }

    /// Says what runs on although the command has ended.
    pub(super) fn note_relatives(&mut self) {
        let relatives = self.relatives();
        if relatives.is_empty() {
            return;
        }
        let one = |tgid: &Tgid| format!("{tgid} ({})", self.config.proc.comm(*tgid));
        let mut list: Vec<String> = relatives.iter().take(RELATIVES_NAMED).map(one).collect();
        if let Some(more) = relatives.len().checked_sub(RELATIVES_NAMED).filter(|more| *more > 0) {
            list.push(format!("{more} more"));
        }
        let (processes, run) = match relatives.len() {
            1 => ("process".to_owned(), "runs"),
            several => (format!("{several} processes"), "run"),
        };
        let pids: Vec<String> =
            relatives.iter().take(RELATIVES_NAMED).map(|tgid| format!("-p {tgid}")).collect();
        self.note(format!(
            "the command has ended, and {processes} that it started {run} on, not traced from here: {}; memscope-trace {} \
             traces on",
            list.join(", "),
            pids.join(" ")
        ));
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

pub(super) fn signal_name(signal: i32) -> String {
    Signal::try_from(signal).map_or_else(|_| format!("signal {signal}"), |signal| signal.as_str().to_owned())
}
