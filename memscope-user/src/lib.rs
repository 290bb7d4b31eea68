//! memscope-trace: a zero-modification tracer of device memory for Huawei Ascend hosts.

pub mod analysis;
pub mod attach;
pub mod check;
pub mod cli;
pub mod collect;
pub mod dump;
pub mod model;
pub mod probes;
pub mod report;
pub mod stacks;
pub mod text;
pub mod trace;
