//! Processes, their libraries, what the kernel can do, and attaching programs to sites.

mod btf;
mod container;
pub mod cost;
pub mod kernel;
mod loader;
pub mod privilege;
pub mod proc;
pub mod process;
pub mod spawn;
mod sys;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    ffi::CString,
    fs::File,
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::process::ExitStatusExt,
    },
    path::Path,
    process::ExitStatus,
    sync::Arc,
};

use aya::maps::{MapData, RingBuf};
use memscope_ebpf::{
    ApiCall, Counters, InFlight, InFlightKey, Interpreter, NO_ARG, NativeConfig, ProcessConfig, SITE_ANY,
    Site, Thread, verdict,
};

pub use loader::LoadError;
use loader::{Flavour, Loader, Maps, Program};
use process::{FileId, MappedFile, Process, ProcessError, Stamp, is_layered};
use sys::{PerfUprobe, UprobePmu};

use crate::{
    model::{Tgid, Tid},
    probes::{
        catalogue::{At, Class, Probe, Shape},
        resolve::{Found, ResolvedFile, Resolver},
        torch_npu::ReportLayout,
    },
    stacks,
    text::sanitize,
};

#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error(
        "this kernel has neither uprobe_multi nor perf uprobes ({0}): it must be built with CONFIG_UPROBE_EVENTS"
    )]
    NoUprobes(io::Error),
    #[error("--mechanism: this kernel has no {0}; leave it out to get the best that it has")]
    NoMechanism(&'static str),
    #[error("the map of targets refuses process {tgid}: {source}")]
    Target { tgid: Tgid, source: aya::maps::MapError },
    #[error("the map of interpreters refuses process {tgid}: {source}; trace fewer processes")]
    Interpreter { tgid: Tgid, source: aya::maps::MapError },
    #[error("the map that says what is told of processes refuses it: {0}; name processes by -p")]
    ProcessConfig(aya::maps::MapError),
    #[error("the map that says how native stacks are taken refuses it: {0}; leave out --call-stack c")]
    NativeConfig(aya::maps::MapError),
}

/// Which processes a site is hit by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    /// One process and all its threads.
    Process(Tgid),
    /// Every process that maps the file; the map of targets rules out those that are of no interest.
    Host,
}

/// How sites are attached on this kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mechanism {
    /// One link for all sites of a file (kernel 6.6).
    UprobeMulti,
    /// A perf event a site, with cookies (5.15).
    PerfCookie,
    /// A perf event and a copy of the program a site.
    PerfSite,
}

impl Mechanism {
    pub fn name(self) -> &'static str {
        match self {
            Self::UprobeMulti => "uprobe_multi",
            Self::PerfCookie => "perf events with cookies",
            Self::PerfSite => "perf events, one program a site",
        }
    }
}

/// A site as planned or attached. Its index in [`Attacher::sites`] is the number in records, until its process ends: then
/// the number is another's.
#[derive(Debug, Clone)]
pub struct SiteState {
    pub probe: &'static Probe,
    pub scope: Scope,
    file_id: Option<FileId>,
    /// The library as the target names it; empty when it was not found in any.
    pub file: Arc<str>,
    pub build_id: Option<Arc<str>>,
    /// File offset in bytes.
    pub offset: u64,
    pub found: Option<Found>,
    pub status: Status,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    Attached,
    /// The library should have it and has not: why.
    NotFound(String),
    /// It is there and could not be attached, or its records could not be believed: why.
    Failed(String),
    /// Another site says the same.
    Superseded(String),
    /// It was attached until its process ended.
    Ended,
}

fn add(sum: &mut Counters, counters: &Counters) {
    sum.hits += counters.hits;
    sum.unsent += counters.unsent;
    sum.ring_full += counters.ring_full;
    sum.map_full += counters.map_full;
    sum.unmatched += counters.unmatched;
    sum.unreadable += counters.unreadable;
}

impl SiteState {
    /// Whether both are the same place of the same file, of whatever process.
    fn is_at(&self, other: &Self) -> bool {
        let place = |site: &Self| (site.probe.site, site.offset);
        place(self) == place(other) && self.file == other.file && self.build_id == other.build_id
    }

    pub fn is_attached(&self) -> bool {
        self.status == Status::Attached
    }

    /// What is to be reported of it as missing.
    pub fn failure(&self) -> Option<&str> {
        match &self.status {
            Status::NotFound(why) | Status::Failed(why) => Some(why),
            _ => None,
        }
    }
}

/// What one look at a process's libraries brought.
#[derive(Debug, Clone, Default)]
pub struct Attached {
    /// Indices of sites attached by this call.
    pub sites: Vec<usize>,
    /// Sites in the libraries that were new to the process, attached now or (host-wide) before.
    pub reached: usize,
    /// Libraries that hold them.
    pub libraries: usize,
    /// How many of them are about allocations.
    pub memory_sites: usize,
    /// Whether any of them is more than the dynamic linker's.
    pub relevant: bool,
    /// Mapped files that could not be read for want of rights.
    pub denied: Vec<String>,
}

pub struct Config {
    /// Size of the ring buffer in bytes; rounded up to a power of two, at least 64 KiB.
    pub ring_bytes: u32,
    pub classes: HashSet<Class>,
    /// Forces a mechanism below the best one.
    pub mechanism: Option<Mechanism>,
    /// Attaches programs that do nothing, to measure what the bare probes cost.
    pub empty: bool,
    /// Python stacks of allocations; `None` takes none.
    pub stacks: Option<StackConfig>,
    /// Native ones.
    pub native_stacks: Option<NativeStackConfig>,
    /// Calls that can be between entry and return, where that is to be another number than
    /// [`memscope_ebpf::MAX_IN_FLIGHT`].
    pub in_flight: Option<u32>,
    /// Processes have the numbers that system calls of ours take (see [`proc::Proc::has_own_numbers`]).
    pub own_numbers: bool,
}

