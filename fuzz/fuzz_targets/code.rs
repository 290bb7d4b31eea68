//! Python's code objects and their tables of lines.

#![no_main]

use libfuzzer_sys::fuzz_target;
use memscope::stacks::fuzzing;
use memscope_fuzz::begin_with;

fuzz_target!(
    init: begin_with(fuzzing::codes()),
    |data: &[u8]| fuzzing::code(data)
);
