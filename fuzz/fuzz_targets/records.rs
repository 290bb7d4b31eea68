//! Records of the ring buffer.

#![no_main]

use libfuzzer_sys::fuzz_target;
use memscope_fuzz::{begin_with, records};

fuzz_target!(
    init: begin_with(records::seeds()),
    |data: &[u8]| records::decode(data)
);
