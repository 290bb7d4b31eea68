//! The native stack of the probed thread.
//!
//! On aarch64 functions keep frame pointers, which are followed here. On x86_64 they do not: the stack itself is
//! copied, as far as it fits, and the collector finds the frames by the unwind tables of the files that the code is from.

use aya_ebpf::{
    macros::map,
    maps::{Array, LruHashMap},
};
pub use memscope_ebpf::native::NOT_WANTED;
use memscope_ebpf::{
    Caller, Callers, MAX_CALLERS, MAX_THREADS, NativeConfig, NativeHead, kind, native, no_stack,
};

use crate::{regs::Regs, site::Hit, stack, user::read_into};

#[map]
static NATIVE: Array<NativeConfig> = Array::with_max_entries(1, 0);
#[map]
static CALLERS: LruHashMap<u64, Callers> = LruHashMap::with_max_entries(MAX_THREADS, 0);

/// Where the probed function's caller goes on.
pub struct Place {
    ip: u64,
    sp: u64,
    saved: [u64; 6],
}

impl Place {
    /// At the return of the function.
    #[inline(always)]
    pub fn returned_to(regs: Regs) -> Option<Self> {
        Some(Self { ip: regs.ip(), sp: regs.sp(), saved: regs.saved() })
    }

    /// At its entry.
    #[inline(always)]
    pub fn returning_to(regs: Regs) -> Option<Self> {
        Some(Self { ip: regs.return_address()?, sp: regs.sp_after_return(), saved: regs.saved() })
    }
}

/// Takes the stacks of an allocation of so many bytes: the id of the Python stack, if it is wanted, and the flags that
/// say what became of the native one.
#[inline(always)]
pub fn capture(hit: &Hit, place: Option<Place>, bytes: u64) -> (u64, u16) {
    let Some(config) = NATIVE.get(0) else { return (no_stack::NOT_WANTED, NOT_WANTED) };
    // First: the verifier follows what comes next for each reason of what came before, and this is the longer of the two.
    let python = if config.python != 0 { stack::capture(hit) } else { no_stack::NOT_WANTED };
    let flags = if bytes < config.pool_bytes {
        native::SMALL
    } else {
        match place {
            Some(place) => match send(hit, config, &place) {
                Ok(()) => native::SENT,
                Err(why) => why,
            },
            None => native::UNREADABLE,
        }
    };
    (python, flags)
}

#[inline(always)]
fn send(hit: &Hit, config: &NativeConfig, place: &Place) -> Result<(), u16> {
    let thread = stack::thread(hit.pid_tgid).ok_or(native::NO_ROOM)?;
    if !stack::has_share(thread, config.interval_ns, config.ahead_ns) {
        return Err(native::LIMITED);
    }
    if hit.is_ring_half_full() {
        return Err(native::RING_FULL);
    }
    machine::send(hit, config, place)
}

/// Fills the head of a record but for what is counted.
///
/// # Safety
/// `head` is valid for writes.
#[inline(always)]
unsafe fn write_head(head: *mut NativeHead, hit: &Hit, place: &Place) {
    // SAFETY: the caller's promise; the element of the map is this thread's own.
    unsafe {
        (*head).header = hit.header(kind::NATIVE, 0);
        (*head).ip = place.ip;
        (*head).sp = place.sp;
        (*head).saved = place.saved;
        match CALLERS.get_ptr(hit.pid_tgid) {
            Some(callers) => copy_callers(&raw mut (*head).callers, callers),
            None => (*head).callers.count = 0,
        }
    }
}

/// Word by word: for a copy as a whole LLVM calls a function (what that does to old kernels: see `report::read`).
///
/// # Safety
/// `to` is valid for writes, `from` for reads.
#[inline(always)]
unsafe fn copy_callers(to: *mut Callers, from: *const Callers) {
    const WORDS: usize = size_of::<Callers>() / size_of::<u64>();
    for n in 0..WORDS {
        // SAFETY: the caller's promise; `n` is in bounds.
        unsafe { to.cast::<u64>().add(n).write_volatile(from.cast::<u64>().add(n).read()) };
    }
}

