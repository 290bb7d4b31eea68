//! Calls by their arguments and results: allocations, frees, device switches, launches.

use core::ffi::c_void;

use memscope_ebpf::{ApiCall, Enter, InFlight, NO_ARG, NO_SITE, Return, flags, kind, no_stack, ret};

use crate::{
    native,
    regs::{Regs, choose},
    site::{API_CALLS, Hit, IN_FLIGHT, reserve},
    stack, user,
};

/// Entry of a call of which the arguments say all.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn enter(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::entry(ctx) {
        send_enter(&hit, Regs::new(ctx));
    }
    0
}

#[inline(always)]
fn send_enter(hit: &Hit, regs: Regs) {
    let Some(mut entry) = hit.reserve::<Enter>() else { return };
    entry.write(Enter { header: hit.header(kind::ENTER, 0), args: regs.first_args() });
    hit.submit(entry);
}

/// Entry of a runtime call `(void **out, u64 size, ...)` above the driver: noted for the driver's record, not sent.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn annotate(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::uncounted_entry(ctx) {
        let regs = Regs::new(ctx);
        let call =
            ApiCall { out: regs.arg::<0>(), asked: regs.arg::<1>(), sp: regs.sp(), site: hit.index as u64 };
        if note(&hit, call) {
            hit.is_not_sent();
        } else {
            hit.is_sent();
            hit.map_full();
        }
    }
    0
}

#[inline(always)]
fn note(hit: &Hit, call: ApiCall) -> bool {
    let Some(last) = API_CALLS.get_ptr_mut(hit.pid_tgid) else {
        return API_CALLS.insert(hit.pid_tgid, call, 0).is_ok();
    };
    // SAFETY: the element is this thread's own: no one else changes it while the program runs.
    unsafe {
        // Calls nest with the same out-pointer: the outermost is the one the program made.
        if (*last).out != call.out || (*last).sp <= call.sp {
            *last = call;
        }
    }
    true
}

/// Entry of a call whose result is wanted: keeps the arguments for [`leave`].
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn keep(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::entry(ctx) {
        keep_call(&hit, &InFlight { args: Regs::new(ctx).first_args(), flags: 0, active: 1 });
    }
    0
}

/// As [`keep`], and notes for native stacks where the call returns to.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn keep_caller(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::entry(ctx) {
        let regs = Regs::new(ctx);
        native::note_caller(&hit, regs);
        keep_call(&hit, &InFlight { args: regs.first_args(), flags: 0, active: 1 });
    }
    0
}

/// As [`keep`], with the first 16 bytes that an argument points to in place of the last two arguments: they may be
/// gone by the return.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn keep_struct(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::entry(ctx) {
        keep_with_struct(&hit, Regs::new(ctx));
    }
    0
}

/// As [`keep_struct`], and notes for native stacks where the call returns to.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn keep_struct_caller(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::entry(ctx) {
        let regs = Regs::new(ctx);
        native::note_caller(&hit, regs);
        keep_with_struct(&hit, regs);
    }
    0
}

#[inline(always)]
fn keep_with_struct(hit: &Hit, regs: Regs) {
    let mut words = [0u64; 2];
    // SAFETY: `words` is a local array of integers.
    let read = unsafe { user::read_into(&raw mut words, regs.arg_at(hit.site.arg)) };
    let args = [regs.arg::<0>(), regs.arg::<1>(), words[0], words[1]];
    let flags = if read { 0 } else { flags::UNREADABLE as u32 };
    keep_call(hit, &InFlight { args, flags, active: 1 });
}

#[inline(always)]
fn keep_call(hit: &Hit, call: &InFlight) {
    match IN_FLIGHT.get_ptr_mut(hit.key()) {
        // SAFETY: the element is this thread's own: no one else changes it while the program runs.
        Some(kept) => unsafe { *kept = *call },
        None => {
            if IN_FLIGHT.insert(hit.key(), call, 0).is_err() {
                hit.map_full();
            }
        }
    }
}

/// Return of a call: sends what [`keep`] kept, with the result.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uretprobe")]
pub extern "C" fn leave(ctx: *mut c_void) -> u32 {
    end_call(ctx, |_| (no_stack::NOT_WANTED, native::NOT_WANTED))
}

/// As [`leave`], with the Python stack.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uretprobe")]
pub extern "C" fn leave_stack(ctx: *mut c_void) -> u32 {
    end_call(ctx, |hit| (stack::capture(hit), native::NOT_WANTED))
}

/// As [`leave`], with the native stack, and the Python one if it is wanted.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uretprobe")]
pub extern "C" fn leave_native(ctx: *mut c_void) -> u32 {
    end_call(ctx, |hit| native::capture(hit, native::Place::returned_to(Regs::new(ctx)), u64::MAX))
}

/// `stacks`: the id of the Python stack and the flags of the native one.
#[inline(always)]
fn end_call(ctx: *mut c_void, stacks: impl FnOnce(&Hit) -> (u64, u16)) -> u32 {
    if let Some(hit) = Hit::on_return(ctx) {
        match IN_FLIGHT.get_ptr_mut(hit.key()) {
            // SAFETY: as in `keep_call`.
            Some(call) if unsafe { (*call).active } == 1 => unsafe {
                (*call).active = 0;
                send_leave(&hit, call, Regs::new(ctx).ret(), stacks(&hit));
            },
            _ => hit.unmatched(),
        }
    }
    0
}

/// # Safety
/// `call` is an element of `IN_FLIGHT` that belongs to this thread.
#[inline(always)]
unsafe fn send_leave(hit: &Hit, call: *const InFlight, value: u64, (stack, native): (u64, u16)) {
    let Some(mut entry) = hit.reserve::<Return>() else { return };
    let record = entry.as_mut_ptr();
    // SAFETY: the caller's promise; `record` is the reserved entry, and every field is written before it is submitted.
    unsafe {
        let mut flags = (*call).flags as u16 | native;
        let failed = if hit.site.ret == ret::IS_RESULT { value == 0 } else { value as i32 != 0 };
        let args = (*call).args;
        (*record).args = args;
        (*record).result = value;
        (*record).stack = stack;
        if failed {
            flags |= flags::FAILED;
        } else if hit.site.out != NO_ARG {
            if !user::read_into(&raw mut (*record).result, choose(args, hit.site.out)) {
                flags |= flags::UNREADABLE;
            }
        }
        if flags & flags::UNREADABLE != 0 {
            hit.unreadable();
        }
        (*record).asked = 0;
        (*record).api = NO_SITE;
        (*record).reserved = 0;
        if let Some(api) = API_CALLS.get_ptr_mut(hit.pid_tgid)
            && (*api).out == args[0]
        {
            (*record).asked = (*api).asked;
            (*record).api = (*api).site as u32;
            (*api).out = 0;
        }
        (*record).header = hit.header(kind::RETURN, flags);
    }
    hit.submit(entry);
}

/// Return of a call whose entry another program reported: sends the value alone.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uretprobe")]
pub extern "C" fn value(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::on_return(ctx) {
        // Not an event of its own: without it, its range is found by nesting.
        let Some(mut entry) = reserve::<Return>() else {
            hit.unmatched();
            return 0;
        };
        entry.write(Return {
            header: hit.header(kind::RETURN, 0),
            args: [0; 4],
            result: Regs::new(ctx).ret(),
            asked: 0,
            api: NO_SITE,
            reserved: 0,
            stack: no_stack::NOT_WANTED,
        });
        hit.submit(entry);
    }
    0
}
