//! What becomes of the processes themselves.

use core::ffi::c_void;

use aya_ebpf::{
    helpers::{
        bpf_get_current_pid_tgid, bpf_get_current_task,
        generated::{bpf_ktime_get_ns, bpf_probe_read_kernel},
    },
    macros::map,
    maps::{Array, HashMap},
};
use memscope_ebpf::{Header, MAX_TARGETS, MAX_WITHIN, ProcessConfig, Within, kind, mix, verdict};

use crate::{
    calls,
    site::{Hit, TARGETS, notify},
    stack::{INTERPRETERS, thread_state},
};

#[map]
static PROCESSES: Array<ProcessConfig> = Array::with_max_entries(1, 0);
/// What `wait` will say of a process: the exit code of its thread that ended last.
#[map]
static ENDINGS: HashMap<u32, u32> = HashMap::with_max_entries(MAX_TARGETS, 0);
/// Calls that threads have ended within.
#[map]
static WITHIN: HashMap<Within, u8> = HashMap::with_max_entries(MAX_WITHIN, 0);

/// The dynamic linker has mapped or unmapped libraries (`_dl_debug_state`, which exists for debuggers).
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn mapped(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::entry(ctx) {
        if !notify(hit.header(kind::MAPPED, 0)) {
            hit.ring_full();
        }
    }
    0
}

/// `exec`: everything the process held is gone, its libraries are others, and what was of no interest may be now.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/sched_process_exec")]
pub extern "C" fn exec(_ctx: *mut c_void) -> u32 {
    let pid_tgid = bpf_get_current_pid_tgid();
    let tgid = (pid_tgid >> 32) as u32;
    let _ = INTERPRETERS.remove(&tgid);
    let every = PROCESSES.get(0).is_some_and(|config| config.every_exec != 0);
    // SAFETY: a plain u32, which the collector writes as a whole.
    let found = unsafe { TARGETS.get(&tgid) };
    let observed = found.is_some_and(|v| *v == verdict::OBSERVE);
    if found.is_some_and(|v| *v == verdict::IGNORE) {
        let _ = TARGETS.remove(&tgid);
    }
    if every || observed {
        // SAFETY: a helper call without arguments.
        let time_ns = unsafe { bpf_ktime_get_ns() };
        notify(Header { time_ns, tgid, tid: pid_tgid as u32, site: u32::MAX, kind: kind::EXEC, flags: 0 });
    }
    0
}

/// Another task begins, and is not running yet. A process has its parent's interpreter: the thread that forked is its only
/// one. What it makes of it is its own, and so are the ids of its stacks: two processes may have different code at one
/// address.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/sched_process_fork")]
pub extern "C" fn fork(ctx: *mut c_void) -> u32 {
    let pid_tgid = bpf_get_current_pid_tgid();
    let parent = (pid_tgid >> 32) as u32;
    // SAFETY: written as a whole, by the collector and by this program for a process that has not run yet.
    let Some(interpreter) = (unsafe { INTERPRETERS.get(&parent) }) else { return 0 };
    let Some(config) = PROCESSES.get(0) else { return 0 };
    let mut child = 0u32;
    // SAFETY: the tracepoint's arguments are the parent's task and the child's; a local u32; the kernel checks the address.
    unsafe {
        let task = (*ctx.cast::<[u64; 2]>())[1].wrapping_add(config.tgid as u64);
        bpf_probe_read_kernel((&raw mut child).cast(), 4, task as *const c_void);
    }
    if child != 0 && child != parent {
        let mut inherited = *interpreter;
        // SAFETY: a helper call without arguments.
        inherited.salt = mix(mix(interpreter.salt, child as u64), unsafe { bpf_ktime_get_ns() });
        inherited.main_thread = thread_state(interpreter, pid_tgid as u32).unwrap_or(0);
        // Without room the collector will have to look at it first.
        let _ = INTERPRETERS.insert(&child, &inherited, 0);
    }
    0
}

/// The end of a thread of an observed process. Those of a process that is killed, or exits, all end with its code.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/sched_process_exit")]
pub extern "C" fn exit(_ctx: *mut c_void) -> u32 {
    let pid_tgid = bpf_get_current_pid_tgid();
    let tgid = (pid_tgid >> 32) as u32;
    // SAFETY: as in `exec`.
    let observed = unsafe { TARGETS.get(&tgid) }.is_some_and(|v| *v == verdict::OBSERVE);
    calls::end(pid_tgid, |site| {
        if observed {
            let _ = WITHIN.insert(&Within { tgid, site }, &1, 0);
        }
    });
    if !observed {
        // No one else clears away what it has inherited.
        if pid_tgid as u32 == tgid {
            let _ = INTERPRETERS.remove(&tgid);
        }
        return 0;
    }
    if let Some(config) = PROCESSES.get(0)
        && config.exit_code != 0
    {
        let mut code = 0u32;
        // SAFETY: a local u32; the kernel checks the address.
        unsafe {
            let task = bpf_get_current_task().wrapping_add(config.exit_code as u64);
            bpf_probe_read_kernel((&raw mut code).cast(), 4, task as *const c_void);
        }
        let _ = ENDINGS.insert(&tgid, &code, 0);
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
