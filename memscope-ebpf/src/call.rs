//! Calls by their arguments and results: allocations, frees, device switches, launches.

use core::ffi::c_void;

use memscope_ebpf::{ARGS, ApiCall, Enter, InFlight, NO_ARG, NO_SITE, Return, flags, kind, no_stack, ret};

use crate::{
    calls::{self, Returned},
    native,
    regs::{Regs, choose},
    site::{Hit, reserve},
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
        if calls::note(hit.pid_tgid, call) {
            hit.is_not_sent();
        } else {
            hit.is_sent();
            hit.map_full();
        }
    }
    0
}

/// Entry of a call whose result is wanted: keeps the arguments for [`leave`].
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn keep(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::uncounted_entry(ctx) {
        keep_call(&hit, Regs::new(ctx).first_args(), 0);
    }
    0
}

/// As [`keep`], and notes for native stacks where the call returns to.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn keep_caller(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::uncounted_entry(ctx) {
        let regs = Regs::new(ctx);
        native::note_caller(&hit, regs);
        keep_call(&hit, regs.first_args(), 0);
    }
    0
}

/// As [`keep`], with the first 16 bytes that an argument points to in place of the last two arguments: they may be
/// gone by the return.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn keep_struct(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::uncounted_entry(ctx) {
        keep_with_struct(&hit, Regs::new(ctx));
    }
    0
}

/// As [`keep_struct`], and notes for native stacks where the call returns to.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn keep_struct_caller(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::uncounted_entry(ctx) {
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
    keep_call(hit, args, if read { 0 } else { flags::UNREADABLE });
}

#[inline(always)]
fn keep_call(hit: &Hit, args: [u64; ARGS], flags: u16) {
    // Counted when it returns: only then is a record due.
    if !calls::keep(hit.pid_tgid, &InFlight { args, site: hit.index, flags, active: 1 }) {
        hit.is_sent();
        hit.map_full();
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
        match calls::take(hit.pid_tgid, hit.index) {
            Some(returned) => {
                hit.is_sent();
                send_leave(&hit, &returned, Regs::new(ctx).ret(), stacks(&hit));
            }
            None => hit.unmatched(),
        }
    }
    0
}

#[inline(always)]
fn send_leave(hit: &Hit, returned: &Returned, value: u64, (stack, native): (u64, u16)) {
    let Some(mut entry) = hit.reserve::<Return>() else { return };
    let record = entry.as_mut_ptr();
    let InFlight { args, flags, .. } = returned.call;
    let mut flags = flags | native;
    let failed = if hit.site.ret == ret::IS_RESULT { value == 0 } else { value as i32 != 0 };
    // SAFETY: `record` is the reserved entry, and every field is written before it is submitted.
    unsafe {
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
        (*record).asked = returned.asked;
        (*record).api = returned.api;
        (*record).reserved = 0;
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
