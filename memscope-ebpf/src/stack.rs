//! The Python stack of the probed thread, read from the interpreter's own structures.
//!
//! A thread's `PyThreadState` is in a pthread slot, which is there whether or not the thread holds the GIL (PyTorch
//! lets go of it before it allocates). The slot lies at a fixed distance from the robust list that glibc registers
//! with the kernel for each thread. From there the frames are followed, and a stack is sent once: events name it.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::{BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP},
    helpers::generated::{
        bpf_get_current_task, bpf_ktime_get_ns, bpf_probe_read_kernel, bpf_probe_read_user,
        bpf_ringbuf_output,
    },
    macros::map,
    maps::{Array, HashMap, LruHashMap},
};
use memscope_ebpf::{
    Interpreter, MAX_COPIED, MAX_COPIES, MAX_DEPTH, MAX_SENT, MAX_TARGETS, MAX_THREADS, MAX_WALKERS,
    NO_OFFSET, Piece, PieceHead, RawFrame, StackHead, TABLE_LEN, TABLE_PIECES, TEXT_LEN, Thread, flags,
    identity, kind, mix, no_stack,
};

use crate::{
    queue::stack_of_task,
    site::{Hit, RECORDS, reserve},
    user::{read_bytes, read_into, read_u64},
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
/// Code objects whose names have been sent.
#[map]
static COPIED: LruHashMap<u64, u8> = LruHashMap::with_max_entries(MAX_COPIED, 0);
#[map]
static SENT: LruHashMap<u64, u8> = LruHashMap::with_max_entries(MAX_SENT, 0);

/// The id of the thread's stack, which has been sent; or why there is none.
#[inline(always)]
pub fn capture(hit: &Hit) -> u64 {
    match try_capture(hit, 0) {
        Ok(id) => id,
        Err(why) => why,
    }
}

/// The same of a call that allocates nothing itself: half of the thread's share is left to those that do.
#[inline(always)]
pub fn capture_spare(hit: &Hit) -> u64 {
    match try_capture(hit, 1) {
        Ok(id) => id,
        Err(why) => why,
    }
}

#[inline(always)]
fn try_capture(hit: &Hit, spared: u32) -> Result<u64, u64> {
    let tgid = (hit.pid_tgid >> 32) as u32;
    // SAFETY: written by the collector only, as a whole and before the process's first stack is taken.
    let interpreter = unsafe { INTERPRETERS.get(&tgid) }.ok_or(no_stack::NO_INTERPRETER)?;
    let own = match thread_state(interpreter, hit.pid_tgid as u32) {
        Ok(state) => innermost(interpreter, state),
        Err(why) => Err(why),
    };
    if !matches!(own, Ok(frame) if frame != 0)
        && let Some(stack) = stack_of_task(hit)
    {
        return stack;
    }
    let mut via = 0;
    let mut frame = own?;
    if frame == 0 && interpreter.main_thread != 0 {
        via = flags::VIA;
        frame = innermost(interpreter, interpreter.main_thread)?;
    }
    if frame == 0 {
        return Err(no_stack::NO_FRAMES);
    }
    let thread = thread(hit.pid_tgid).ok_or(no_stack::NO_ROOM)?;
    if !has_share(thread, interpreter.interval_ns, interpreter.ahead_ns >> spared) {
        return Err(no_stack::LIMITED);
    }
    let id = walk(interpreter, thread, frame, mix(interpreter.salt, via as u64));
    // SAFETY: the value is not read.
    if unsafe { SENT.get(&id) }.is_none() {
        copy_codes(hit, interpreter, thread);
        send(hit, interpreter, thread, id, via)?;
        let _ = SENT.insert(&id, &1, 0);
    }
    Ok(id)
}

/// The `PyThreadState` of the current thread, which has this id.
#[inline(always)]
pub fn thread_state(interpreter: &Interpreter, tid: u32) -> Result<u64, u64> {
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
        unsafe { ROBUST_LISTS.get(&tid) }.copied().unwrap_or(0)
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

/// What is kept of the thread, if anything is.
#[inline(always)]
pub fn known_thread(pid_tgid: u64) -> Option<*mut Thread> {
    THREADS.get_ptr_mut(&pid_tgid)
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

/// Sends what names the frames of `thread.stack`: each code object that is new, its two names and its table of lines.
/// What can not be read, has no room or is too long is left to the collector.
///
/// In two loops: the verifier follows the second one's body for each of its turns, and the first has as many as frames.
#[inline(always)]
fn copy_codes(hit: &Hit, interpreter: &Interpreter, thread: *mut Thread) {
    // SAFETY: the entry is this thread's own; masks keep indices in bounds.
    unsafe {
        let frames = (&raw const (*thread).stack.frames).cast::<RawFrame>();
        let copies = (&raw mut (*thread).copies).cast::<u32>();
        // In memory: the verifier would follow each pair of values of two counters.
        let count = &raw mut (*thread).count;
        count.write_volatile(0);
        for n in 0..MAX_DEPTH as u32 {
            if n >= (&raw const (*thread).stack.head.frames).read_volatile() {
                break;
            }
            let key = key_of_copy(interpreter, frames.add(n as usize));
            let found = count.read_volatile();
            if found >= MAX_COPIES as u32 {
                break;
            }
            copies.add(found as usize & (MAX_COPIES - 1)).write_volatile(n);
            if COPIED.get(&key).is_none() {
                count.write_volatile(found + 1);
            }
        }
        for n in 0..MAX_COPIES as u32 {
            if n >= count.read_volatile() || hit.is_ring_half_full() {
                break;
            }
            let frame = frames.add(copies.add(n as usize).read_volatile() as usize & (MAX_DEPTH - 1));
            let raw = frame.read();
            if copy_code(hit, interpreter, thread, raw) {
                let _ = COPIED.insert(&key_of_copy(interpreter, frame), &1, 0);
            }
        }
    }
}

#[inline(always)]
unsafe fn key_of_copy(interpreter: &Interpreter, frame: *const RawFrame) -> u64 {
    // SAFETY: the caller's promise.
    unsafe {
        mix(
            mix(
                (&raw const interpreter.salt).read_volatile(),
                (&raw const (*frame).code).read_volatile() & !7,
            ),
            (&raw const (*frame).identity).read_volatile(),
        )
    }
}

#[inline(always)]
fn copy_code(hit: &Hit, interpreter: &Interpreter, thread: *mut Thread, raw: RawFrame) -> bool {
    let code = raw.code & !7;
    // SAFETY: the entry is this thread's own; masks keep indices in bounds.
    unsafe {
        if code_identity(interpreter, thread, code) != raw.identity {
            return false;
        }
        let last = interpreter.identity_bytes as usize / 8 - 1;
        let pointer = |n: usize| (&raw const (*thread).identity).cast::<u64>().add(n & 3).read_volatile();
        send_piece::<TEXT_LEN>(hit, code, interpreter.code_bytes as u64)
            && send_text(hit, interpreter, pointer(last - 1))
            && send_text(hit, interpreter, pointer(0))
            && send_table(hit, pointer(last))
    }
}

#[inline(always)]
fn send_text(hit: &Hit, interpreter: &Interpreter, address: u64) -> bool {
    const ASCII: u64 = 1 << 6;
    match (read_u64(address.wrapping_add(16)), read_u64(address.wrapping_add(32))) {
        (Some(length), Some(state)) => {
            let at = if state & ASCII != 0 { interpreter.ascii } else { interpreter.other };
            send_piece::<TEXT_LEN>(hit, address, at as u64 + length.min(TEXT_LEN as u64) * (state >> 2 & 7))
        }
        _ => false,
    }
}

#[inline(always)]
fn send_table(hit: &Hit, address: u64) -> bool {
    let Some(length) = read_u64(address.wrapping_add(16)) else { return false };
    let mut left = length.saturating_add(32);
    let mut at = address;
    for _ in 0..TABLE_PIECES {
        let len = left.min(TABLE_LEN as u64);
        if !send_piece::<TABLE_LEN>(hit, at, len) {
            return false;
        }
        at = at.wrapping_add(len);
        left -= len;
        if left == 0 {
            break;
        }
    }
    true
}

/// `true` also when it is too long to be sent.
#[inline(always)]
fn send_piece<const LEN: usize>(hit: &Hit, address: u64, len: u64) -> bool {
    if len > LEN as u64 {
        return true;
    }
    let Some(mut entry) = reserve::<Piece<LEN>>() else { return false };
    let piece = entry.as_mut_ptr();
    // SAFETY: the entry is as large as the record, and the length is checked where it is read.
    let is_read = unsafe {
        (*piece).head = PieceHead { header: hit.header(kind::PIECE, 0), address, len };
        // Read back so that it is compared here, where the verifier of 5.10 has not forgotten the outcome yet.
        let len = (&raw const (*piece).head.len).read_volatile();
        read_bytes::<LEN>((&raw mut (*piece).bytes).cast(), address, len as usize)
    };
    if is_read {
        entry.submit(BPF_RB_NO_WAKEUP as u64);
    } else {
        entry.discard(BPF_RB_NO_WAKEUP as u64);
    }
    is_read
}

#[inline(always)]
fn send(hit: &Hit, interpreter: &Interpreter, thread: *mut Thread, id: u64, flags: u16) -> Result<(), u64> {
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
        (*stack).head.image = interpreter.image;
        let bytes = size_of::<StackHead>() as u64 + frames as u64 * size_of::<RawFrame>() as u64;
        let records = (&raw const RECORDS).cast_mut().cast();
        if bpf_ringbuf_output(records, stack.cast(), bytes, BPF_RB_FORCE_WAKEUP as u64) != 0 {
            return Err(no_stack::RING_FULL);
        }
    }
    Ok(())
}
