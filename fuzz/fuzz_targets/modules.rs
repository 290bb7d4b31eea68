//! Unwind tables and symbols of files with code.

#![no_main]

use libfuzzer_sys::fuzz_target;
use memscope::stacks::fuzzing;
use memscope_fuzz::{begin_with, exercise};

fuzz_target!(
    init: begin_with(exercise::libraries()),
    |data: &[u8]| fuzzing::modules(memscope_fuzz::file(data), data)
);
