//! What the programs are told of stacks.

use std::collections::HashSet;

use memscope_ebpf::{Interpreter, NativeConfig, ProcessConfig};

use super::{
    AttachError, Attached, Attacher, LoadError, Mechanism, Scope,
    links::Link,
    loader::{Flavour, Loader, Program},
    process::{MappedFile, Process},
    sys,
};
use crate::{
    model::{Tgid, Tid},
    probes::{catalogue::Class, resolve::ResolvedFile},
    stacks,
};

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

impl Attacher {
    /// Allocations without stacks are better than none: the programs that walk stacks ask most of a kernel.
    pub(super) fn try_stacks(&mut self) {
        if self.stacks.is_none() {
            return;
        }
        if let Err(e) = self.try_programs(&[Program::ReportStack, Program::LeaveStack]) {
            self.stacks_refused = Some(e.to_string());
            self.stacks = None;
            return;
        }
        // Of those alone that are asked to be followed.
        self.classes.insert(Class::Queue);
    }

    /// Whether Python stacks of a thread are taken only when the collector has looked at it, up to a second after its
    /// beginning: the kernel does not say where a thread has its robust list.
    pub fn has_late_stacks(&self) -> bool {
        self.stacks.is_some() && self.robust_list == 0
    }

    /// Processes that are forked have stacks from their first allocation on, where the kernel says where a task keeps the
    /// id of its process.
    pub(super) fn try_inheritance(&mut self, tgid: Option<u32>) {
        let Some(tgid) = tgid.filter(|_| self.stacks.is_some() && self.robust_list != 0) else { return };
        if let Err(e) = self.inherit_interpreters(tgid) {
            tracing::warn!("the first allocations of forked processes will have no Python stacks: {e}");
        }
    }

    fn inherit_interpreters(&mut self, tgid: u32) -> Result<(), Box<dyn std::error::Error>> {
        let config = self.maps.processes.get(&0, 0).unwrap_or_default();
        self.set_processes(ProcessConfig { tgid, ..config })?;
        let fork = self.loader.program(Program::Fork, Flavour::RawTracepoint)?;
        self.host_links.push(Link::RawTracepoint(sys::raw_tracepoint(fork, c"sched_process_fork")?));
        Ok(())
    }

    pub(super) fn try_native_stacks(&mut self) -> Result<(), AttachError> {
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

    /// From now on what torch_npu's task queue runs in the process has the stacks of the calls that it is run for. If not,
    /// why.
    pub fn follow_queue(&mut self, process: &Process) -> Result<(), String> {
        let mapped = process.mapped_files().map_err(|e| e.to_string())?;
        let is_torch_npu = |file: &&MappedFile| file.path.ends_with("libtorch_npu.so");
        let Some(mapped) = mapped.iter().find(is_torch_npu) else { return Ok(()) };
        let file = process.open_mapped(mapped).map_err(|e| e.to_string())?;
        let Some((id, resolved, display)) = self.resolve(mapped, &file) else { return Ok(()) };
        let queue = ResolvedFile { found: self.resolver.queue(&file, &display)?, ..(*resolved).clone() };
        let (none, mut outcome) = (HashSet::new(), Attached::default());
        let scope = Scope::Process(process.tgid);
        self.attach_file(scope, id, &file, &queue, &display, &none, None, &mut outcome);
        let mut of_queue =
            self.sites.iter().filter(|site| site.scope == scope && site.probe.class == Class::Queue);
        of_queue.find_map(|site| site.failure()).map_or(Ok(()), |why| Err(why.to_owned()))
    }

    /// The process that it was forked from, by the `salt` that was given for that one, where stacks of the process are taken
    /// since.
    pub fn inherited(&self, tgid: Tgid) -> Option<u64> {
        self.maps.interpreters.get(&tgid.0, 0).ok().map(|interpreter| interpreter.image)
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
            image: salt,
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

    pub(super) fn forget_threads(&mut self, which: impl Fn(u64) -> bool) {
        let ended: Vec<u64> = self.maps.threads.keys().flatten().filter(|key| which(*key)).collect();
        for key in ended {
            let _ = self.maps.threads.remove(&key);
            let _ = self.maps.robust_lists.remove(&(key as u32));
        }
    }
}