/// How much of Python stacks is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StackConfig {
    /// Frames at most, from 1 to [`memscope_ebpf::MAX_DEPTH`].
    pub depth: u32,
    /// Stacks of a thread a second, Python's and native ones, at most.
    pub rate: u32,
    /// Does without the kernel's own description of its structures, as on kernels that have none.
    pub without_btf: bool,
}

impl Default for StackConfig {
    fn default() -> Self {
        Self { depth: 64, rate: 10_000, without_btf: false }
    }
}

/// How much of native stacks is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NativeStackConfig {
    /// Frames at most, from 1 to [`memscope_ebpf::MAX_DEPTH`].
    pub depth: u32,
    /// As in [`StackConfig`].
    pub rate: u32,
    /// Bytes of a pool's block from which on its stack is taken. Of what comes from the driver it always is.
    pub pool_bytes: u64,
}

impl Default for NativeStackConfig {
    fn default() -> Self {
        // From 1 MiB on torch's allocators count a block as large.
        Self { depth: 64, rate: StackConfig::default().rate, pool_bytes: 1 << 20 }
    }
}

/// Stacks that have not been taken are saved up for a second.
const AHEAD_NS: u32 = 1_000_000_000;

fn interval_ns(rate: u32) -> u32 {
    1_000_000_000 / rate.max(1)
}

/// A link to the kernel; dropping it detaches.
#[allow(dead_code, reason = "held for their drop")]
enum Link {
    Multi(OwnedFd),
    Perf(PerfUprobe),
    RawTracepoint(OwnedFd),
}

pub struct Attacher {
    loader: Loader,
    maps: AttacherMaps,
    mechanism: Mechanism,
    features: kernel::Features,
    pmu: Option<UprobePmu>,
    classes: HashSet<Class>,
    wake_shift: u8,
    empty: bool,
    own_numbers: bool,
    /// `None`: not wanted, or this kernel refuses the programs.
    stacks: Option<StackConfig>,
    stacks_refused: Option<String>,
    /// As `stacks`.
    native_stacks: Option<NativeStackConfig>,
    native_stacks_refused: Option<String>,
    /// Where a task has its robust list, in bytes; 0: the kernel does not say.
    robust_list: u32,
    resolver: Resolver,
    files: HashMap<FileId, Arc<ResolvedFile>>,
    /// Files by what all names of one inode share: stamp and build-id.
    names: HashMap<(Stamp, Option<Arc<str>>), Vec<Named>>,
    attached: HashSet<(Scope, FileId, &'static str)>,
    processes: HashMap<Tgid, Seen>,
    sites: Vec<SiteState>,
    /// Numbers of sites whose process has ended: there are no more than the kernel's map has room for.
    free: BTreeSet<usize>,
    /// Sites that were given a number since the last call of [`Attacher::take_new_sites`].
    new: Vec<usize>,
    /// Sites of processes that have ended, each place once, and what was counted there.
    ended: Vec<(SiteState, Counters)>,
    links: BTreeMap<Scope, Vec<Link>>,
    host_links: Vec<Link>,
    /// Processes that have ended since the last [`Attacher::sweep`].
    gone: HashSet<Tgid>,
    /// Calls within which processes have ended.
    abandoned_calls: u64,
}

/// A file by one of its names.
struct Named {
    id: FileId,
    /// Shown by a layered file system.
    layered: bool,
}

/// Detaches. Closing a link waits for the kernel's grace periods, 0.05 s each and more on a busy machine: they pass
/// side by side.
impl Drop for Attacher {
    fn drop(&mut self) {
        const AT_ONCE: usize = 16;
        let mut links: Vec<Link> = std::mem::take(&mut self.links)
            .into_values()
            .flatten()
            .chain(self.host_links.drain(..))
            .collect();
        let share = links.len().div_ceil(AT_ONCE).max(1);
        std::thread::scope(|scope| {
            while !links.is_empty() {
                let few = links.split_off(links.len().saturating_sub(share));
                // Where no thread can be had, this one waits for them all.
                let _ = std::thread::Builder::new().spawn_scoped(scope, move || drop(few));
            }
        });
    }
}

struct AttacherMaps {
    sites: aya::maps::Array<MapData, Site>,
    counters: aya::maps::PerCpuArray<MapData, Counters>,
    targets: aya::maps::HashMap<MapData, u32, u32>,
    in_flight: aya::maps::HashMap<MapData, InFlightKey, InFlight>,
    api_calls: aya::maps::HashMap<MapData, u64, ApiCall>,
    interpreters: aya::maps::HashMap<MapData, u32, Interpreter>,
    robust_lists: aya::maps::HashMap<MapData, u32, u64>,
    threads: aya::maps::HashMap<MapData, u64, Thread>,
    native: aya::maps::Array<MapData, NativeConfig>,
    processes: aya::maps::Array<MapData, ProcessConfig>,
    endings: aya::maps::HashMap<MapData, u32, u32>,
}

/// How a process ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ending {
    /// As its parent is told; `None`: this kernel does not tell us.
    pub status: Option<ExitStatus>,
    /// Probed functions that some thread was in, where the process was killed.
    pub within: Vec<&'static str>,
}

/// What is known of a process's libraries.
#[derive(Default)]
struct Seen {
    files: HashSet<String>,
    /// Names of the sites found in any of them.
    found: HashSet<&'static str>,
    /// Sites that a mapped library should have and lacks.
    missing: HashMap<&'static str, usize>,
}

