//! A row of a dump: an event, and what the ledger knew about it when it happened.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::model::{DeviceId, DevicePtr, Event, EventKind, Name, Nanos, Pool, Tgid, Tid};

#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub time: Nanos,
    pub tgid: Tgid,
    pub tid: Tid,
    pub fact: Fact,
    /// The device of the row where the event itself does not say: of the block that is freed, or the one that
    /// is current on the thread. A row without any goes into every file of the process.
    pub device: Option<DeviceId>,
    /// Number of the block within its process, from 1; the same on all rows of the block.
    pub allocation_id: Option<u64>,
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
    /// An operator used a block.
    Access {
        /// Pool of the block.
        pool: Option<Pool>,
        ptr: DevicePtr,
        /// Bytes of the tensor.
        size: u64,
        access: AccessKind,
        /// The operator.
        name: Option<Name>,
    },
    /// The block was alive when the trace or the process ended: written as a FREE row with `shadow:true`.
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessKind {
    Read,
    Write,
    Unknown,
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
            Fact::OpEnd { .. }
            | Fact::Access { .. }
            | Fact::NeverFreed { .. }
            | Fact::StepEnd { .. }
            | Fact::Lost { .. } => return None,
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
            Fact::Access { pool, .. } => (*pool, None),
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
