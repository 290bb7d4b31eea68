//! Calls by a structure that an argument points to: the pool's own report.

use core::{ffi::c_void, mem::MaybeUninit};

use memscope_ebpf::{NO_ARG, Report, Site, flags, kind, no_stack};

use crate::{native, regs::Regs, site::Hit, stack, user};

#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn report(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::uncounted_entry(ctx)
        && let Some((words, flags)) = read(&hit, ctx)
    {
        send(&hit, words, flags, no_stack::NOT_WANTED);
    }
    0
}

/// As [`report`], with the Python stack when it is an allocation.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn report_stack(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::uncounted_entry(ctx)
        && let Some((words, flags)) = read(&hit, ctx)
    {
        let stack = if is_allocation(&words, flags) { stack::capture(&hit) } else { no_stack::NOT_WANTED };
        send(&hit, words, flags, stack);
    }
    0
}

/// As [`report_stack`], with the native stack as well, when the block is large enough.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn report_native(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::uncounted_entry(ctx)
        && let Some((words, flags)) = read(&hit, ctx)
    {
        let (stack, native) = if is_allocation(&words, flags) {
            native::capture(&hit, native::Place::returning_to(Regs::new(ctx)), words[2])
        } else {
            (no_stack::NOT_WANTED, native::NOT_WANTED)
        };
        send(&hit, words, flags | native, stack);
    }
    0
}

/// By its bytes, in the third word: more than none.
#[inline(always)]
fn is_allocation(words: &[u64; 7], flags: u16) -> bool {
    flags & flags::UNREADABLE == 0 && words[2] as i64 > 0
}

/// The structure, when it is of interest.
#[inline(always)]
fn read(hit: &Hit, ctx: *mut c_void) -> Option<([u64; 7], u16)> {
    // Not zeroed by us: LLVM would call a function for that, and where there are functions, older kernels follow
    // each value of each register, until they give up on the loops.
    let mut words = MaybeUninit::<[u64; 7]>::uninit();
    // SAFETY: a local array of integers, which the kernel fills or zeroes.
    let (known, words) = unsafe {
        let known = user::read_into(words.as_mut_ptr(), Regs::new(ctx).arg_at(hit.site.arg));
        (known, words.assume_init())
    };
    let Site { skip_at, skip, .. } = *hit.site;
    if known && skip_at != NO_ARG && (words[0] >> ((skip_at as u32 & 7) * 8)) as u8 == skip {
        hit.is_not_sent();
        return None;
    }
    hit.is_sent();
    if known {
        return Some((words, 0));
    }
    hit.unreadable();
    Some((words, flags::UNREADABLE))
}

#[inline(always)]
fn send(hit: &Hit, words: [u64; 7], flags: u16, stack: u64) {
    if let Some(mut entry) = hit.reserve::<Report>() {
        entry.write(Report { header: hit.header(kind::REPORT, flags), words, stack });
        hit.submit(entry);
    }
}
