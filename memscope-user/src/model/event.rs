//! What happened in a traced process. Live tracing and dump readers produce the same events.

use std::sync::Arc;

use super::{DeviceId, DevicePtr, Nanos, Pool, Stack, Tgid, Tid};

/// A name or text from the target, already made safe to print (see [`crate::text::sanitize`]).
pub type Name = Arc<str>;

#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    pub time: Nanos,
    pub tgid: Tgid,
    pub tid: Tid,
    pub kind: EventKind,
}

#[derive(Debug, Clone, PartialEq)]
pub enum EventKind {
    Alloc(Alloc),
    Free(Free),
    AllocFailed(AllocFailed),
    /// Physical memory (`halMemCreate`) got an address.
    Map {
        ptr: DevicePtr,
        /// Bytes.
        size: u64,
        handle: DevicePtr,
    },
    /// The address names no memory any more.
    Unmap {
        ptr: DevicePtr,
    },
    /// An operator was enqueued or begun by this thread.
    Op {
        name: Name,
    },
    /// A kernel was launched by this thread.
    Launch {
        name: Option<Name>,
        /// `None` in dumps of 2025.
        stream: Option<u64>,
    },
    /// An operator used a block, or a part of one.
    Access(Access),
    Mark {
        text: Name,
        domain: Option<Name>,
    },
    RangeBegin {
        /// Unique within the process; [`EventKind::RangeEnd`] names it.
        range: u64,
        text: Name,
        domain: Option<Name>,
    },
    RangeEnd {
        /// `None` when the beginning was not seen (before attach, or lost).
        range: Option<u64>,
    },
    /// A step begins here, as far as operators tell (see [`crate::analysis::infer_steps`]).
    StepInferred(Inferred),
    /// The steps inferred so far were none.
    StepsRetracted,
    /// The thread made this device current.
    DeviceSet {
        device: DeviceId,
    },
    /// Everything the process holds on the device is given back without single frees.
    DeviceReset {
        device: DeviceId,
    },
    AclInit,
    AclFinalize,
    /// The process replaced its program: nothing it held remains.
    Exec,
    /// The process ended; what is live now was never freed.
    Exit,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Alloc {
    pub pool: Pool,
    /// `None` where neither the event nor the thread says.
    pub device: Option<DeviceId>,
    pub ptr: DevicePtr,
    /// Bytes.
    pub size: u64,
    pub totals: Option<Totals>,
    pub driver: Option<DriverAlloc>,
    /// Where in the program it was, where that is known.
    pub stack: Option<Arc<Stack>>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Free {
    pub pool: Pool,
    pub device: Option<DeviceId>,
    pub ptr: DevicePtr,
    /// Bytes, where the event says (pools do, the driver does not).
    pub size: Option<u64>,
    pub totals: Option<Totals>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Access {
    /// Pool of the block; `None` where the event does not say.
    pub pool: Option<Pool>,
    /// In the block, not always at its beginning.
    pub ptr: DevicePtr,
    /// Bytes.
    pub size: u64,
    pub kind: AccessKind,
    /// The operator.
    pub op: Option<Name>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessKind {
    Read,
    Write,
    Unknown,
}

/// Why steps are believed to be steps, as of a step's beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inferred {
    pub basis: Basis,
    /// Steps that have ended.
    pub periods: u32,
    /// Those of them that are like most: with the same operators, or with the same optimizer.
    pub equal: u32,
}

/// What steps are inferred from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// Each ends with an optimizer.
    Optimizer,
    /// The same operators come again and again.
    Repetition,
}

/// The allocator's own totals for its device right after an event, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    pub allocated: u64,
    pub reserved: u64,
}

/// What the driver was told about an allocation.
#[derive(Debug, Clone, PartialEq)]
pub struct DriverAlloc {
    /// Owner module (`flag >> 56` of `halMemAlloc`; 33 = APP). A dump need not say it.
    pub module: Option<u8>,
    /// The same.
    pub page: Option<PageType>,
    /// Physical memory without an address (`halMemCreate`): `ptr` is the handle.
    pub create: bool,
    /// The runtime call above it (`aclrtMallocAlign32`), and the bytes asked of that call.
    pub api: Option<(&'static str, u64)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageType {
    Normal,
    Huge,
    Giant,
}

#[derive(Debug, Clone, PartialEq)]
pub struct AllocFailed {
    pub pool: Pool,
    /// The function that refused, as the target called it.
    pub function: &'static str,
    pub device: Option<DeviceId>,
    /// Bytes asked.
    pub size: u64,
    /// What it returned (6: out of memory, for the driver).
    pub code: i32,
    /// The runtime call above it, and the bytes asked of that call.
    pub api: Option<(&'static str, u64)>,
    /// Where in the program it was, where that is known.
    pub stack: Option<Arc<Stack>>,
}
