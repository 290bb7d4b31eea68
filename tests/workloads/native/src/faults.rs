//! Scenes that stand faults of others: work that checks itself, and texts that mean harm.

use std::collections::VecDeque;
use std::ffi::CString;
use std::hash::{DefaultHasher, Hash, Hasher};

use anyhow::{Context as _, ensure};
use serde_json::json;

use crate::cann::{self, Address, Text, check};
use crate::scene::load;
use crate::truth::{Block, Tally, Truth, monotonic_ns};

const HOST_TO_DEVICE: u32 = 1;
const DEVICE_TO_HOST: u32 = 2;

/// Blocks held at one time.
const HELD: usize = 32;

/// Fills COUNT blocks with numbers, reads them back when others have come between, and frees them. The digest is that of
/// all that was read: the same for each run. `longest_ns` is the longest time that a block took.
pub fn verify(count: u64, truth: &Truth) -> anyhow::Result<Tally> {
    let mut held = VecDeque::new();
    let mut digest = DefaultHasher::new();
    let (mut longest, mut last) = (0, monotonic_ns());
    let mut check_oldest = |held: &mut VecDeque<(Address, Vec<u64>)>| -> anyhow::Result<()> {
        let Some((address, wanted)) = held.pop_front() else { return Ok(()) };
        let mut found = vec![0u64; wanted.len()];
        let (bytes, to) = (size_of_val(wanted.as_slice()), found.as_mut_ptr() as Address);
        check(cann::aclrtMemcpyAsync(to, bytes, address, bytes, DEVICE_TO_HOST, 0), "aclrtMemcpyAsync")?;
        ensure!(found == wanted, "the block at {address:#x} is not as it was written");
        found.hash(&mut digest);
        cann::free(address)
    };
    for index in 0..count {
        let words = 64 << (index % 5);
        let numbers: Vec<u64> =
            (0..words).map(|word| (index + word).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        let (bytes, from) = (size_of_val(numbers.as_slice()), numbers.as_ptr() as Address);
        let address = cann::allocate(bytes)?;
        check(cann::aclrtMemcpyAsync(address, bytes, from, bytes, HOST_TO_DEVICE, 0), "aclrtMemcpyAsync")?;
        held.push_back((address, numbers));
        if held.len() > HELD {
            check_oldest(&mut held)?;
        }
        let now = monotonic_ns();
        longest = longest.max(now - last);
        last = now;
    }
    while !held.is_empty() {
        check_oldest(&mut held)?;
    }
    truth
        .tell("verified", json!({ "digest": format!("{:016x}", digest.finish()), "longest_ns": longest }))?;
    Ok(Tally { allocations: count, frees: count, ..Tally::default() })
}

/// What terminals, spreadsheets, parsers and careless buffers choke on.
fn hostile_texts() -> Vec<CString> {
    let long = [b"\x1b[31m".as_slice(), &[b'A'; 1 << 20]].concat();
    let texts: [&[u8]; 11] = [
        b"\x1b[2J\x1b]0;owned\x07\x08",
        b"\xc2\x9b2J and \x7f",
        b"=cmd|' /C calc'!A0",
        b"+1+1",
        b"-2+3",
        b"@SUM(1+1)*cmd",
        b"\t=1+1",
        b"two\nlines\r\n9,MALLOC,HAL,1,1,1,1,0,0x1,,,",
        b"\"quoted\",\"and\",{more:1}",
        b"\xff\xfe\x80 is no text, \xe2\x80\xae turns it around",
        &long,
    ];
    texts.into_iter().filter_map(|text| CString::new(text).ok()).collect()
}

/// Steps that leak one block each behind an operator, a mark, a range and a kernel with such a text.
pub fn hostile(device: i32, steps: u64, truth: &Truth) -> anyhow::Result<Tally> {
    type Named = extern "C" fn(Text<'_>, Address);
    let [named] = load(c"libnnopbase.so", [c"_Z19InitL2Phase2ContextPKcP13aclOpExecutor"])?;
    // SAFETY: the function of the simulated library has this signature.
    let named = unsafe { std::mem::transmute::<Address, Named>(named) };
    let mut binary = 0;
    check(cann::aclrtBinaryLoadFromData(0, 0, 0, &mut binary), "aclrtBinaryLoadFromData")?;
    let texts = hostile_texts();
    let mut tally = Tally::default();
    for step in 1..=steps {
        let text = texts.get(step as usize % texts.len()).context("there are texts")?;
        let range = cann::mstxRangeStartA(c"step start".into(), 0);
        let inner = cann::mstxRangeStartA(Text::from(text.as_c_str()), 0);
        cann::mstxMarkA(Text::from(text.as_c_str()), 0);
        named(Text::from(text.as_c_str()), 0);
        let mut function = 0;
        let found = cann::aclrtBinaryGetFunction(binary, Text::from(text.as_c_str()), &mut function);
        check(found, "aclrtBinaryGetFunction")?;
        let launched = cann::aclrtLaunchKernelWithHostArgs(function, 1, 0, 0, 0, 0, 0, 0);
        check(launched, "aclrtLaunchKernelWithHostArgs")?;
        let size = 64 << 10;
        let block = Block { ptr: cann::allocate(size)?, size, device, step: Some(step) };
        truth.tell("leak", &block)?;
        tally.leaked.push(block);
        cann::mstxRangeEnd(inner);
        cann::mstxRangeEnd(range);
    }
    tally.allocations = steps;
    tally.launches = steps;
    Ok(tally)
}
