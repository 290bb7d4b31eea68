//! Events, blocks, pools, devices and steps. Knows neither BPF nor files.

mod block;
mod event;
mod extents;
mod ids;
mod labels;
mod ledger;
mod module;
mod segments;
mod stack;
mod step_set;
mod steps;
#[cfg(test)]
pub(crate) mod testing;
mod windows;

pub use block::{Block, Driver};
pub use event::{
    Access, AccessKind, Alloc, AllocFailed, Basis, DriverAlloc, Event, EventKind, Free, Inferred, Name,
    PageType, Totals,
};
pub use extents::FreeSpace;
pub use ids::{AllocationId, Container, DeviceId, DevicePtr, Nanos, Pool, StepId, Tgid, Tid};
pub use ledger::{BlockRef, Change, Count, DeviceMemory, DriverUse, Ending, Ledger, PoolUse, Process};
pub use module::Module;
pub use stack::{Frame, NativeFrame, NativeStack, Origin, Stack, Whose};
pub use step_set::StepSet;
pub use steps::{Step, StepRule, Steps, StepsFrom};
