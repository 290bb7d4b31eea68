//! Events, blocks, pools, devices and steps. Knows neither BPF nor files.

mod event;
mod ids;

pub use event::{Alloc, AllocFailed, DriverAlloc, Event, EventKind, Free, Name, PageType, Totals};
pub use ids::{DeviceId, DevicePtr, Nanos, Pool, StepId, Tgid, Tid};
