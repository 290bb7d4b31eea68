//! Newtypes of the model, so that a thread id can not be passed where a process id is meant.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

/// Where a process lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Container {
    /// 64 hexadecimal digits, as docker, containerd, CRI-O and podman have them.
    pub id: String,
    /// UID of the Kubernetes pod.
    pub pod: Option<String>,
}

id! {
    /// A process: the id of its thread group, as the tracer's PID namespace numbers it.
    Tgid(u32)
}
id! {
    /// A thread.
    Tid(u32)
}
id! {
    /// A device as the driver numbers it (after `ASCEND_RT_VISIBLE_DEVICES`).
    DeviceId(u16)
}
id! {
    /// A point in time: ns of the wall clock since the epoch.
    Nanos(u64)
}
id! {
    /// The number of a block within its process, from 1, in order of allocation.
    AllocationId(u64)
}
id! {
    /// The number of a step within its process. Step 1 is the first whole step seen after attach;
    /// 0 is everything before it.
    StepId(u32)
}

/// An address in device memory, or the handle of a physical allocation (`halMemCreate`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevicePtr(pub u64);

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:x}", self.0)
    }
}

impl Serialize for DevicePtr {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

/// Who hands out the block. Pools nest: blocks of [`Pool::Pta`] lie in blocks of [`Pool::Hal`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Pool {
    /// Driver allocations on a device.
    #[serde(rename = "HAL")]
    Hal,
    /// Caching allocator of torch_npu.
    #[serde(rename = "PTA")]
    Pta,
    /// Workspace allocator of torch_npu.
    #[serde(rename = "PTA_WORKSPACE")]
    PtaWorkspace,
    /// Ascend Transformer Boost.
    #[serde(rename = "ATB")]
    Atb,
    /// Memory pool of MindSpore.
    #[serde(rename = "MINDSPORE")]
    Mindspore,
    /// Pinned host memory allocated by the driver.
    #[serde(rename = "HOST")]
    Host,
}

impl Pool {
    pub const ALL: [Pool; 6] =
        [Pool::Hal, Pool::Pta, Pool::PtaWorkspace, Pool::Atb, Pool::Mindspore, Pool::Host];

    pub fn name(self) -> &'static str {
        match self {
            Pool::Hal => "HAL",
            Pool::Pta => "PTA",
            Pool::PtaWorkspace => "PTA_WORKSPACE",
            Pool::Atb => "ATB",
            Pool::Mindspore => "MINDSPORE",
            Pool::Host => "HOST",
        }
    }
}

impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
