//! Calls by a text: operators, kernels, marks and ranges.

use core::ffi::c_void;

use memscope_ebpf::{DOMAIN_LEN, MARK_LEN, Mark, NAME_LEN, NO_ARG, Name, flags, kind};

use crate::{
    regs::Regs,
    site::Hit,
    user::{address_of_datum, read_text},
};

/// Entry of a call that carries the name of an operator or kernel.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn name(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::entry(ctx)
        && let Some(mut entry) = hit.reserve::<Name>()
    {
        let regs = Regs::new(ctx);
        let record = entry.as_mut_ptr();
        let address = address_of_datum(hit.site, regs).unwrap_or(0);
        // SAFETY: `record` is the reserved entry; `len` says how much of `text` was written.
        unsafe {
            let (len, flags) = text_at(&raw mut (*record).text, address);
            if flags & flags::UNREADABLE != 0 {
                hit.unreadable();
            }
            (*record).header = hit.header(kind::NAME, flags);
            (*record).args = [regs.arg::<0>(), regs.arg::<1>(), regs.arg::<2>(), regs.arg::<3>()];
            (*record).address = address;
            (*record).len = len;
            (*record).reserved = 0;
        }
        hit.submit(entry);
    }
    0
}

/// Entry of a call that carries the text of a mark or range, and perhaps its domain.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn mark(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::entry(ctx)
        && let Some(mut entry) = hit.reserve::<Mark>()
    {
        let regs = Regs::new(ctx);
        let record = entry.as_mut_ptr();
        let has_text = hit.site.arg != NO_ARG;
        let address = if has_text { address_of_datum(hit.site, regs).unwrap_or(0) } else { 0 };
        let domain = if hit.site.domain == NO_ARG { 0 } else { regs.arg_at(hit.site.domain) };
        // SAFETY: as in `name`.
        unsafe {
            let (len, flags) = if has_text { text_at(&raw mut (*record).text, address) } else { (0, 0) };
            if flags & flags::UNREADABLE != 0 {
                hit.unreadable();
            }
            (*record).header = hit.header(kind::MARK, flags);
            (*record).args = [regs.arg::<0>(), regs.arg::<1>(), regs.arg::<2>(), regs.arg::<3>()];
            (*record).address = address;
            (*record).sp = regs.sp();
            (*record).len = len;
            (*record).domain_len = if domain == 0 {
                0
            } else {
                read_text::<DOMAIN_LEN>(&raw mut (*record).domain, domain).unwrap_or(0)
            };
        }
        hit.submit(entry);
    }
    0
}

const _: () = assert!(NAME_LEN.is_multiple_of(8) && MARK_LEN.is_multiple_of(8));

/// # Safety
/// `to` is valid for writes of `LEN` bytes.
#[inline(always)]
unsafe fn text_at<const LEN: usize>(to: *mut [u8; LEN], address: u64) -> (u32, u16) {
    // SAFETY: the caller's promise.
    match unsafe { read_text(to, address) } {
        Some(len) if len as usize == LEN - 1 => (len, flags::TRUNCATED),
        Some(len) => (len, 0),
        None => (0, flags::UNREADABLE),
    }
}
