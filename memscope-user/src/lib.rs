//! memscope-trace: a zero-modification tracer of device memory for Huawei Ascend hosts.

// Printing macros panic where the reader has gone or the disk is full.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

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