impl Attacher {
    /// Loads the programs. The ring buffer goes to the collector.
    pub fn new(config: Config) -> Result<(Self, RingBuf<MapData>), AttachError> {
        raise_limits();
        let features = kernel::Features::probe();
        let (loader, maps) = Loader::new(config.ring_bytes, config.in_flight)?;
        let Maps {
            records,
            sites,
            counters,
            targets,
            in_flight,
            api_calls,
            interpreters,
            robust_lists,
            threads,
            native,
            processes,
            endings,
        } = maps;
        let pmu = UprobePmu::find(Path::new("/sys"));
        let best = if features.uprobe_multi {
            Mechanism::UprobeMulti
        } else if features.attach_cookie {
            Mechanism::PerfCookie
        } else {
            Mechanism::PerfSite
        };
        let mechanism = config.mechanism.unwrap_or(best);
        match mechanism {
            Mechanism::UprobeMulti if !features.uprobe_multi => {
                return Err(AttachError::NoMechanism("uprobe_multi"));
            }
            Mechanism::PerfCookie if !features.attach_cookie => {
                return Err(AttachError::NoMechanism("attach cookies"));
            }
            _ => {}
        }
        let pmu = match (mechanism, pmu) {
            (Mechanism::UprobeMulti, pmu) => pmu.ok(),
            (_, Ok(pmu)) => Some(pmu),
            (_, Err(e)) => return Err(AttachError::NoUprobes(e)),
        };
        // A quarter of the ring at most, so that the collector runs before it is full.
        let wake_shift = (config.ring_bytes.max(64 * 1024) / 4).ilog2().min(18) as u8;
        let described = !config.stacks.is_some_and(|stacks| stacks.without_btf);
        let task = described.then(btf::Task::of_kernel).unwrap_or_default();
        let mut attacher = Self {
            loader,
            maps: AttacherMaps {
                sites,
                counters,
                targets,
                in_flight,
                api_calls,
                interpreters,
                robust_lists,
                threads,
                native,
                processes,
                endings,
            },
            mechanism,
            features,
            pmu,
            classes: config.classes,
            wake_shift,
            empty: config.empty,
            own_numbers: config.own_numbers,
            stacks: config.stacks,
            stacks_refused: None,
            native_stacks: config.native_stacks,
            native_stacks_refused: None,
            robust_list: task.robust_list.unwrap_or(0),
            resolver: Resolver::default(),
            files: HashMap::new(),
            names: HashMap::new(),
            attached: HashSet::new(),
            processes: HashMap::new(),
            sites: Vec::new(),
            free: BTreeSet::new(),
            new: Vec::new(),
            ended: Vec::new(),
            links: BTreeMap::new(),
            host_links: Vec::new(),
            gone: HashSet::new(),
            abandoned_calls: 0,
        };
        attacher.try_stacks();
        attacher.try_native_stacks()?;
        let exec = attacher.loader.program(Program::Exec, Flavour::RawTracepoint)?;
        match sys::raw_tracepoint(exec, c"sched_process_exec") {
            Ok(link) => attacher.host_links.push(Link::RawTracepoint(link)),
            Err(e) => tracing::warn!("exec of a target will not be noticed: {e}"),
        }
        if let Some(exit_code) = task.exit_code
            && let Err(e) = attacher.learn_endings(exit_code)
        {
            tracing::warn!("how targets end will not be known: {e}");
        }
        Ok((attacher, records))
    }

    fn learn_endings(&mut self, exit_code: u32) -> Result<(), Box<dyn std::error::Error>> {
        self.set_processes(ProcessConfig { exit_code, ..ProcessConfig::default() })?;
        let exit = self.loader.program(Program::Exit, Flavour::RawTracepoint)?;
        let link = sys::raw_tracepoint(exit, c"sched_process_exit")?;
        self.host_links.push(Link::RawTracepoint(link));
        Ok(())
    }

    fn set_processes(&mut self, config: ProcessConfig) -> Result<(), aya::maps::MapError> {
        self.maps.processes.set(0, config, 0)
    }

    /// From now on processes that begin are announced, whoever they are: each `exec`, and what the dynamic linker maps for
    /// those that use the one of this tool, or another that is given to [`Self::attach_linker`].
    pub fn announce_processes(&mut self, this: &Process) -> Result<(), AttachError> {
        let config = self.maps.processes.get(&0, 0).unwrap_or_default();
        self.set_processes(ProcessConfig { every_exec: 1, ..config }).map_err(AttachError::ProcessConfig)?;
        self.attach_linker(this)
    }

