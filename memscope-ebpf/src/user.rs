//! Reads of the target's memory.

use aya_ebpf::helpers::generated::{bpf_probe_read_user, bpf_probe_read_user_str};
use memscope_ebpf::Site;

use crate::regs::Regs;

/// Reads `T` at `address` into `to`; zeroes it when that can not be read.
///
/// # Safety
/// `to` is valid for writes of `T`, and any bytes are a `T`.
#[inline(always)]
pub unsafe fn read_into<T>(to: *mut T, address: u64) -> bool {
    // SAFETY: the caller's promise; the kernel checks `address`.
    unsafe { bpf_probe_read_user(to.cast(), size_of::<T>() as u32, address as *const _) == 0 }
}

/// Reads `len` bytes, at most `MOST`.
///
/// # Safety
/// `to` is valid for writes of `MOST` bytes.
#[inline(always)]
pub unsafe fn read_bytes<const MOST: usize>(to: *mut u8, address: u64, len: usize) -> bool {
    // The verifier wants to see the bound where it counts.
    if len > MOST {
        return false;
    }
    // SAFETY: the caller's promise; the kernel checks `address`.
    unsafe { bpf_probe_read_user(to.cast(), len as u32, address as *const _) == 0 }
}

#[inline(always)]
pub fn read_u64(address: u64) -> Option<u64> {
    let mut word = 0u64;
    // SAFETY: a local u64.
    unsafe { read_into(&raw mut word, address) }.then_some(word)
}

/// Reads a NUL-terminated text of at most `LEN - 1` bytes; the bytes read, without the NUL.
///
/// # Safety
/// `to` is valid for writes of `LEN` bytes.
#[inline(always)]
pub unsafe fn read_text<const LEN: usize>(to: *mut [u8; LEN], address: u64) -> Option<u32> {
    // SAFETY: the caller's promise; the kernel checks `address`.
    let n = unsafe { bpf_probe_read_user_str(to.cast(), LEN as u32, address as *const _) };
    (n > 0).then_some(n as u32 - 1)
}

/// Follows the way from the site's argument to its datum.
#[inline(always)]
pub fn address_of_datum(site: &Site, regs: Regs) -> Option<u64> {
    let mut address = regs.arg_at(site.arg).wrapping_add(site.offset as u64);
    if site.derefs > 0 {
        address = read_u64(address)?;
    }
    if site.derefs > 1 {
        address = read_u64(address)?;
    }
    Some(address.wrapping_add(site.after as u64))
}
