//! What of a trace goes into its dump.

use super::Config;
use crate::{
    dump::{Fact, Pipeline, Place, rows_of},
    model::{Alloc, Change, Event, EventKind, Ledger, Name, Pool, Process, Tid},
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
