//! Sites: what is attached where, by which programs, and with which settings.

use std::sync::Arc;

use memscope_ebpf::{Counters, NO_ARG, SITE_ANY, Site};

use super::{
    loader::Program,
    process::{FileId, MappedFile},
};
use crate::{
    model::Tgid,
    probes::{
        catalogue::{At, Probe, Shape},
        resolve::Found,
        torch_npu::ReportLayout,
    },
};

/// Which processes a site is hit by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    /// One process and all its threads.
    Process(Tgid),
    /// Every process that maps the file; the map of targets rules out those that are of no interest.
    Host,
}

/// A site as planned or attached. Its index in [`super::Attacher::sites`] is the number in records, until its process ends: then
/// the number is another's.
#[derive(Debug, Clone)]
pub struct SiteState {
    pub probe: &'static Probe,
    pub scope: Scope,
    pub(super) file_id: Option<FileId>,
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

impl SiteState {
    /// Whether both are the same place of the same file, of whatever process.
    pub(super) fn is_at(&self, other: &Self) -> bool {
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

pub(super) fn add(sum: &mut Counters, counters: &Counters) {
    sum.hits += counters.hits;
    sum.unsent += counters.unsent;
    sum.ring_full += counters.ring_full;
    sum.map_full += counters.map_full;
    sum.unmatched += counters.unmatched;
    sum.unreadable += counters.unreadable;
}

pub(super) fn programs_of(probe: &Probe, with_stacks: bool, with_native: bool) -> Vec<Program> {
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
        Shape::Pack { .. } => vec![Program::Pack],
        Shape::Enqueue => vec![Program::Enqueue],
        Shape::Run => vec![Program::Run],
        Shape::Notify => vec![Program::Mapped],
    }
}

pub(super) fn site_of(hit: &Found, scope: Scope, wake_shift: u8, python: Option<u8>) -> Site {
    let tgid = match scope {
        Scope::Process(tgid) => tgid.0,
        Scope::Host => SITE_ANY,
    };
    let mut site = Site { tgid, out: NO_ARG, domain: NO_ARG, skip_at: NO_ARG, wake_shift, ..Site::default() };
    match hit.shape {
        Shape::Enter | Shape::Annotate | Shape::Tensor | Shape::Enqueue | Shape::Run | Shape::Notify => {}
        Shape::EnterReturn { out, ret, structure } => {
            site.out = out;
            site.ret = ret;
            site.arg = if structure == NO_ARG { 0 } else { structure };
        }
        Shape::Pack { arg } => site.arg = arg,
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
pub(super) fn python_minor(files: &[MappedFile]) -> Option<u8> {
    files.iter().find_map(|file| {
        let name = file.path.file_name()?.to_str()?;
        let version = name.strip_prefix("libpython3.").or_else(|| name.strip_prefix("python3."))?;
        version.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    })
}