/// Notes, at the entry of a function with a return probe, where it returns to: from now on the stack does not say.
#[inline(always)]
pub fn note_caller(hit: &Hit, regs: Regs) {
    let Some(address) = regs.return_address() else { return };
    let caller = Caller { sp: regs.sp(), address };
    let callers = match CALLERS.get_ptr_mut(hit.pid_tgid) {
        Some(callers) => callers,
        None => {
            let mut first = Callers::default();
            first.count = 1;
            first.calls[0] = caller;
            // Without room, a stack that the call is on ends there.
            let _ = CALLERS.insert(hit.pid_tgid, first, 0);
            return;
        }
    };
    // SAFETY: the element is this thread's own.
    unsafe {
        let calls = (&raw mut (*callers).calls).cast::<Caller>();
        for n in 0..MAX_CALLERS {
            let call = calls.add(n);
            // Whatever was called with less of a stack has returned.
            if n as u64 >= (*callers).count || (*call).sp <= caller.sp {
                *call = caller;
                (*callers).count = n as u64 + 1;
                return;
            }
        }
    }
}

#[cfg(bpf_target_arch = "x86_64")]
mod machine {
    use memscope_ebpf::{PAGE_LEN, SLICE_PAGES, Slice};

    use super::*;

    /// Page by page: a read that reaches beyond the stack would bring nothing at all.
    #[inline(always)]
    pub fn send(hit: &Hit, _: &NativeConfig, place: &Place) -> Result<(), u16> {
        let mut entry = hit.reserve_extra::<Slice>().ok_or(native::RING_FULL)?;
        let record = entry.as_mut_ptr();
        let first = place.sp & !(PAGE_LEN as u64 - 1);
        let mut pages = 0;
        // SAFETY: `record` is the reserved entry; `count` says how many pages were written.
        unsafe {
            for n in 0..SLICE_PAGES {
                if !read_into(&raw mut (*record).pages[n], first.wrapping_add((n * PAGE_LEN) as u64)) {
                    break;
                }
                pages += 1;
            }
            write_head(&raw mut (*record).head, hit, place);
            (*record).head.count = pages;
            (*record).head.more = 0;
        }
        if pages == 0 {
            entry.discard(0);
            return Err(native::UNREADABLE);
        }
        hit.submit(entry);
        Ok(())
    }
}

#[cfg(bpf_target_arch = "aarch64")]
mod machine {
    use memscope_ebpf::{Chain, FrameRecord, MAX_DEPTH};

    use super::*;

    /// A caller's frame record lies above the callee's, and the outermost has none.
    #[inline(always)]
    pub fn send(hit: &Hit, config: &NativeConfig, place: &Place) -> Result<(), u16> {
        let mut entry = hit.reserve_extra::<Chain>().ok_or(native::RING_FULL)?;
        let record = entry.as_mut_ptr();
        let mut at = place.saved[0];
        let mut found = FrameRecord::default();
        // SAFETY: `record` is the reserved entry; `count` says how many frame records were written.
        unsafe {
            let records = (&raw mut (*record).records).cast::<FrameRecord>();
            write_head(&raw mut (*record).head, hit, place);
            let count = &raw mut (*record).head.count;
            count.write_volatile(0);
            for n in 0..MAX_DEPTH as u32 {
                if n >= config.depth || at == 0 || at & 7 != 0 || !read_into(&raw mut found, at) {
                    break;
                }
                records.add(n as usize).write(found);
                count.write_volatile(n + 1);
                let is_above = found.next > at;
                at = found.next;
                if !is_above {
                    break;
                }
            }
            (*record).head.more = (at != 0) as u32;
        }
        hit.submit(entry);
        Ok(())
    }
}