    /// What a process's dynamic linker maps is announced from now on, for all processes that use the same.
    pub fn attach_linker(&mut self, process: &Process) -> Result<(), AttachError> {
        let is_linker = |file: &MappedFile| {
            file.path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"ld"))
        };
        for mapped in process.mapped_files()?.into_iter().filter(is_linker) {
            let Ok(file) = process.open_mapped(&mapped) else { continue };
            let Some((id, resolved, display)) = self.resolve(&mapped, &file) else { continue };
            let linker = ResolvedFile {
                found: resolved.found.iter().filter(|hit| hit.shape == Shape::Notify).copied().collect(),
                ..(*resolved).clone()
            };
            let (none, mut outcome) = (HashSet::new(), Attached::default());
            self.attach_file(Scope::Host, id, &file, &linker, &display, &none, None, &mut outcome);
        }
        Ok(())
    }

    /// What is in a mapped file, and the id and name that it is known by.
    fn resolve(&mut self, mapped: &MappedFile, file: &File) -> Option<(FileId, Arc<ResolvedFile>, Arc<str>)> {
        let id = FileId::of(file).ok()?;
        let display = sanitize(mapped.path.as_os_str().as_encoded_bytes()).into_owned();
        let resolved = match self.files.get(&id) {
            Some(resolved) => resolved.clone(),
            None => {
                let resolved = Arc::new(self.resolver.resolve(file, &display));
                self.files.insert(id, resolved.clone());
                resolved
            }
        };
        let id = self.canonical(id, file, &resolved);
        Some((id, resolved, display.into()))
    }

    /// Allocations without stacks are better than none: the programs that walk stacks ask most of a kernel.
    fn try_stacks(&mut self) {
        if self.stacks.is_none() {
            return;
        }
        if let Err(e) = self.try_programs(&[Program::ReportStack, Program::LeaveStack]) {
            self.stacks_refused = Some(e.to_string());
            self.stacks = None;
        }
    }

    /// Whether Python stacks of a thread are taken only when the collector has looked at it, up to a second after its
    /// beginning: the kernel does not say where a thread has its robust list.
    pub fn has_late_stacks(&self) -> bool {
        self.stacks.is_some() && self.robust_list == 0
    }

    fn try_native_stacks(&mut self) -> Result<(), AttachError> {
        let Some(config) = self.native_stacks else { return Ok(()) };
        let programs =
            [Program::ReportNative, Program::LeaveNative, Program::KeepCaller, Program::KeepStructCaller];
        if let Err(e) = self.try_programs(&programs) {
            self.native_stacks_refused = Some(e.to_string());
            self.native_stacks = None;
            return Ok(());
        }
        let config = NativeConfig {
            pool_bytes: config.pool_bytes,
            interval_ns: interval_ns(config.rate),
            ahead_ns: AHEAD_NS,
            depth: config.depth,
            python: self.stacks.is_some().into(),
        };
        self.maps.native.set(0, config, 0).map_err(AttachError::NativeConfig)
    }

    fn try_programs(&mut self, programs: &[Program]) -> Result<(), LoadError> {
        let flavour = match self.mechanism {
            Mechanism::UprobeMulti => Flavour::UprobeMulti,
            Mechanism::PerfCookie => Flavour::PerfCookie,
            Mechanism::PerfSite => Flavour::PerfSite(0),
        };
        let attempt = |loader: &mut Loader| {
            programs.iter().try_for_each(|program| loader.program(*program, flavour).map(|_| ()))
        };
        let Err(refusal) = attempt(&mut self.loader) else { return Ok(()) };
        // Lockdown of confidentiality lets no program read the kernel's memory: all but one thing is found without.
        self.loader.spare_kernel_memory(true);
        if attempt(&mut self.loader).is_err() {
            self.loader.spare_kernel_memory(false);
            return Err(refusal);
        }
        self.robust_list = 0;
        Ok(())
    }

    /// Why this kernel takes no stacks.
    pub fn stacks_refused(&self) -> Option<&str> {
        self.stacks_refused.as_deref()
    }

    /// Why it takes no native ones.
    pub fn native_stacks_refused(&self) -> Option<&str> {
        self.native_stacks_refused.as_deref()
    }

    /// Whether Python stacks are taken.
    pub fn takes_stacks(&self) -> bool {
        self.stacks.is_some()
    }

    /// How much of native stacks is taken; `None`: none are.
    pub fn native_stacks(&self) -> Option<NativeStackConfig> {
        self.native_stacks
    }

    pub fn mechanism(&self) -> Mechanism {
        self.mechanism
    }

    /// Lets go of the capabilities that later sites do not need, on this thread.
    pub fn drop_privileges(&self) {
        privilege::drop_surplus(|| {
            self.mechanism == Mechanism::UprobeMulti || kernel::try_perf_uprobe().is_ok()
        });
    }

    pub fn features(&self) -> kernel::Features {
        self.features
    }

    pub fn sites(&self) -> &[SiteState] {
        &self.sites
    }

    /// Sites that were given a number since the last call.
    pub fn take_new_sites(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.new)
    }

    /// All sites that there are and were, with what was counted there.
    pub fn tallies(&self) -> impl Iterator<Item = (&SiteState, Counters)> {
        let ended = self.ended.iter().map(|(site, counters)| (site, *counters));
        let is_taken = |index: &usize| !self.free.contains(index);
        let sites = (0..self.sites.len()).filter(is_taken);
        ended.chain(sites.map(|index| (&self.sites[index], self.counters(index))))
    }

    /// Gives a site its number.
    fn number(&mut self, site: SiteState) -> usize {
        let index = match self.free.pop_first() {
            Some(index) => {
                self.sites[index] = site;
                index
            }
            None => {
                self.sites.push(site);
                self.sites.len() - 1
            }
        };
        self.new.push(index);
        index
    }

    /// Of sites whose process has ended remains what was counted.
    fn retire_sites(&mut self, scope: Scope) {
        let of_process: Vec<usize> = (0..self.sites.len())
            .filter(|index| self.sites[*index].scope == scope && !self.free.contains(index))
            .collect();
        for index in of_process {
            let counters = self.counters(index);
            let _ = self.maps.sites.set(index as u32, Site::default(), 0);
            if let Ok(cpus) = aya::util::nr_cpus()
                && let Ok(zeros) = aya::maps::PerCpuValues::try_from(vec![Counters::default(); cpus])
            {
                let _ = self.maps.counters.set(index as u32, zeros, 0);
            }
            let mut site = self.sites[index].clone();
            if site.is_attached() {
                site.status = Status::Ended;
            }
            self.sites[index].status = Status::Ended;
            self.free.insert(index);
            match self.ended.iter_mut().find(|(other, _)| other.is_at(&site) && other.status == site.status) {
                Some((_, sum)) => add(sum, &counters),
                None => self.ended.push((site, counters)),
            }
        }
    }

    /// Calls of all processes that have been entered and have not returned.
    pub fn open_calls(&self) -> u64 {
        let calls = self.maps.in_flight.iter().flatten();
        self.abandoned_calls + calls.filter(|(_, call)| call.active == 1).count() as u64
    }

    /// Counters of a site, over all CPUs.
    fn counters(&self, site: usize) -> Counters {
        let mut sum = Counters::default();
        if let Ok(values) = self.maps.counters.get(&(site as u32), 0) {
            values.iter().for_each(|counters| add(&mut sum, counters));
        }
        sum
    }

    /// Observe a process, or not, at sites of scope [`Scope::Host`].
    pub fn judge(&mut self, tgid: Tgid, observe: bool) -> Result<(), AttachError> {
        self.gone.remove(&tgid);
        let value = if observe { verdict::OBSERVE } else { verdict::IGNORE };
        self.maps.targets.insert(tgid.0, value, 0).map_err(|source| AttachError::Target { tgid, source })
    }

    /// How a process ended that has; to be asked before it is forgotten.
    pub fn ending(&self, tgid: Tgid) -> Ending {
        let code = self.maps.endings.get(&tgid.0, 0).ok();
        let status = code.map(|code| ExitStatus::from_raw(code as i32));
        // The map is large, and who exits by itself is in no call as a rule.
        let mut within = Vec::new();
        if status.is_none_or(|status| status.code().is_none()) {
            let calls = self.maps.in_flight.iter().flatten();
            let open = calls.filter(|(key, call)| (key.pid_tgid >> 32) as u32 == tgid.0 && call.active == 1);
            within.extend(open.filter_map(|(key, _)| Some(self.sites.get(key.site as usize)?.probe.site)));
            within.sort_unstable();
            within.dedup();
        }
        Ending { status, within }
    }

    /// Makes room in the maps that are kept by thread: once for all processes that have ended since the last time, since
    /// all of a map must be gone through.
    pub fn sweep(&mut self) {
        let gone = std::mem::take(&mut self.gone);
        if gone.is_empty() {
            return;
        }
        let is_gone = |pid_tgid: u64| gone.contains(&Tgid((pid_tgid >> 32) as u32));
        let calls = self.maps.in_flight.iter().flatten();
        let calls: Vec<_> = calls.filter(|(key, _)| is_gone(key.pid_tgid)).collect();
        for (key, call) in calls {
            self.abandoned_calls += u64::from(call.active == 1);
            let _ = self.maps.in_flight.remove(&key);
        }
        let stale: Vec<u64> = self.maps.api_calls.keys().flatten().filter(|key| is_gone(*key)).collect();
        for key in stale {
            let _ = self.maps.api_calls.remove(&key);
        }
        self.forget_threads(is_gone);
    }

    /// Forgets a process that ended: its id may come again, its calls in flight never return.
    pub fn forget(&mut self, tgid: Tgid) {
        let _ = self.maps.targets.remove(&tgid.0);
        let _ = self.maps.endings.remove(&tgid.0);
        self.gone.insert(tgid);
        let _ = self.maps.interpreters.remove(&tgid.0);
        self.processes.remove(&tgid);
        if let Some(links) = self.links.remove(&Scope::Process(tgid)) {
            // Closing them waits for the kernel's grace periods, and events come meanwhile. (Where no thread can be had,
            // they are closed here.)
            let _ = std::thread::Builder::new().name("detach".into()).spawn(move || drop(links));
        }
        self.attached.retain(|(scope, ..)| *scope != Scope::Process(tgid));
        self.retire_sites(Scope::Process(tgid));
    }

    /// A process that was ruled out is no more: whoever gets its id is to be looked at.
    pub fn forget_verdict(&mut self, tgid: Tgid) {
        let _ = self.maps.targets.remove(&tgid.0);
    }

    /// From now on the programs take stacks of the process. `salt` is to be another one for each program that a
    /// process runs: stacks are told apart by it.
    pub fn take_stacks(
        &mut self,
        process: &Process,
        interpreter: &stacks::Interpreter,
        salt: u64,
    ) -> Result<(), AttachError> {
        let Some(config) = self.stacks else { return Ok(()) };
        let interpreter = Interpreter {
            robust_list: self.robust_list,
            depth: config.depth,
            interval_ns: interval_ns(config.rate),
            ahead_ns: AHEAD_NS,
            ..interpreter.for_programs(salt)
        };
        let tgid = process.tgid;
        self.note_robust_lists(process);
        let inserted = self.maps.interpreters.insert(tgid.0, interpreter, 0);
        inserted.map_err(|source| AttachError::Interpreter { tgid, source })
    }

    /// Tells the programs where threads have their robust lists, where the kernel does not.
    pub fn note_robust_lists(&mut self, process: &Process) {
        if self.stacks.is_none() || self.robust_list != 0 {
            return;
        }
        for (tid, list) in stacks::robust_lists(process) {
            let _ = self.maps.robust_lists.insert(tid.0, list, 0);
        }
    }

    /// Makes room for the stacks of other threads than those that have ended.
    pub fn forget_ended_threads(&mut self, has_ended: impl Fn(Tid) -> bool) {
        self.forget_threads(|pid_tgid| has_ended(Tid(pid_tgid as u32)));
    }

    fn forget_threads(&mut self, which: impl Fn(u64) -> bool) {
        let ended: Vec<u64> = self.maps.threads.keys().flatten().filter(|key| which(*key)).collect();
        for key in ended {
            let _ = self.maps.threads.remove(&key);
            let _ = self.maps.robust_lists.remove(&(key as u32));
        }
    }

    /// Forgets what libraries a process had, because it has others now (`exec`).
    pub fn forget_libraries(&mut self, tgid: Tgid) {
        // Links stay: they belong to files, and the process may map the same ones again.
        self.processes.remove(&tgid);
    }

    /// Looks at the libraries that the process has mapped and attaches what is new. Cheap when nothing is.
    pub fn attach(&mut self, process: &Process, scope: Scope) -> Result<Attached, AttachError> {
        let mapped = process.mapped_files()?;
        let python = python_minor(&mapped);
        let seen = self.processes.entry(process.tgid).or_default();
        let new: Vec<_> = mapped.into_iter().filter(|file| seen.files.insert(file.id().to_owned())).collect();
        let mut files = Vec::new();
        let mut outcome = Attached::default();
        for mapped in new {
            let file = match process.open_mapped(&mapped) {
                Ok(file) => file,
                Err(e) => {
                    tracing::debug!(file = %mapped.path.display(), "not opened: {e}");
                    // Special files, and what is gone meanwhile, are no one's fault.
                    if e.kind() == io::ErrorKind::PermissionDenied {
                        let path = mapped.path.as_os_str().as_encoded_bytes();
                        outcome.denied.push(sanitize(path).into_owned());
                    }
                    continue;
                }
            };
            let Some((id, resolved, display)) = self.resolve(&mapped, &file) else { continue };
            files.push((id, file, resolved, display));
        }
        let seen = self.processes.entry(process.tgid).or_default();
        for (_, _, resolved, _) in &files {
            seen.found.extend(resolved.found.iter().map(|f| f.probe.site));
        }
        let found = seen.found.clone();
        self.retire_superseded(scope, &found);
        for (id, file, resolved, display) in files {
            self.note_missing(process.tgid, scope, &resolved, &display, &found);
            self.attach_file(scope, id, &file, &resolved, &display, &found, python, &mut outcome);
            let reached = self
                .sites
                .iter()
                .filter(|site| site.scope == scope && site.is_attached() && site.file_id == Some(id));
            let before = outcome.reached;
            for site in reached {
                outcome.reached += 1;
                outcome.memory_sites += usize::from(site.probe.class == Class::Memory);
                outcome.relevant |= site.probe.class != Class::Context;
            }
            outcome.libraries += usize::from(outcome.reached > before);
        }
        Ok(outcome)
    }

    /// The id under which the file's inode was met first: a uprobe is attached to an inode once, or each call of
    /// each of its users counts twice.
    fn canonical(&mut self, id: FileId, file: &File, resolved: &ResolvedFile) -> FileId {
        let Ok(stamp) = Stamp::of(file) else { return id };
        let known = self.names.entry((stamp, resolved.build_id.clone())).or_default();
        if known.iter().any(|other| other.id == id) {
            return id;
        }
        let layered = is_layered(file);
        match known.iter().find(|first| layered || first.layered) {
            Some(first) => first.id,
            None => {
                known.push(Named { id, layered });
                id
            }
        }
    }

    #[allow(clippy::too_many_arguments, reason = "one call; a struct would only rename them")]
    fn attach_file(
        &mut self,
        scope: Scope,
        id: FileId,
        file: &File,
        resolved: &ResolvedFile,
        display: &Arc<str>,
        found: &HashSet<&'static str>,
        python: Option<u8>,
        outcome: &mut Attached,
    ) {
        let mut plan: BTreeMap<Program, Vec<(u64, usize)>> = BTreeMap::new();
        for hit in &resolved.found {
            let probe = hit.probe;
            let wanted =
                self.classes.contains(&probe.class) && !probe.unless.iter().any(|s| found.contains(s));
            if !wanted || !self.attached.insert((scope, id, probe.site)) {
                continue;
            }
            let index = self.number(SiteState {
                probe,
                scope,
                file_id: Some(id),
                file: display.clone(),
                build_id: resolved.build_id.clone(),
                offset: hit.offset,
                found: Some(*hit),
                status: Status::Failed("not attached yet".into()),
            });
            if let Some(first) = resolved.found.iter().find(|other| {
                other.offset == hit.offset
                    && other.probe.site < probe.site
                    && other.probe.observes == probe.observes
            }) {
                self.sites[index].status =
                    Status::Superseded(format!("the same function as {}", first.probe.site));
                continue;
            }
            let site = site_of(hit, scope, self.wake_shift, python);
            if let Err(e) = self.maps.sites.set(index as u32, site, 0) {
                self.sites[index].status =
                    Status::Failed(format!("no room for another site ({e}): trace fewer processes"));
                continue;
            }
            for program in programs_of(probe, self.stacks.is_some(), self.native_stacks.is_some()) {
                let program = if self.empty { program.empty() } else { program };
                plan.entry(program).or_default().push((hit.offset, index));
            }
            self.sites[index].status = Status::Attached;
            outcome.sites.push(index);
        }
        if plan.is_empty() {
            return;
        }
        let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or_default();
        for (program, points) in plan {
            for (index, result) in self.attach_points(program, scope, &path, &points) {
                if let Err(why) = result {
                    self.sites[index].status = Status::Failed(why);
                }
            }
        }
        outcome.sites.retain(|site| self.sites[*site].is_attached());
    }

    /// Attaches one program to points of one file; with the result for each site.
    fn attach_points(
        &mut self,
        program: Program,
        scope: Scope,
        path: &CString,
        points: &[(u64, usize)],
    ) -> Vec<(usize, Result<(), String>)> {
        if self.mechanism == Mechanism::UprobeMulti {
            return match self.attach_multi(program, scope, path, points) {
                Ok(()) => points.iter().map(|(_, site)| (*site, Ok(()))).collect(),
                // One instruction that can not be probed refuses them all: find out which.
                Err(_) if points.len() > 1 => points
                    .iter()
                    .map(|point| (point.1, self.attach_multi(program, scope, path, &[*point])))
                    .collect(),
                Err(why) => points.iter().map(|(_, site)| (*site, Err(why.clone()))).collect(),
            };
        }
        points
            .iter()
            .map(|(offset, site)| (*site, self.attach_perf(program, scope, path, *offset, *site)))
            .collect()
    }

    fn attach_multi(
        &mut self,
        program: Program,
        scope: Scope,
        path: &CString,
        points: &[(u64, usize)],
    ) -> Result<(), String> {
        let (offsets, cookies): (Vec<u64>, Vec<u64>) = points.iter().map(|(o, s)| (*o, *s as u64)).unzip();
        let pid = match scope {
            // Where the kernel's filter takes one thread only, the programs' own filter does the work.
            Scope::Process(tgid) if self.features.uprobe_multi_pid => self.kernels_number(tgid),
            _ => None,
        };
        let fd = self.loader.program(program, Flavour::UprobeMulti).map_err(|e| e.to_string())?;
        let link = sys::uprobe_multi(fd, path, &offsets, &cookies, pid, program.on_return())
            .map_err(|e| format!("uprobe_multi: {e}{}", advice(&e, self.mechanism)))?;
        self.links.entry(scope).or_default().push(Link::Multi(link));
        Ok(())
    }

    /// What the kernel, asked by us, calls a process. Without one its filter can not be used, and the programs' own does
    /// the work.
    fn kernels_number(&self, tgid: Tgid) -> Option<u32> {
        self.own_numbers.then_some(tgid.0)
    }

    fn attach_perf(
        &mut self,
        program: Program,
        scope: Scope,
        path: &CString,
        offset: u64,
        site: usize,
    ) -> Result<(), String> {
        let pmu = self.pmu.ok_or("this kernel has no perf uprobes")?;
        let pid = match scope {
            Scope::Process(tgid) => self.kernels_number(tgid),
            Scope::Host => None,
        };
        let flavour = match self.mechanism {
            Mechanism::PerfSite => Flavour::PerfSite(site as u32),
            _ => Flavour::PerfCookie,
        };
        let fd = self.loader.program(program, flavour).map_err(|e| e.to_string())?;
        let mut event = PerfUprobe::open(&pmu, path, offset, pid, program.on_return())
            .map_err(|e| format!("perf_event_open: {e}{}", advice(&e, self.mechanism)))?;
        match flavour {
            Flavour::PerfSite(_) => event.set_bpf(fd),
            _ => event.link(fd, site as u64),
        }
        .map_err(|e| format!("attaching to the perf event: {e}{}", advice(&e, self.mechanism)))?;
        self.links.entry(scope).or_default().push(Link::Perf(event));
        Ok(())
    }

    /// Sites that stood in for a library which has come now are switched off.
    fn retire_superseded(&mut self, scope: Scope, found: &HashSet<&'static str>) {
        for (index, site) in self.sites.iter_mut().enumerate() {
            if site.scope == scope
                && site.is_attached()
                && let Some(better) = site.probe.unless.iter().find(|s| found.contains(*s))
            {
                // No process has id 0: the programs let every hit pass.
                let _ = self.maps.sites.set(index as u32, Site::default(), 0);
                site.status = Status::Superseded(format!("{better} was found and says the same"));
            }
        }
    }

    /// Remembers the sites that a library should have and lacks.
    fn note_missing(
        &mut self,
        tgid: Tgid,
        scope: Scope,
        resolved: &ResolvedFile,
        display: &Arc<str>,
        found: &HashSet<&'static str>,
    ) {
        for (probe, why) in &resolved.missing {
            let seen = self.processes.entry(tgid).or_default();
            if found.contains(probe.site)
                || !self.classes.contains(&probe.class)
                || seen.missing.contains_key(probe.site)
            {
                continue;
            }
            let site = SiteState {
                probe,
                scope,
                file_id: None,
                file: display.clone(),
                build_id: resolved.build_id.clone(),
                offset: 0,
                found: None,
                status: Status::NotFound(why.clone()),
            };
            // Processes that come and go lack the same.
            let same = self.sites.iter().position(|other| {
                scope == Scope::Host && other.scope == scope && other.found.is_none() && other.is_at(&site)
            });
            let index = match same {
                Some(index) => {
                    self.sites[index].status = site.status;
                    index
                }
                None => self.number(site),
            };
            self.processes.entry(tgid).or_default().missing.insert(probe.site, index);
        }
        // Found in another library after all.
        let seen = self.processes.entry(tgid).or_default();
        let late: Vec<usize> =
            seen.missing.extract_if(|site, _| found.contains(*site)).map(|(_, index)| index).collect();
        for index in late {
            if !self.processes.values().any(|seen| seen.missing.values().any(|other| *other == index)) {
                self.sites[index].status = Status::Superseded("found in another library".into());
            }
        }
    }

    /// All programs let every hit pass from now on. Detaching can wait: for perf events it takes 0.1 s a site.
    pub fn silence(&mut self) {
        for site in 0..self.sites.len() {
            let _ = self.maps.sites.set(site as u32, Site::default(), 0);
        }
    }

    /// torch_npu's version, by the file that its package has beside the library.
    pub fn torch_npu_version(&self, process: &Process) -> Option<String> {
        let library =
            process.mapped_files().ok()?.into_iter().find(|f| f.path.ends_with("libtorch_npu.so"))?;
        let version = process.read_in_root(&library.path.parent()?.parent()?.join("version.py"))?;
        let version = String::from_utf8_lossy(&version);
        let line = version.lines().find_map(|line| line.strip_prefix("__version__"))?;
        let text = line.split(['\'', '"']).nth(1)?;
        Some(sanitize(text.as_bytes().get(..text.len().min(40))?).into_owned())
    }

    /// Stops a site whose records can not be trusted.
    pub fn disable(&mut self, site: usize, why: String) {
        let _ = self.maps.sites.set(site as u32, Site::default(), 0);
        if let Some(state) = self.sites.get_mut(site) {
            state.status = Status::Failed(why);
        }
    }
}

