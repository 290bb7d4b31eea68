//! A row of a dump: an event, and what the ledger knew about it when it happened.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::model::{
    AllocationId, Block, Change, DeviceId, DevicePtr, Event, EventKind, Ledger, Name, Nanos, Pool, Process,
    Tgid, Tid,
};

#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub time: Nanos,
    pub tgid: Tgid,
    pub tid: Tid,
    pub fact: Fact,
    /// The device of the row where the event itself does not say: of the block that is freed, or the one that
    /// is current on the thread. A row without any goes into every file of the process.
    pub device: Option<DeviceId>,
    /// The block; the same on all its rows.
    pub allocation_id: Option<AllocationId>,
    /// Bytes of the block where the event itself does not say (frees of the driver).
    pub size: Option<u64>,
    /// Labels of the block, joined with `@`, after the one of the framework.
    pub owner: Option<Name>,
}

/// What a row says.
#[derive(Debug, Clone, PartialEq)]
pub enum Fact {
    /// What live tracing reports.
    Event(EventKind),
    /// Dumps of msMemScope tell the beginning and the end of an operator apart.
    OpBegin {
        framework: Framework,
        name: Name,
    },
    OpEnd {
        framework: Framework,
        name: Name,
    },
    /// The block was alive when its process ended or its device was reset: written as a FREE row with `shadow:true`.
    NeverFreed {
        pool: Pool,
        ptr: DevicePtr,
    },
    /// Step `number` ended, by a call of `msmemscope.step()`.
    StepEnd {
        number: u64,
    },
    /// This many events are missing here: the tracer could not keep up.
    Lost {
        events: u64,
    },
}

/// Who announces an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framework {
    /// PyTorch and the libraries below it.
    Aten,
    /// Ascend Transformer Boost.
    Atb,
}

/// Whose memory a row is about; each place of a process has its own file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    Npu(DeviceId),
    /// Pinned host memory, which dumps call device `cpu`.
    Cpu,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Npu(device) => device.fmt(f),
            Place::Cpu => f.write_str("cpu"),
        }
    }
}

impl Serialize for Place {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Place::Npu(device) => device.serialize(s),
            Place::Cpu => s.serialize_str("cpu"),
        }
    }
}

impl Row {
    pub fn new(time: Nanos, tgid: Tgid, tid: Tid, fact: Fact) -> Self {
        Row { time, tgid, tid, fact, device: None, allocation_id: None, size: None, owner: None }
    }

    /// The row as live tracing would have reported it, if it would.
    pub fn event(&self) -> Option<Event> {
        let kind = match &self.fact {
            Fact::Event(kind) => {
                let mut kind = kind.clone();
                match &mut kind {
                    EventKind::Alloc(alloc) => alloc.device = alloc.device.or(self.device),
                    EventKind::AllocFailed(failed) => failed.device = failed.device.or(self.device),
                    EventKind::Free(free) => {
                        free.device = free.device.or(self.device);
                        free.size = free.size.or(self.size);
                    }
                    _ => {}
                }
                kind
            }
            Fact::OpBegin { name, .. } => EventKind::Op { name: name.clone() },
            Fact::OpEnd { .. } | Fact::NeverFreed { .. } | Fact::StepEnd { .. } | Fact::Lost { .. } => {
                return None;
            }
        };
        Some(Event { time: self.time, tgid: self.tgid, tid: self.tid, kind })
    }

    /// Whose memory the row is about; `None` where that is not known.
    pub fn place(&self) -> Option<Place> {
        let (pool, device) = match &self.fact {
            Fact::Event(EventKind::Alloc(alloc)) => (Some(alloc.pool), alloc.device),
            Fact::Event(EventKind::Free(free)) => (Some(free.pool), free.device),
            Fact::Event(EventKind::AllocFailed(failed)) => (Some(failed.pool), failed.device),
            Fact::Event(EventKind::DeviceReset { device }) => (None, Some(*device)),
            Fact::Event(EventKind::Access(access)) => (access.pool, None),
            Fact::NeverFreed { pool, .. } => (Some(*pool), None),
            _ => (None, None),
        };
        match pool {
            Some(Pool::Host) => Some(Place::Cpu),
            _ => device.or(self.device).map(Place::Npu),
        }
    }
}

impl From<Event> for Row {
    fn from(event: Event) -> Self {
        Row::new(event.time, event.tgid, event.tid, Fact::Event(event.kind))
    }
}

/// The rows of an event that the ledger has just applied, in order. Blocks that end with it without a free of their
/// own (their process ended, their device was reset, their address was handed out again) get a row each.
pub fn rows_of(event: &Event, change: &Change, ledger: &Ledger, mut put: impl FnMut(Row)) {
    let process = ledger.process(event.tgid);
    let mut row = Row::from(event.clone());
    match change {
        // The same block again, perhaps of another size: as msMemScope writes it, so that rows still come in pairs.
        Change::Reported(block) => {
            if let Some(block) = process.and_then(|process| process.block(*block)) {
                put(never_freed(block, event.tgid, event.tid, event.time));
                row.device = block.device;
                row.allocation_id = Some(block.id);
            }
        }
        Change::Allocated { block, replaced } => {
            if let Some(replaced) = replaced {
                put(never_freed(replaced, event.tgid, event.tid, event.time));
            }
            if let Some(block) = process.and_then(|process| process.block(*block)) {
                row.device = block.device;
                row.allocation_id = Some(block.id);
            }
        }
        Change::Freed(block) => {
            // The driver frees all its memory by one function, which does not say whose it is.
            if let Fact::Event(EventKind::Free(free)) = &mut row.fact {
                free.pool = block.pool;
            }
            row.device = block.device;
            row.allocation_id = Some(block.id);
            row.size = Some(block.size);
        }
        Change::Used(block) => {
            let block = block.and_then(|block| process.and_then(|process| process.block(block)));
            // Not on any device, or from before attach.
            let Some(block) = block else { return };
            row.device = block.device;
            row.allocation_id = Some(block.id);
            if let Fact::Event(EventKind::Access(access)) = &mut row.fact {
                access.pool = Some(block.pool);
            }
        }
        // Neither its size nor its device is known unless the event says them.
        Change::UnknownFree { .. } => {}
        Change::Failed { device } => row.device = *device,
        Change::Reset { blocks, .. } | Change::Ended { blocks, .. } => {
            blocks.iter().for_each(|block| put(never_freed(block, event.tgid, event.tid, event.time)));
        }
        Change::Nothing | Change::Step { .. } | Change::StepsRetracted | Change::Finalized => {
            row.device = process.and_then(|process| match event.kind {
                EventKind::AclInit | EventKind::AclFinalize => None,
                _ => process.current_device(event.tid),
            });
        }
    }
    put(row);
}

/// Rows for the blocks that are alive when the trace ends, in order of allocation.
pub fn live_rows(process: &Process, time: Nanos) -> impl Iterator<Item = Row> {
    let mut blocks: Vec<&Block> = process.blocks().collect();
    blocks.sort_by_key(|block| block.id);
    let tgid = process.tgid;
    blocks.into_iter().map(move |block| never_freed(block, tgid, Tid(tgid.0), time))
}

fn never_freed(block: &Block, tgid: Tgid, tid: Tid, time: Nanos) -> Row {
    let mut row = Row::new(time, tgid, tid, Fact::NeverFreed { pool: block.pool, ptr: block.ptr });
    row.device = block.device;
    row.allocation_id = Some(block.id);
    row.size = Some(block.size);
    row
}
