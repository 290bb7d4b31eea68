//! Captures.

#![no_main]

use libfuzzer_sys::fuzz_target;
use memscope::dump::Format;
use memscope_fuzz::{begin_with, exercise};

fuzz_target!(
    init: begin_with(exercise::dumps(Format::Capture)),
    |data: &[u8]| memscope_fuzz::dump("memscope_dump_1.arrows", data)
);