/// What to say of an error in attaching. Here the kernel has taken the programs already.
fn advice(error: &io::Error, mechanism: Mechanism) -> String {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) if mechanism == Mechanism::UprobeMulti => {
            format!(" ({})", privilege::why_refused())
        }
        Some(libc::EPERM | libc::EACCES) => format!(" ({})", privilege::why_perf_refused()),
        Some(ENOTSUPP | libc::EOPNOTSUPP) => {
            " (the first instruction of this function can not be probed)".to_owned()
        }
        _ => String::new(),
    }
}

/// The kernel's own "not supported", which no libc names.
const ENOTSUPP: i32 = 524;

fn programs_of(probe: &Probe, with_stacks: bool, with_native: bool) -> Vec<Program> {
    let is_allocation = probe.observes.is_allocation();
    let (with_stacks, takes_native) = (with_stacks && is_allocation, with_native && is_allocation);
    let leave = match (takes_native, with_stacks) {
        (true, _) => Program::LeaveNative,
        (false, true) => Program::LeaveStack,
        (false, false) => Program::Leave,
    };
    // Any return probe may be on a stack that is taken within the call.
    let (keep, keep_struct) = match with_native {
        true => (Program::KeepCaller, Program::KeepStructCaller),
        false => (Program::Keep, Program::KeepStruct),
    };
    match probe.shape {
        Shape::Enter => vec![Program::Enter],
        Shape::Annotate => vec![Program::Annotate],
        Shape::EnterReturn { structure: NO_ARG, .. } => vec![keep, leave],
        Shape::EnterReturn { .. } => vec![keep_struct, leave],
        Shape::Report { .. } if takes_native => vec![Program::ReportNative],
        Shape::Report { .. } if with_stacks => vec![Program::ReportStack],
        Shape::Report { .. } => vec![Program::Report],
        Shape::Name { .. } => vec![Program::Name],
        Shape::Mark { id: false, .. } => vec![Program::Mark],
        Shape::Mark { id: true, .. } => vec![Program::Mark, Program::Value],
        Shape::Tensor => vec![Program::Tensor],
        Shape::Arguments { .. } => vec![Program::Arguments],
        Shape::Notify => vec![Program::Mapped],
    }
}

