//! Libraries in which sites are looked for.

#![no_main]

use libfuzzer_sys::fuzz_target;
use memscope_fuzz::{begin_with, exercise};

fuzz_target!(
    init: begin_with(exercise::libraries()),
    |data: &[u8]| exercise::library(&memscope_fuzz::file(data))
);
