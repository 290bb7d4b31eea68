//! Calls by a structure that an argument points to: the pool's own report.

use core::ffi::c_void;

use memscope_ebpf::{Report, flags, kind};

use crate::{regs::Regs, site::Hit, user};

#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn report(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::entry(ctx)
        && let Some(mut entry) = hit.reserve::<Report>()
    {
        let record = entry.as_mut_ptr();
        let address = Regs::new(ctx).arg_at(hit.site.arg);
        let mut flags = 0;
        // SAFETY: `record` is the reserved entry; what can not be read is zeroed by the helper.
        unsafe {
            if !user::read_into(&raw mut (*record).words, address) {
                flags = flags::UNREADABLE;
                hit.unreadable();
            }
            (*record).header = hit.header(kind::REPORT, flags);
        }
        hit.submit(entry);
    }
    0
}
