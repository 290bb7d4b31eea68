//! Links of programs to points of files, by what the kernel offers.

use std::{ffi::CString, io, os::fd::OwnedFd};

use super::{
    Attacher, Scope,
    loader::{Flavour, Program},
    privilege,
    sys::{self, PerfUprobe},
};
use crate::model::Tgid;

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

/// A link to the kernel; dropping it detaches.
#[allow(dead_code, reason = "held for their drop")]
pub(super) enum Link {
    Multi(OwnedFd),
    Perf(PerfUprobe),
    RawTracepoint(OwnedFd),
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

impl Attacher {
    /// Attaches one program to points of one file; with the result for each site.
    pub(super) fn attach_points(
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
