//! What becomes of the processes themselves.

use core::ffi::c_void;

use aya_ebpf::helpers::{bpf_get_current_pid_tgid, bpf_ktime_get_ns};
use memscope_ebpf::{Header, kind, verdict};

use crate::{
    site::{Hit, TARGETS, notify},
    stack::INTERPRETERS,
};

/// The dynamic linker has mapped or unmapped libraries (`_dl_debug_state`, which exists for debuggers).
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn mapped(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::entry(ctx) {
        notify(hit.header(kind::MAPPED, 0));
    }
    0
}

/// `exec` of an observed process: everything it held is gone, its libraries are others.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/sched_process_exec")]
pub extern "C" fn exec(_ctx: *mut c_void) -> u32 {
    let pid_tgid = bpf_get_current_pid_tgid();
    let tgid = (pid_tgid >> 32) as u32;
    let _ = INTERPRETERS.remove(&tgid);
    // SAFETY: a plain u32, which the collector writes as a whole.
    if unsafe { TARGETS.get(&tgid) }.is_some_and(|v| *v == verdict::OBSERVE) {
        // SAFETY: a helper call without arguments.
        let time_ns = unsafe { bpf_ktime_get_ns() };
        notify(Header { time_ns, tgid, tid: pid_tgid as u32, site: u32::MAX, kind: kind::EXEC, flags: 0 });
    }
    0
}

/// Nothing: what a bare probe costs.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn empty(_ctx: *mut c_void) -> u32 {
    0
}

/// As [`empty`], on return.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uretprobe")]
pub extern "C" fn empty_return(_ctx: *mut c_void) -> u32 {
    0
}
