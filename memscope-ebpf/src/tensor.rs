//! What operators and kernels are given: tensors, and blocks of arguments.

use core::ffi::c_void;

use memscope_ebpf::{ARGUMENTS_LEN, Arguments, PACK_LEN, Pack, Tensor, flags, kind};

use crate::{regs::Regs, site::Hit, user};

/// Dimensions that are multiplied; CANN has at most 8.
const DIMENSIONS: usize = 8;

/// Entry of a call with the arguments (sizes, number of sizes, element type, …), and the address in argument 8.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn tensor(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::entry(ctx)
        && let Some(mut entry) = hit.reserve::<Tensor>()
    {
        let regs = Regs::new(ctx);
        let record = entry.as_mut_ptr();
        let rank = regs.arg::<1>();
        let address = user::read_u64(regs.stack_arg::<8>());
        let elements = elements(regs.arg::<0>(), rank);
        let mut flags = 0;
        if address.is_none() || elements.is_none() {
            flags = flags::UNREADABLE;
            hit.unreadable();
        }
        // SAFETY: `record` is the reserved entry; every field is written before it is submitted.
        unsafe {
            (*record).header = hit.header(kind::TENSOR, flags);
            (*record).address = address.unwrap_or(0);
            (*record).elements = elements.unwrap_or(0);
            (*record).element_type = regs.arg::<2>() as u32;
            (*record).rank = rank as u32;
        }
        hit.submit(entry);
    }
    0
}

/// The product of the sizes.
#[inline(always)]
fn elements(sizes: u64, rank: u64) -> Option<u64> {
    let mut product = 1u64;
    for dimension in 0..DIMENSIONS {
        if dimension as u64 >= rank {
            break;
        }
        product = product.wrapping_mul(user::read_u64(sizes.wrapping_add(8 * dimension as u64))?);
    }
    Some(product)
}

/// Entry of a kernel launch: the words of its argument block, some of which are addresses.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn arguments(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::entry(ctx)
        && let Some(mut entry) = hit.reserve::<Arguments>()
    {
        let regs = Regs::new(ctx);
        let record = entry.as_mut_ptr();
        let given = regs.arg_at(hit.site.arg);
        let (block, size) = if hit.site.derefs == 0 {
            (Some(given), Some(regs.arg_at(hit.site.arg + 1)))
        } else {
            // `rtArgsEx_t`: the address of the block, one of host inputs, the size of the block.
            (user::read_u64(given), user::read_u64(given.wrapping_add(16)))
        };
        let mut len = (size.unwrap_or(0) as u32 as usize) & !7;
        if len > ARGUMENTS_LEN {
            len = ARGUMENTS_LEN;
        }
        let mut flags = 0;
        // SAFETY: `record` is the reserved entry; `len` says how much of `words` was written.
        unsafe {
            let words = (&raw mut (*record).words).cast();
            if !user::read_bytes::<ARGUMENTS_LEN>(words, block.unwrap_or(0), len) {
                flags = flags::UNREADABLE;
                len = 0;
                hit.unreadable();
            }
            (*record).header = hit.header(kind::ARGUMENTS, flags);
            (*record).len = len as u32;
            (*record).reserved = 0;
        }
        hit.submit(entry);
    }
    0
}

/// `atb::VariantPack`: a vector of inputs and one of outputs. A vector has its capacity, its size, room for 65 tensors, and
/// the address of others that take their place when it is not null. As the public headers of ATB have it, whose templates
/// callers compile: it can not change without them.
mod pack {
    pub const SIZE: u64 = 8;
    pub const ROOM: u64 = 16;
    pub const TENSOR: u64 = 104;
    pub const ELSEWHERE: u64 = ROOM + 65 * TENSOR;
    pub const VECTOR: u64 = ELSEWHERE + 8;
    /// In a tensor: the device's address, the host's, and bytes.
    pub const DATA: u64 = 80;
    /// No vector has more.
    pub const MOST: u64 = 256;
}

/// Entry of an operator: the tensors of the pack that an argument points to.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn pack(ctx: *mut c_void) -> u32 {
    if let Some(hit) = Hit::entry(ctx)
        && let Some(mut entry) = hit.reserve::<Pack>()
    {
        let given = Regs::new(ctx).arg_at(hit.site.arg);
        let record = entry.as_mut_ptr();
        let (vectors, mut flags) = match (vector(given), vector(given.wrapping_add(pack::VECTOR))) {
            (Some(inputs), Some(outputs)) => ([inputs, outputs], 0),
            _ => ([(0, 0); 2], flags::UNREADABLE),
        };
        let [(inputs, from), (outputs, to)] = vectors;
        let mut count = 0;
        for at in 0..PACK_LEN {
            let number = at as u64;
            if number >= inputs + outputs {
                break;
            }
            let tensor = if number < inputs {
                from.wrapping_add(number * pack::TENSOR)
            } else {
                to.wrapping_add((number - inputs) * pack::TENSOR)
            };
            // SAFETY: an element of the reserved entry.
            if !unsafe { user::read_into(&raw mut (*record).tensors[at], tensor.wrapping_add(pack::DATA)) } {
                flags = flags::UNREADABLE;
                break;
            }
            count = at as u32 + 1;
        }
        if inputs + outputs > PACK_LEN as u64 {
            flags |= flags::TRUNCATED;
        }
        if flags & flags::UNREADABLE != 0 {
            hit.unreadable();
        }
        // SAFETY: `record` is the reserved entry; `count` says how much of `tensors` was written.
        unsafe {
            (*record).header = hit.header(kind::PACK, flags);
            (*record).inputs = inputs as u32;
            (*record).outputs = outputs as u32;
            (*record).count = count;
            (*record).reserved = 0;
        }
        hit.submit(entry);
    }
    0
}

/// How many tensors a vector has, and where the first one is.
#[inline(always)]
fn vector(address: u64) -> Option<(u64, u64)> {
    let size = user::read_u64(address.wrapping_add(pack::SIZE))?;
    let elsewhere = user::read_u64(address.wrapping_add(pack::ELSEWHERE))?;
    let first = if elsewhere == 0 { address.wrapping_add(pack::ROOM) } else { elsewhere };
    (size <= pack::MOST).then_some((size, first))
}
