//! What the simulated CANN libraries share.
//!
//! Each library under `libs/` is a shared object of its own with the name, the exported symbols and the
//! callees of the CANN library it stands for: `aclrtMalloc` (libascendcl.so or libacl_rt.so) jumps to
//! `aclrtMallocImpl`, which calls `rtMalloc` (libruntime.so), which calls `halMemAlloc` (libascend_hal.so).
//! The modules [`hal`], [`rt`] and [`acl`] are the headers through which one library calls the next; this
//! crate holds no state, since it is linked into every library separately.
//!
//! Settings are read from the environment of the simulated process: see [`settings`]. With
//! `SIM_CANN_TRACE` every library appends what it did to one file: see [`trace`].

pub mod acl;
pub mod arena;
pub mod ffi;
pub mod forward;
pub mod hal;
pub mod op;
pub mod rt;
pub mod settings;
pub mod tensor;
pub mod trace;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`; a panic elsewhere does not make its data unusable here.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// CLOCK_MONOTONIC in nanoseconds: the clock of `bpf_ktime_get_ns`.
pub fn now_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid timespec to write to.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}
