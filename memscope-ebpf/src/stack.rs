//! The Python stack of the probed thread, read from the interpreter's own structures.
//!
//! A thread's `PyThreadState` is in a pthread slot, which is there whether or not the thread holds the GIL (PyTorch
//! lets go of it before it allocates). The slot lies at a fixed distance from the robust list that glibc registers
//! with the kernel for each thread. From there the frames are followed, and a stack is sent once: events name it.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::BPF_RB_FORCE_WAKEUP,
    helpers::generated::{
        bpf_get_current_task, bpf_ktime_get_ns, bpf_probe_read_kernel, bpf_probe_read_user,
        bpf_ringbuf_output,
    },
    macros::map,
    maps::{Array, HashMap, LruHashMap},
};
use memscope_ebpf::{
    Interpreter, MAX_DEPTH, MAX_SENT, MAX_TARGETS, MAX_THREADS, MAX_WALKERS, NO_OFFSET, RawFrame, StackHead,
    Thread, flags, identity, kind, mix, no_stack,
};

use crate::{
    site::{Hit, RECORDS},
    user::{read_into, read_u64},
};

const _: () = assert!(MAX_DEPTH.is_power_of_two());

#[map]
pub static INTERPRETERS: HashMap<u32, Interpreter> = HashMap::with_max_entries(MAX_TARGETS, 0);
/// Robust lists by thread, where the kernel does not say where a task has its own.
#[map]
static ROBUST_LISTS: HashMap<u32, u64> = HashMap::with_max_entries(MAX_THREADS, 0);
#[map]
static THREADS: HashMap<u64, Thread> = HashMap::with_max_entries(MAX_WALKERS, 0);
/// A thread of which nothing is known yet: too large to be made on a program's own stack.
#[map]
static BLANK: Array<Thread> = Array::with_max_entries(1, 0);
#[map]
static SENT: LruHashMap<u64, u8> = LruHashMap::with_max_entries(MAX_SENT, 0);

/// The id of the thread's stack, which has been sent; or why there is none.
#[inline(always)]
pub fn capture(hit: &Hit) -> u64 {
    match try_capture(hit) {
        Ok(id) => id,
        Err(why) => why,
    }
}

#[inline(always)]
fn try_capture(hit: &Hit) -> Result<u64, u64> {
    let tgid = (hit.pid_tgid >> 32) as u32;
    // SAFETY: written by the collector only, as a whole and before the process's first stack is taken.
    let interpreter = unsafe { INTERPRETERS.get(&tgid) }.ok_or(no_stack::NO_INTERPRETER)?;
    let state = thread_state(hit, interpreter)?;
    let mut via = 0;
    let mut frame = innermost(interpreter, state)?;
    if frame == 0 && interpreter.main_thread != 0 {
        via = flags::VIA;
        frame = innermost(interpreter, interpreter.main_thread)?;
    }
    if frame == 0 {
        return Err(no_stack::NO_FRAMES);
    }
    let thread = thread(hit.pid_tgid).ok_or(no_stack::NO_ROOM)?;
    if !has_share(thread, interpreter.interval_ns, interpreter.ahead_ns) {
        return Err(no_stack::LIMITED);
    }
    let id = walk(interpreter, thread, frame, mix(interpreter.salt, via as u64));
    // SAFETY: the value is not read.
    if unsafe { SENT.get(&id) }.is_none() {
        send(hit, thread, id, via)?;
        let _ = SENT.insert(&id, &1, 0);
    }
    Ok(id)
}

#[inline(always)]
fn thread_state(hit: &Hit, interpreter: &Interpreter) -> Result<u64, u64> {
    let list = if interpreter.robust_list != 0 {
        let mut list = 0u64;
        // SAFETY: a local u64; the kernel checks the address.
        unsafe {
            let task = bpf_get_current_task().wrapping_add(interpreter.robust_list as u64);
            bpf_probe_read_kernel((&raw mut list).cast(), 8, task as *const c_void);
        }
        list
    } else {
        // SAFETY: a plain u64, which the collector writes as a whole.
        unsafe { ROBUST_LISTS.get(&(hit.pid_tgid as u32)) }.copied().unwrap_or(0)
    };
    if list == 0 {
        return Err(no_stack::NO_SLOT);
    }
    match read_u64(list.wrapping_add(interpreter.slot as u64)) {
        None => Err(no_stack::UNREADABLE),
        Some(0) => Err(no_stack::NO_STATE),
        Some(state) => Ok(state),
    }
}

/// The frame that a thread is in; 0: none.
#[inline(always)]
fn innermost(interpreter: &Interpreter, state: u64) -> Result<u64, u64> {
    let mut frame = read_u64(state.wrapping_add(interpreter.frame as u64)).ok_or(no_stack::UNREADABLE)?;
    if frame != 0 && interpreter.frame_of_cframe != NO_OFFSET {
        frame =
            read_u64(frame.wrapping_add(interpreter.frame_of_cframe as u64)).ok_or(no_stack::UNREADABLE)?;
    }
    Ok(frame)
}

