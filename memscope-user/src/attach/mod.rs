//! Processes, their libraries, what the kernel can do, and attaching programs to sites.

mod btf;
mod container;
pub mod cost;
mod endings;
pub mod kernel;
mod links;
mod loader;
pub mod privilege;
pub mod proc;
pub mod process;
mod site;
pub mod spawn;
mod stacks;
mod sys;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    ffi::CString,
    fs::File,
    io,
    os::fd::AsRawFd,
    path::Path,
    sync::Arc,
};

use aya::maps::{MapData, RingBuf};
use memscope_ebpf::{
    Calls, Counters, Interpreter, NativeConfig, ProcessConfig, Site, Thread, Within, verdict,
};

pub use self::{
    endings::Ending,
    links::Mechanism,
    loader::LoadError,
    site::{Scope, SiteState, Status},
    stacks::{NativeStackConfig, StackConfig},
};
use self::{
    links::Link,
    loader::{Flavour, Loader, Maps, Program},
    process::{FileId, MappedFile, Process, ProcessError, Stamp, is_layered},
    site::{add, programs_of, python_minor, site_of},
    sys::UprobePmu,
};
use crate::{
    model::Tgid,
    probes::{
        catalogue::{Class, Shape},
        resolve::{ResolvedFile, Resolver},
    },
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
    /// Keeps the calls of so many threads in a map, as on kernels without compare-and-swap.
    pub call_threads: Option<u32>,
    /// Processes have the numbers that system calls of ours take (see [`proc::Proc::has_own_numbers`]).
    pub own_numbers: bool,
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
}

/// A file by one of its names.
struct Named {
    id: FileId,
    /// Shown by a layered file system.
    layered: bool,
}

struct AttacherMaps {
    sites: aya::maps::Array<MapData, Site>,
    counters: aya::maps::PerCpuArray<MapData, Counters>,
    targets: aya::maps::HashMap<MapData, u32, u32>,
    calls_by_thread: aya::maps::HashMap<MapData, u64, Calls>,
    within: aya::maps::HashMap<MapData, Within, u8>,
    interpreters: aya::maps::HashMap<MapData, u32, Interpreter>,
    robust_lists: aya::maps::HashMap<MapData, u32, u64>,
    threads: aya::maps::HashMap<MapData, u64, Thread>,
    native: aya::maps::Array<MapData, NativeConfig>,
    processes: aya::maps::Array<MapData, ProcessConfig>,
    endings: aya::maps::HashMap<MapData, u32, u32>,
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
        let (loader, maps) = Loader::new(config.ring_bytes, config.call_threads)?;
        let Maps {
            records,
            sites,
            counters,
            targets,
            calls_by_thread,
            within,
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
                calls_by_thread,
                within,
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
        };
        attacher.try_stacks();
        attacher.try_native_stacks()?;
        let exec = attacher.loader.program(Program::Exec, Flavour::RawTracepoint)?;
        match sys::raw_tracepoint(exec, c"sched_process_exec") {
            Ok(link) => attacher.host_links.push(Link::RawTracepoint(link)),
            Err(e) => tracing::warn!("exec of a target will not be noticed: {e}"),
        }
        // Where the kernel's memory is not read, every process would end with 0.
        let exit_code = task.exit_code.filter(|_| !attacher.loader.spares_kernel_memory());
        match attacher.learn_endings(exit_code.unwrap_or(0)) {
            Err(e) => tracing::warn!("how targets end will not be known: {e}"),
            // Without the end of those that are never looked at, what they inherit would stay.
            Ok(()) => attacher.try_inheritance(task.tgid),
        }
        Ok((attacher, records))
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
