//! What of a trace goes into its dump.

use super::Config;
use crate::{
    dump::{Fact, Pipeline, Place, Row, rows_of},
    model::{Alloc, Change, Event, EventKind, Ledger, Name, Pool, Process, StepsFrom, Tid},
};

/// Puts what an event changed into the dump, as far as it is wanted there.
pub(super) fn write_rows(
    dump: Option<&Pipeline>,
    config: &Config,
    event: &Event,
    change: &Change,
    ledger: &Ledger,
) {
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
    if !wanted {
        return;
    }
    let process = ledger.process(event.tgid);
    let chosen = Chosen { config, event, change, process };
    rows_of(event, change, ledger, |mut row| {
        if config.decompose
            && let Fact::Event(EventKind::Alloc(alloc)) = &row.fact
        {
            row.owner = process.and_then(|process| owner(process, alloc, event.tid));
        }
        if !config.only_steps.is_all() && !chosen.has(&row) {
            return;
        }
        match row.place() {
            Some(Place::Npu(device)) if !selects(&config.only_devices, device.0) => {}
            _ => dump.push(row),
        }
    });
}

/// What goes into the dump of chosen steps: what happened in them, how their blocks ended, and all that it takes to
/// number steps as they were when the dump is read.
struct Chosen<'a> {
    config: &'a Config,
    event: &'a Event,
    change: &'a Change,
    process: Option<&'a Process>,
}

impl Chosen<'_> {
    fn has(&self, row: &Row) -> bool {
        let steps = &self.config.only_steps;
        let now = self.process.is_none_or(|process| steps.contains(process.steps().current()));
        match (&row.fact, self.change) {
            (Fact::NeverFreed { .. }, Change::Allocated { replaced: Some(block), .. }) => {
                steps.contains(block.step)
            }
            (Fact::NeverFreed { .. }, Change::Reset { blocks, .. } | Change::Ended { blocks, .. }) => {
                let at = blocks.binary_search_by_key(&row.allocation_id, |block| Some(block.id));
                at.ok().and_then(|at| blocks.get(at)).is_none_or(|block| steps.contains(block.step))
            }
            (Fact::Event(EventKind::Free(_)), Change::Freed(block)) => now || steps.contains(block.step),
            (Fact::Event(_), _) => now || self.numbers_steps(),
            _ => now,
        }
    }

    fn numbers_steps(&self) -> bool {
        let Config { steps_from, .. } = self.config;
        match &self.event.kind {
            EventKind::AclInit
            | EventKind::AclFinalize
            | EventKind::DeviceReset { .. }
            | EventKind::Exec
            | EventKind::Exit => true,
            EventKind::Op { .. } => {
                let infers = matches!(steps_from, StepsFrom::MarksOrOps | StepsFrom::Ops);
                let steps = self.process.map(Process::steps);
                infers && steps.is_none_or(|steps| steps.list().is_empty() || steps.inferred().is_some())
            }
            kind => self.config.steps.begins_step(kind) || matches!(self.change, Change::Step { .. }),
        }
    }
}

/// Labels of what a thread allocates now: the operator, and what the program calls it.
fn owner(process: &Process, alloc: &Alloc, tid: Tid) -> Option<Name> {
    let op = process.current_op(tid).filter(|_| !matches!(alloc.pool, Pool::Hal | Pool::Host));
    match (op, process.label(tid, alloc.stack.as_deref())) {
        (Some(op), Some(label)) => Some(format!("ops@{op}@{label}").into()),
        (Some(op), None) => Some(format!("ops@{op}").into()),
        (None, label) => label,
    }
}

/// Whether a list that is empty for "all" has it.
fn selects<T: PartialEq>(list: &[T], item: T) -> bool {
    list.is_empty() || list.contains(&item)
}
