//! libmindspore_memory_pool.so: MindSpore's pool, as far as its two hot functions go. It carves tensors out
//! of segments that it takes from ACL and never gives back.

use std::collections::BTreeMap;
use std::sync::Mutex;

use sim_cann::acl;
use sim_cann::arena::Arena;
use sim_cann::ffi::Address;
use sim_cann::{lock, trace};

/// MindSpore rounds tensors to this.
const ALIGN: usize = 512;
const SEGMENT: usize = 32 << 20;

/// Segments by address.
static SEGMENTS: Mutex<BTreeMap<Address, Arena>> = Mutex::new(BTreeMap::new());

fn allocate(size: usize) -> Option<Address> {
    let bytes = size.max(1).checked_next_multiple_of(ALIGN)?;
    let mut segments = lock(&SEGMENTS);
    if let Some(address) = segments.values_mut().find_map(|segment| segment.allocate(bytes, ALIGN)) {
        return Some(address);
    }
    let length = bytes.max(SEGMENT);
    let mut start = std::mem::MaybeUninit::new(0);
    if acl::aclrtMallocAlign32(Some(&mut start), length, acl::HUGE_FIRST) != acl::OK {
        return None;
    }
    // SAFETY: initialised above.
    let start = unsafe { start.assume_init() };
    let mut segment = Arena::new(start..start + length);
    let address = segment.allocate(bytes, ALIGN);
    segments.insert(start, segment);
    address
}

fn free(address: Address) -> Option<()> {
    let mut segments = lock(&SEGMENTS);
    let (_, segment) = segments.range_mut(..=address).next_back()?;
    let bytes = segment.take(address)?;
    segment.recycle(address, bytes);
    Some(())
}

/// `AbstractDynamicMemPool::AllocTensorMem(size_t, bool from_persistent, bool need_recycle, uint32_t stream)`.
#[unsafe(export_name = "_ZN9mindspore6device22AbstractDynamicMemPool14AllocTensorMemEmbbj")]
extern "C" fn alloc_tensor_mem(
    _this: Address,
    size: usize,
    persistent: bool,
    _recycle: bool,
    stream: u32,
) -> Address {
    let call = trace::enter("AllocTensorMem").num("size", size).num("persistent", persistent);
    call.num("stream", stream).done(allocate(size).unwrap_or(0))
}

/// `AbstractDynamicMemPool::FreeTensorMem(void *const &)`.
#[unsafe(export_name = "_ZN9mindspore6device22AbstractDynamicMemPool13FreeTensorMemERKPv")]
extern "C" fn free_tensor_mem(_this: Address, address: &Address) {
    let call = trace::enter("FreeTensorMem").num("ptr", address);
    call.done(if free(*address).is_some() { 0 } else { -1 });
}
