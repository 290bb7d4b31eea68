//! What is kept of a thread's calls, from one probe to the next.

use core::arch::asm;

use aya_ebpf::{
    macros::map,
    maps::{Array, HashMap},
};
use memscope_ebpf::{ApiCall, CALL_SLOTS, CallSlot, Calls, InFlight, MAX_NESTED, MAX_THREADS, NO_SITE};

/// Found by the low bits of the thread's id alone. A slot is a thread's from its first call to its end.
#[map]
static CALLS: Array<CallSlot> = Array::with_max_entries(CALL_SLOTS, 0);
/// Of threads whose slot is another's, and of all on kernels without compare-and-swap.
#[map]
static CALLS_BY_THREAD: HashMap<u64, Calls> = HashMap::with_max_entries(MAX_THREADS, 0);

/// A thread without any, so that they need not be made on a program's own stack.
#[map]
static NO_CALLS: Array<Calls> = Array::with_max_entries(1, 0);

#[inline(always)]
fn slot(pid_tgid: u64) -> Option<*mut CallSlot> {
    CALLS.get_ptr_mut(pid_tgid as u32 % CALL_SLOTS)
}

/// The thread's slot, if it has one.
#[inline(always)]
fn own_slot(pid_tgid: u64) -> Option<*mut CallSlot> {
    // SAFETY: an aligned u64 that threads write as a whole.
    slot(pid_tgid).filter(|slot| unsafe { (**slot).owner } == pid_tgid)
}

/// Makes a free slot the thread's.
#[inline(always)]
fn claim(pid_tgid: u64) -> Option<*mut CallSlot> {
    let slot = slot(pid_tgid)?;
    // Atomics of core need a target that kernels before 5.12 lack; for those the loader replaces this instruction by one that
    // finds the slot taken.
    let mut owner = 0u64;
    // SAFETY: an aligned u64 of a map's element.
    unsafe {
        asm!("r0 = cmpxchg_64({slot} + 0, r0, {own})", slot = in(reg) &raw mut (*slot).owner, own = in(reg) pid_tgid,
            inout("r0") owner);
    }
    (owner == 0).then_some(slot)
}

/// The running thread's calls, made when there are none; `None`: no room.
#[inline(always)]
pub fn of_thread(pid_tgid: u64) -> Option<*mut Calls> {
    if let Some(slot) = own_slot(pid_tgid).or_else(|| claim(pid_tgid)) {
        // SAFETY: an element of the map, for the life of the program.
        return Some(unsafe { &raw mut (*slot).calls });
    }
    if let Some(kept) = CALLS_BY_THREAD.get_ptr_mut(pid_tgid) {
        return Some(kept);
    }
    CALLS_BY_THREAD.insert(pid_tgid, NO_CALLS.get(0)?, 0).ok()?;
    CALLS_BY_THREAD.get_ptr_mut(pid_tgid)
}

/// Keeps a call until it returns; `false`: there was no room for it, or the last one at this site was still there, of
/// which no return was seen.
#[inline(always)]
pub fn keep(pid_tgid: u64, call: &InFlight) -> bool {
    let Some(kept) = of_thread(pid_tgid) else { return false };
    let mut place = core::ptr::null_mut::<InFlight>();
    for n in 0..MAX_NESTED {
        // SAFETY: an element of the map that is this thread's own: no one else changes it while the program runs.
        unsafe {
            let here = &raw mut (*kept).in_flight[n];
            if (*here).site == call.site {
                let returned = (*here).active == 0;
                *here = *call;
                return returned;
            }
            if place.is_null() && (*here).active == 0 {
                place = here;
            }
        }
    }
    if place.is_null() {
        return false;
    }
    // SAFETY: as above.
    unsafe { *place = *call };
    true
}

/// A call that has returned.
pub struct Returned {
    pub call: InFlight,
    /// Of the runtime call above it; without one, 0 and [`NO_SITE`].
    pub asked: u64,
    pub api: u32,
}

/// Takes the thread's call of this site.
#[inline(always)]
pub fn take(pid_tgid: u64, site: u32) -> Option<Returned> {
    if let Some(slot) = own_slot(pid_tgid)
        // SAFETY: as in `of_thread`.
        && let Some(returned) = take_from(unsafe { &raw mut (*slot).calls }, site)
    {
        return Some(returned);
    }
    take_from(CALLS_BY_THREAD.get_ptr_mut(pid_tgid)?, site)
}

#[inline(always)]
fn take_from(kept: *mut Calls, site: u32) -> Option<Returned> {
    for n in 0..MAX_NESTED {
        // SAFETY: as in `keep`.
        unsafe {
            let here = &raw mut (*kept).in_flight[n];
            if (*here).site == site && (*here).active == 1 {
                (*here).active = 0;
                let call = *here;
                let api = &raw mut (*kept).api;
                if (*api).out == 0 || (*api).out != call.args[0] {
                    return Some(Returned { call, asked: 0, api: NO_SITE });
                }
                (*api).out = 0;
                return Some(Returned { call, asked: (*api).asked, api: (*api).site as u32 });
            }
        }
    }
    None
}

/// Notes a runtime call above the driver's; whether there was room.
#[inline(always)]
pub fn note(pid_tgid: u64, call: ApiCall) -> bool {
    let Some(kept) = of_thread(pid_tgid) else { return false };
    // SAFETY: as in `keep`.
    unsafe {
        let last = &raw mut (*kept).api;
        // Calls nest with the same out-pointer: the outermost is the one the program made.
        if (*last).out != call.out || (*last).sp <= call.sp {
            *last = call;
        }
    }
    true
}

/// Tells the sites of the calls that the running thread, which ends, is within.
#[inline(always)]
pub fn end(pid_tgid: u64, mut tell: impl FnMut(u32)) {
    if let Some(slot) = own_slot(pid_tgid) {
        // SAFETY: as in `of_thread`.
        unsafe {
            let kept = &raw mut (*slot).calls;
            each_open(kept, &mut tell);
            // The next owner finds it empty.
            (*kept).api.out = 0;
            for n in 0..MAX_NESTED {
                (*kept).in_flight[n].active = 0;
            }
            (*slot).owner = 0;
        }
    }
    if let Some(kept) = CALLS_BY_THREAD.get_ptr_mut(pid_tgid) {
        each_open(kept, &mut tell);
        let _ = CALLS_BY_THREAD.remove(pid_tgid);
    }
}

#[inline(always)]
fn each_open(kept: *mut Calls, tell: &mut impl FnMut(u32)) {
    for n in 0..MAX_NESTED {
        // SAFETY: as in `keep`.
        let here = unsafe { (*kept).in_flight[n] };
        if here.active == 1 {
            tell(here.site);
        }
    }
}