#[inline(always)]
pub fn thread(pid_tgid: u64) -> Option<*mut Thread> {
    if let Some(thread) = THREADS.get_ptr_mut(&pid_tgid) {
        return Some(thread);
    }
    let _ = THREADS.insert(&pid_tgid, BLANK.get(0)?, 0);
    THREADS.get_ptr_mut(&pid_tgid)
}

/// Whether the thread's share of stacks has room for another one.
#[inline(always)]
pub fn has_share(thread: *mut Thread, interval_ns: u32, ahead_ns: u32) -> bool {
    // SAFETY: the entry is this thread's own; a helper call without arguments.
    unsafe {
        let now = bpf_ktime_get_ns();
        let paid = if (*thread).paid_until > now { (*thread).paid_until } else { now };
        if paid > now + ahead_ns as u64 {
            return false;
        }
        (*thread).paid_until = paid + interval_ns as u64;
    }
    true
}

/// Follows the frames, keeps them in `thread.stack`, and gives their hash.
///
/// The offsets are loaded anew in each turn, and masked where they are used: the verifier of older kernels forgets
/// the bounds of what is kept on the program's stack.
#[inline(always)]
fn walk(interpreter: &Interpreter, thread: *mut Thread, first: u64, seed: u64) -> u64 {
    let mut frame = first;
    let mut hash = seed;
    // SAFETY: the entry is this thread's own; `at` keeps reads inside of the frame's buffer, `n` is in bounds.
    unsafe {
        let buffer = (&raw mut (*thread).frame).cast::<u8>();
        let frames = (&raw mut (*thread).stack.frames).cast::<RawFrame>();
        let count = &raw mut (*thread).stack.head.frames;
        count.write_volatile(0);
        for n in 0..MAX_DEPTH as u32 {
            if n >= (&raw const interpreter.depth).read_volatile() {
                break;
            }
            let bytes = offset(&raw const interpreter.frame_bytes) as u32;
            if bpf_probe_read_user(buffer.cast(), bytes, frame as *const c_void) != 0 {
                break;
            }
            let word = |at: *const u16| buffer.add(offset(at)).cast::<u64>().read_unaligned();
            let code = word(&raw const interpreter.code);
            let owner = buffer.add(offset(&raw const interpreter.owner)).read() as u64
                & (&raw const interpreter.owner_mask).read_volatile() as u64;
            let instruction = word(&raw const interpreter.instruction) & interpreter.instruction_mask;
            let raw = RawFrame {
                code: code | owner,
                instruction,
                identity: code_identity(interpreter, thread, code),
            };
            frames.add(n as usize).write(raw);
            count.write_volatile(n + 1);
            hash = mix(mix(mix(hash, raw.code), raw.instruction), raw.identity);
            frame = word(&raw const interpreter.previous);
            if frame == 0 {
                break;
            }
        }
    }
    // SAFETY: the entry is this thread's own.
    unsafe { (*thread).stack.head.more = (frame != 0) as u32 };
    if hash < no_stack::FIRST_ID { hash + no_stack::FIRST_ID } else { hash }
}

/// An offset into a frame.
///
/// # Safety
/// `at` is valid for reads.
#[inline(always)]
unsafe fn offset(at: *const u16) -> usize {
    // SAFETY: the caller's promise.
    unsafe { at.read_volatile() as usize & 0x7f }
}

#[inline(always)]
unsafe fn code_identity(interpreter: &Interpreter, thread: *mut Thread, code: u64) -> u64 {
    // SAFETY: the entry is this thread's own; the kernel checks the address.
    unsafe {
        let words = &raw mut (*thread).identity;
        (*words)[3] = 0;
        let address = code.wrapping_add((&raw const interpreter.identity).read_volatile() as u64);
        let known = if interpreter.identity_bytes == 32 {
            read_into(words, address)
        } else {
            read_into(words.cast::<[u64; 3]>(), address)
        };
        if known { identity(words.read()) } else { 0 }
    }
}

#[inline(always)]
fn send(hit: &Hit, thread: *mut Thread, id: u64, flags: u16) -> Result<(), u64> {
    // SAFETY: the entry is this thread's own; the map is what the helper wants, and the length is within the value.
    unsafe {
        let stack = &raw mut (*thread).stack;
        let frames = (&raw const (*stack).head.frames).read_volatile();
        if frames == 0 {
            return Err(no_stack::UNREADABLE);
        }
        // The verifier understands a mask better than a comparison: from 1 to MAX_DEPTH.
        let frames = (frames.wrapping_sub(1) & (MAX_DEPTH as u32 - 1)) + 1;
        (*stack).head.header = hit.header(kind::STACK, flags);
        (*stack).head.id = id;
        let bytes = size_of::<StackHead>() as u64 + frames as u64 * size_of::<RawFrame>() as u64;
        let records = (&raw const RECORDS).cast_mut().cast();
        if bpf_ringbuf_output(records, stack.cast(), bytes, BPF_RB_FORCE_WAKEUP as u64) != 0 {
            return Err(no_stack::RING_FULL);
        }
    }
    Ok(())
}
