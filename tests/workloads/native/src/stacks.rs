//! Allocations whose native stacks are known: the functions here call each other as their callers say, and none of
//! them is inlined or made a jump.

use std::hint::black_box;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use serde_json::json;

use crate::cann::{self, Address, check};
use crate::truth::{Tally, Truth};

/// Bytes of a block.
const SIZE: usize = 2 << 20;

/// What the allocations of a round gave.
static TAKEN: Mutex<Vec<Address>> = Mutex::new(Vec::new());

/// Rounds, of which every one but the first begins when the file `GATES/ROUND` is there.
pub fn play(device: i32, rounds: u32, gates: &Path, truth: &Truth) -> anyhow::Result<Tally> {
    let mut tally = Tally::default();
    for round in 0..rounds {
        truth.tell("waits", json!({ "round": round }))?;
        while round > 0 && !gates.join(round.to_string()).exists() {
            std::thread::sleep(Duration::from_millis(2));
        }
        // Freed together, so that no two have one address.
        let mut held = Vec::new();
        for (kind, play, functions, is_whole) in KINDS {
            play(device);
            for ptr in std::mem::take(&mut *TAKEN.lock().unwrap_or_else(|e| e.into_inner())) {
                let told = json!({
                    "round": round, "kind": kind, "ptr": ptr, "functions": functions, "whole": is_whole,
                });
                truth.tell("stack", told)?;
                held.push(ptr);
            }
        }
        for ptr in held {
            cann::free(ptr)?;
            tally.allocations += 1;
            tally.frees += 1;
        }
    }
    Ok(tally)
}

/// Name, how it is played, the functions of this file that are on the stack (innermost first, and behind the last one
/// [`play`], unless there is a `*`: then the thread begins with it), and whether all of it can be told: by unwind tables
/// and a copy of the stack on x86_64, by frame pointers on aarch64.
type Kind = (&'static str, fn(i32), &'static [&'static str], bool);

const KINDS: &[Kind] = &[
    ("nested", nested, &["take", "inner", "middle", "nested"], true),
    ("recursion", recursion, &["take", "recurse", "recurse", "recurse", "recurse", "recursion"], true),
    ("callback", callback, &["take", "compare", "callback"], true),
    #[cfg(target_arch = "x86_64")]
    ("signal", signal, &["take", "handle", "signal"], true),
    // The interrupted function is in no frame record.
    #[cfg(target_arch = "aarch64")]
    ("signal", signal, &["take", "handle"], false),
    ("thread", thread, &["take", "on_thread", "*"], true),
    ("aligned", aligned, &["take", "aligned"], true),
    ("large", large, &["take", "large"], cfg!(target_arch = "aarch64")),
    #[cfg(target_arch = "x86_64")]
    ("without frame pointer", without_frame_pointer, &["take", "without_frame_pointer"], true),
    #[cfg(target_arch = "x86_64")]
    ("without tables", without_tables, &["take"], false),
    ("context", context, &[], true),
];

#[inline(never)]
extern "C" fn take() {
    if let Ok(ptr) = cann::allocate(black_box(SIZE)) {
        TAKEN.lock().unwrap_or_else(|e| e.into_inner()).push(ptr);
    }
    black_box(());
}

macro_rules! calls {
    ($($name:ident => $callee:expr;)*) => { $(
        #[inline(never)]
        fn $name(_: i32) {
            let _: () = $callee;
            black_box(());
        }
    )* };
}

calls! {
    nested => middle(0);
    middle => inner(0);
    inner => take();
    recursion => recurse(3);
}

#[inline(never)]
fn recurse(depth: u32) {
    match black_box(depth) {
        0 => take(),
        depth => recurse(depth - 1),
    }
    black_box(());
}

/// Through the C library, whose functions have no frame pointers.
#[inline(never)]
fn callback(_: i32) {
    let mut numbers = [2u64, 1];
    // SAFETY: two elements of 8 bytes, and a function that compares without looking at them.
    unsafe { libc::qsort(numbers.as_mut_ptr().cast(), 2, 8, Some(compare)) };
    black_box(numbers);
}

#[inline(never)]
extern "C" fn compare(_: *const libc::c_void, _: *const libc::c_void) -> i32 {
    take();
    black_box(0)
}

#[inline(never)]
fn signal(_: i32) {
    // SAFETY: the handler takes no locks that the interrupted thread holds: that is in `raise`.
    unsafe {
        libc::signal(libc::SIGUSR1, handle as *const () as usize);
        libc::raise(libc::SIGUSR1);
        libc::signal(libc::SIGUSR1, libc::SIG_DFL);
    }
    black_box(());
}

#[inline(never)]
extern "C" fn handle(_: i32) {
    take();
    black_box(());
}

#[inline(never)]
fn thread(device: i32) {
    let _ = std::thread::spawn(move || on_thread(device)).join();
    black_box(());
}

#[inline(never)]
fn on_thread(device: i32) {
    if cann::aclrtSetDevice(device) == 0 {
        take();
    }
    black_box(());
}

/// The compiler aligns the stack pointer, and can no longer say how far the caller is from it.
#[inline(never)]
fn aligned(_: i32) {
    #[repr(align(128))]
    struct Aligned([u8; 200]);
    let mut bytes = Aligned([1; 200]);
    black_box(&mut bytes.0);
    take();
    black_box(&mut bytes.0);
}

/// More of a frame than is copied of a stack.
#[inline(never)]
fn large(_: i32) {
    let mut bytes = [1u8; 40 << 10];
    black_box(&mut bytes);
    take();
    black_box(&mut bytes);
}

#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    // Keeps something else where others have a frame pointer, and has a table that says so.
    ".type calls_without_frame_pointer, @function",
    "calls_without_frame_pointer:",
    ".cfi_startproc",
    "push rbp",
    ".cfi_def_cfa_offset 16",
    ".cfi_offset rbp, -16",
    "mov rbp, 1",
    "call rdi",
    "pop rbp",
    ".cfi_def_cfa_offset 8",
    "ret",
    ".cfi_endproc",
    ".size calls_without_frame_pointer, . - calls_without_frame_pointer",
    // Has no table. The frame pointer is that of a caller, which leads an unwinder that trusts it past others.
    ".type calls_without_tables, @function",
    "calls_without_tables:",
    "sub rsp, 8",
    "call rdi",
    "add rsp, 8",
    "ret",
    ".size calls_without_tables, . - calls_without_tables",
);

#[cfg(target_arch = "x86_64")]
unsafe extern "C" {
    fn calls_without_frame_pointer(function: extern "C" fn());
    fn calls_without_tables(function: extern "C" fn());
}

#[cfg(target_arch = "x86_64")]
#[inline(never)]
fn without_frame_pointer(_: i32) {
    // SAFETY: the function above calls its argument and returns.
    unsafe { calls_without_frame_pointer(take) };
    black_box(());
}

#[cfg(target_arch = "x86_64")]
#[inline(never)]
fn without_tables(_: i32) {
    // SAFETY: as above.
    unsafe { calls_without_tables(take) };
    black_box(());
}

/// Memory that CANN takes for itself within a call that has a return probe.
#[inline(never)]
fn context(device: i32) {
    let mut context = 0;
    let made = check(cann::aclrtCreateContext(&mut context, device + 1), "aclrtCreateContext");
    if made.is_ok() {
        let _ = cann::aclrtResetDevice(device + 1);
    }
    let _ = cann::aclrtSetDevice(device);
    black_box(());
}
