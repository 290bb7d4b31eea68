//! Calls by their arguments and results: allocations, frees, device switches, launches.

use core::ffi::c_void;

use memscope_ebpf::{Call, InFlight, NO_ARG, flags, kind, ret};

use crate::{
    regs::{Regs, choose},
    site::{Hit, IN_FLIGHT, reserve},
    user,
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
    let Some(mut entry) = hit.reserve::<Call>() else { return };
    entry.write(Call {
        header: hit.header(kind::ENTER, 0),
        args: regs.args(),
        ret: 0,
        out: 0,
        extra: [0; 4],
    });
    hit.submit(entry);
}

/// Entry of a call whose result is wanted: keeps the arguments for [`leave`].
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn keep(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::entry(ctx) {
        let regs = Regs::new(ctx);
        keep_call(&hit, &InFlight { args: regs.args(), extra: [0; 4], flags: 0 });
    }
    0
}

/// As [`keep`], with the first 32 bytes that an argument points to (it may be gone by the return).
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn keep_struct(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::entry(ctx) {
        let regs = Regs::new(ctx);
        let mut call = InFlight { args: regs.args(), extra: [0; 4], flags: 0 };
        // SAFETY: `extra` is a local array of integers.
        if !unsafe { user::read_into(&raw mut call.extra, regs.arg_at(hit.site.arg)) } {
            call.flags = flags::UNREADABLE as u64;
        }
        keep_call(&hit, &call);
    }
    0
}

#[inline(always)]
fn keep_call(hit: &Hit, call: &InFlight) {
    if IN_FLIGHT.insert(hit.key(), call, 0).is_err() {
        hit.map_full();
    }
}

/// Return of a call: sends what [`keep`] kept, with the result.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uretprobe")]
pub extern "C" fn leave(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::on_return(ctx) {
        let key = hit.key();
        // SAFETY: the entry is this thread's own: no one else changes it while the program runs.
        match unsafe { IN_FLIGHT.get(key) } {
            Some(call) => send_leave(&hit, call, Regs::new(ctx).ret()),
            None => hit.unmatched(),
        }
        let _ = IN_FLIGHT.remove(key);
    }
    0
}

#[inline(always)]
fn send_leave(hit: &Hit, call: &InFlight, value: u64) {
    let Some(mut entry) = hit.reserve::<Call>() else { return };
    let record = entry.as_mut_ptr();
    let mut flags = call.flags as u16;
    let failed = if hit.site.ret == ret::IS_RESULT { value == 0 } else { value as i32 != 0 };
    if failed {
        flags |= flags::FAILED;
    }
    // SAFETY: `record` is the reserved entry; every field is written before it is submitted.
    unsafe {
        (*record).args = call.args;
        (*record).extra = call.extra;
        (*record).ret = value;
        (*record).out = 0;
        if hit.site.ret == ret::IS_RESULT {
            (*record).out = value;
        } else if !failed && hit.site.out != NO_ARG {
            let address = choose(call.args, hit.site.out);
            if !user::read_into(&raw mut (*record).out, address) {
                flags |= flags::UNREADABLE;
            }
        }
        if flags & flags::UNREADABLE != 0 {
            hit.unreadable();
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
        let Some(mut entry) = reserve::<Call>() else {
            hit.unmatched();
            return 0;
        };
        entry.write(Call {
            header: hit.header(kind::RETURN, 0),
            args: [0; 6],
            ret: Regs::new(ctx).ret(),
            out: 0,
            extra: [0; 4],
        });
        hit.submit(entry);
    }
    0
}
