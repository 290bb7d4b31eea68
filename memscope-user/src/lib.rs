//! memscope-trace: a zero-modification tracer of device memory for Huawei Ascend hosts.

pub mod analysis;
pub mod dump;
pub mod model;
pub mod probes;
pub mod report;
pub mod text;
