//! Processes that end: how, and what of them is to be cleared away.

use std::{os::unix::process::ExitStatusExt, process::ExitStatus};

use memscope_ebpf::{Counters, ProcessConfig, Site, Within};

use super::{
    Attacher, Link, Scope, Status,
    loader::{Flavour, Program},
    site::add,
    sys,
};
use crate::model::Tgid;

/// How a process ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ending {
    /// As its parent is told; `None`: this kernel does not tell us.
    pub status: Option<ExitStatus>,
    /// Probed functions that some thread was in, where the process was killed.
    pub within: Vec<&'static str>,
}

impl Attacher {
    pub(super) fn learn_endings(&mut self, exit_code: u32) -> Result<(), Box<dyn std::error::Error>> {
        let config = self.maps.processes.get(&0, 0).unwrap_or_default();
        self.set_processes(ProcessConfig { exit_code, ..config })?;
        let exit = self.loader.program(Program::Exit, Flavour::RawTracepoint)?;
        let link = sys::raw_tracepoint(exit, c"sched_process_exit")?;
        self.host_links.push(Link::RawTracepoint(link));
        Ok(())
    }

    /// How a process ended that has; to be asked before it is forgotten.
    pub fn ending(&self, tgid: Tgid) -> Ending {
        let code = self.maps.endings.get(&tgid.0, 0).ok();
        let status = code.map(|code| ExitStatus::from_raw(code as i32));
        let mut within = Vec::new();
        for ended in self.ended_within(tgid) {
            // Who exits by itself may do so from a thread that others are not done with.
            if status.is_none_or(|status| status.code().is_none()) {
                within.extend(self.sites.get(ended.site as usize).map(|site| site.probe.site));
            }
        }
        within.sort_unstable();
        within.dedup();
        Ending { status, within }
    }

    fn ended_within(&self, tgid: Tgid) -> Vec<Within> {
        self.maps.within.keys().flatten().filter(|ended| ended.tgid == tgid.0).collect()
    }

    /// Forgets a process that ended: its id may come again, its calls in flight never return.
    pub fn forget(&mut self, tgid: Tgid) {
        let _ = self.maps.targets.remove(&tgid.0);
        let _ = self.maps.endings.remove(&tgid.0);
        for ended in self.ended_within(tgid) {
            let _ = self.maps.within.remove(&ended);
        }
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

    /// Makes room in the maps that are kept by thread: once for all processes that have ended since the last time, since
    /// all of a map must be gone through.
    pub fn sweep(&mut self) {
        let gone = std::mem::take(&mut self.gone);
        if gone.is_empty() {
            return;
        }
        let is_gone = |pid_tgid: u64| gone.contains(&Tgid((pid_tgid >> 32) as u32));
        let stale: Vec<u64> =
            self.maps.calls_by_thread.keys().flatten().filter(|key| is_gone(*key)).collect();
        for key in stale {
            let _ = self.maps.calls_by_thread.remove(&key);
        }
        self.forget_threads(is_gone);
    }
}