fn site_of(hit: &Found, scope: Scope, wake_shift: u8, python: Option<u8>) -> Site {
    let tgid = match scope {
        Scope::Process(tgid) => tgid.0,
        Scope::Host => SITE_ANY,
    };
    let mut site = Site { tgid, out: NO_ARG, domain: NO_ARG, skip_at: NO_ARG, wake_shift, ..Site::default() };
    match hit.shape {
        Shape::Enter | Shape::Annotate | Shape::Tensor | Shape::Notify => {}
        Shape::EnterReturn { out, ret, structure } => {
            site.out = out;
            site.ret = ret;
            site.arg = if structure == NO_ARG { 0 } else { structure };
        }
        Shape::Report { arg } => {
            site.arg = arg;
            if let Some(layout) = hit.report_layout {
                (site.skip_at, site.skip) = (layout.data_type_at(), ReportLayout::BLOCK_FREE);
            }
        }
        Shape::Arguments { arg, derefs } => {
            site.arg = arg;
            site.derefs = derefs;
        }
        Shape::Name { arg, offset, derefs } => {
            site.arg = arg;
            site.offset = offset;
            site.derefs = derefs;
        }
        Shape::Mark { arg, domain, .. } => {
            site.arg = arg;
            site.domain = domain;
        }
    }
    if let At::MstxPython(_) = hit.probe.at
        && site.arg != NO_ARG
    {
        // (self, args): the first item of a tuple lies 24 bytes into it; the bytes of an ASCII str 40 bytes
        // into that since CPython 3.12, 48 before.
        site.arg = 1;
        site.offset = 24;
        site.derefs = 1;
        site.after = if python.is_some_and(|minor| minor >= 12) { 40 } else { 48 };
    }
    site
}

/// The 3.x of the process's Python, by the name of its library or program.
fn python_minor(files: &[MappedFile]) -> Option<u8> {
    files.iter().find_map(|file| {
        let name = file.path.file_name()?.to_str()?;
        let version = name.strip_prefix("libpython3.").or_else(|| name.strip_prefix("python3."))?;
        version.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    })
}

/// Kernels before 5.11 charge maps and programs to RLIMIT_MEMLOCK. Sites attached by perf events, and the files of
/// native stacks, take a descriptor each.
pub fn raise_limits() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Err(e) = setrlimit(Resource::RLIMIT_MEMLOCK, libc::RLIM_INFINITY, libc::RLIM_INFINITY) {
        tracing::debug!("RLIMIT_MEMLOCK not raised: {e}");
    }
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, most)| setrlimit(Resource::RLIMIT_NOFILE, most, most));
    if let Err(e) = raised {
        tracing::debug!("RLIMIT_NOFILE not raised: {e}");
    }
}
