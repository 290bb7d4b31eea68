//! libascend_hal.so: the driver. Device memory is address space that the host backs on first touch,
//! accounted a device; each device's addresses lie in a range of their own.

#![allow(non_snake_case)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use sim_cann::arena::Arena;
use sim_cann::ffi::{Address, Out, put};
use sim_cann::hal::{INVALID_VALUE, MEM_INFO_HBM, MemInfo, MemProp, OK, OUT_OF_MEMORY, TaskSend, flag};
use sim_cann::settings::{self, MAX_DEVICES};
use sim_cann::{lock, trace};

const NORMAL_PAGE: usize = 4 << 10;
const HUGE_PAGE: usize = 2 << 20;
/// Where the first device's addresses begin, and the distance to the next device's.
const DEVICE_BASE: usize = 0x1240_0000_0000;
const DEVICE_STRIDE: usize = 1 << 40;
/// Where pinned host memory lies, and how much of it there can be.
const HOST_BASE: usize = 0x1140_0000_0000;
const HOST_RANGE: usize = 256 << 30;

/// Memory of one device, or the pinned memory of the host.
struct Memory {
    range: Range<usize>,
    capacity: usize,
    state: Mutex<State>,
}

struct State {
    space: Arena,
    /// Bytes in use, in whole pages, of both allocations and physical handles.
    used: usize,
}

impl Memory {
    fn map(hint: usize, range: usize, capacity: usize) -> Option<Self> {
        let start = map_anonymous(hint, range, libc::PROT_READ | libc::PROT_WRITE, 0)?;
        let range = start.next_multiple_of(HUGE_PAGE)..start + range;
        let state = Mutex::new(State { space: Arena::new(range.clone()), used: 0 });
        Some(Self { range, capacity, state })
    }

    fn charge(&self, state: &mut State, bytes: usize) -> Result<(), i32> {
        if bytes > self.capacity.saturating_sub(state.used) {
            return Err(OUT_OF_MEMORY);
        }
        state.used += bytes;
        Ok(())
    }

    fn allocate(&self, size: usize, page: usize) -> Result<Address, i32> {
        let bytes = size.checked_next_multiple_of(page).filter(|&n| n > 0).ok_or(INVALID_VALUE)?;
        let mut state = lock(&self.state);
        self.charge(&mut state, bytes)?;
        let address = state.space.allocate(bytes, page);
        if address.is_none() {
            state.used -= bytes;
        }
        address.ok_or(OUT_OF_MEMORY)
    }

    fn free(&self, address: Address) -> Result<(), i32> {
        let bytes = lock(&self.state).space.take(address).ok_or(INVALID_VALUE)?;
        discard(address, bytes);
        let mut state = lock(&self.state);
        state.space.recycle(address, bytes);
        state.used -= bytes;
        Ok(())
    }
}

static DEVICES: [OnceLock<Option<Memory>>; MAX_DEVICES] = [const { OnceLock::new() }; MAX_DEVICES];
static HOST: OnceLock<Option<Memory>> = OnceLock::new();

fn device_count() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| settings::get("SIM_CANN_DEVICES", 8usize).min(MAX_DEVICES))
}

fn has_huge_pages() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| !settings::flag("SIM_CANN_HUGE_FAIL"))
}

fn device(id: u32) -> Result<&'static Memory, i32> {
    let id = id as usize;
    let cell = DEVICES.get(id).filter(|_| id < device_count()).ok_or(INVALID_VALUE)?;
    let memory = cell.get_or_init(|| {
        let capacity = settings::get("SIM_CANN_HBM_BYTES", 64usize << 30);
        // Four times the capacity: fragments of address space never limit what fits the memory.
        let range = capacity.saturating_mul(4).clamp(4 * HUGE_PAGE, DEVICE_STRIDE);
        Memory::map(DEVICE_BASE + id * DEVICE_STRIDE, range, capacity)
    });
    memory.as_ref().ok_or(OUT_OF_MEMORY)
}

fn host() -> Result<&'static Memory, i32> {
    HOST.get_or_init(|| Memory::map(HOST_BASE, HOST_RANGE, HOST_RANGE)).as_ref().ok_or(OUT_OF_MEMORY)
}

fn holder_of(address: Address) -> Option<&'static Memory> {
    DEVICES.iter().chain([&HOST]).filter_map(|cell| cell.get()?.as_ref()).find(|m| m.range.contains(&address))
}

fn map_anonymous(at: usize, bytes: usize, protection: i32, flags: i32) -> Option<usize> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: `flags` has MAP_FIXED only for a range inside a reservation of `halMemAddressReserve`, which
    // holds nothing of Rust's; otherwise the kernel picks free addresses.
    let start = unsafe { libc::mmap(at as *mut _, bytes, protection, flags, -1, 0) };
    (start != libc::MAP_FAILED).then_some(start as usize)
}

/// Gives the pages of freed memory back to the host.
fn discard(address: Address, bytes: usize) {
    // SAFETY: the range was an allocation of ours that its owner gave up.
    unsafe { libc::madvise(address as *mut _, bytes, libc::MADV_DONTNEED) };
}

fn status(result: Result<(), i32>) -> i32 {
    result.err().unwrap_or(OK)
}

fn allocate(size: u64, flag: u64) -> Result<Address, i32> {
    let huge = flag & flag::HUGE_PAGE != 0;
    if huge && !has_huge_pages() {
        return Err(OUT_OF_MEMORY);
    }
    let page = if huge { HUGE_PAGE } else { NORMAL_PAGE };
    // The device bits of pinned host memory mean nothing.
    let memory = if flag::kind(flag) == flag::HOST { host()? } else { device(flag::device(flag))? };
    memory.allocate(usize::try_from(size).map_err(|_| INVALID_VALUE)?, page)
}

/// A driver that does not answer for a while.
fn wait_at_gate() {
    static GATE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let gate = GATE.get_or_init(|| std::env::var_os("SIM_CANN_ALLOC_GATE").map(PathBuf::from));
    while gate.as_ref().is_some_and(|gate| gate.exists()) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn halMemAllocInner(out: Out<Address>, size: u64, flag: u64) -> i32 {
    wait_at_gate();
    match (out, allocate(size, flag)) {
        (None, _) => INVALID_VALUE,
        (Some(_), Err(error)) => error,
        (Some(slot), Ok(address)) => {
            slot.write(address);
            OK
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn halMemAlloc(out: Out<Address>, size: u64, flag: u64) -> i32 {
    let call = trace::enter("halMemAlloc");
    let Some(slot) = out else { return call.num("size", size).num("flag", flag).done(INVALID_VALUE) };
    // The same slot goes down, as in CANN: on failure it keeps what its owner had there.
    let error = halMemAllocInner(Some(slot), size, flag);
    // SAFETY: a successful allocation wrote the slot.
    let address = if error == OK { unsafe { slot.assume_init() } } else { 0 };
    call.num("device", flag::device(flag))
        .num("kind", flag::kind(flag))
        .num("module", flag::module(flag))
        .num("flag", flag)
        .num("size", size)
        .num("ptr", address)
        .done(error)
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn halMemFreeInner(address: Address) -> i32 {
    status(holder_of(address).ok_or(INVALID_VALUE).and_then(|memory| memory.free(address)))
}

#[unsafe(no_mangle)]
extern "C" fn halMemFree(address: Address) -> i32 {
    let call = trace::enter("halMemFree");
    call.num("ptr", address).done(halMemFreeInner(address))
}

#[unsafe(no_mangle)]
extern "C" fn halMemGetInfo(id: u32, kind: u32, info: Out<MemInfo>) -> i32 {
    let Ok(memory) = device(id) else { return INVALID_VALUE };
    let total = if kind == MEM_INFO_HBM { memory.capacity } else { 0 };
    let free = total.saturating_sub(lock(&memory.state).used);
    let info_of = MemInfo { total: total as u64, free: free as u64, other: [0; 6] };
    if put(info, info_of) { OK } else { INVALID_VALUE }
}

/// Physical memory apart from addresses: `halMemCreate` to `halMemMap`.
struct Virtual {
    /// Start of each reserved range -> its length.
    reserved: BTreeMap<Address, usize>,
    mapped: BTreeMap<Address, Mapping>,
    /// By handle, which is the address of the box.
    physical: BTreeMap<Address, Box<Physical>>,
}

struct Mapping {
    size: usize,
    handle: Address,
}

struct Physical {
    bytes: usize,
    /// None: memory of the host, or of another process, which no device is charged with here.
    device: Option<u32>,
    /// Taken by `halMemCreate`, `halMemRetainAllocationHandle` and `halMemMap`.
    references: usize,
}

static VIRTUAL: Mutex<Virtual> =
    Mutex::new(Virtual { reserved: BTreeMap::new(), mapped: BTreeMap::new(), physical: BTreeMap::new() });

impl Virtual {
    fn add(&mut self, physical: Physical) -> Address {
        let physical = Box::new(physical);
        let handle = &raw const *physical as Address;
        self.physical.insert(handle, physical);
        handle
    }

    /// Drops one reference; the last one gives the memory back.
    fn release(&mut self, handle: Address) -> Result<(), i32> {
        let physical = self.physical.get_mut(&handle).ok_or(INVALID_VALUE)?;
        physical.references -= 1;
        if physical.references == 0 {
            if let Some(memory) = physical.device.map(device).transpose()? {
                lock(&memory.state).used -= physical.bytes;
            }
            self.physical.remove(&handle);
        }
        Ok(())
    }

    fn map(&mut self, address: Address, size: usize, handle: Address) -> Result<(), i32> {
        let (&start, &room) = self.reserved.range(..=address).next_back().ok_or(INVALID_VALUE)?;
        let inside = address.checked_add(size).is_some_and(|end| end <= start + room);
        let physical = self.physical.get_mut(&handle).ok_or(INVALID_VALUE)?;
        if !inside || size == 0 || size > physical.bytes {
            return Err(INVALID_VALUE);
        }
        if self.mapped.range(address..address + size).next().is_some() {
            return Err(INVALID_VALUE);
        }
        map_anonymous(address, size, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_FIXED)
            .ok_or(OUT_OF_MEMORY)?;
        physical.references += 1;
        self.mapped.insert(address, Mapping { size, handle });
        Ok(())
    }

    fn unmap(&mut self, address: Address) -> Result<(), i32> {
        let mapping = self.mapped.remove(&address).ok_or(INVALID_VALUE)?;
        map_anonymous(address, mapping.size, libc::PROT_NONE, libc::MAP_FIXED).ok_or(OUT_OF_MEMORY)?;
        self.release(mapping.handle)
    }

    fn handle_at(&self, address: Address) -> Option<Address> {
        let (start, mapping) = self.mapped.range(..=address).next_back()?;
        (address - start < mapping.size).then_some(mapping.handle)
    }
}

#[unsafe(no_mangle)]
extern "C" fn halMemAddressReserve(
    out: Out<Address>,
    size: usize,
    align: usize,
    _hint: Address,
    _flag: u64,
) -> i32 {
    let call = trace::enter("halMemAddressReserve").num("size", size);
    let align = align.max(HUGE_PAGE);
    if size == 0 || !align.is_power_of_two() {
        return call.done(INVALID_VALUE);
    }
    let Some(start) = map_anonymous(0, size + align, libc::PROT_NONE, 0) else {
        return call.done(OUT_OF_MEMORY);
    };
    let address = start.next_multiple_of(align);
    lock(&VIRTUAL).reserved.insert(address, size);
    let error = if put(out, address) { OK } else { INVALID_VALUE };
    call.num("ptr", address).done(error)
}

#[unsafe(no_mangle)]
extern "C" fn halMemAddressFree(address: Address) -> i32 {
    let call = trace::enter("halMemAddressFree").num("ptr", address);
    let Some(size) = lock(&VIRTUAL).reserved.remove(&address) else { return call.done(INVALID_VALUE) };
    // SAFETY: the range was reserved by `halMemAddressReserve` and its owner gave it up.
    unsafe { libc::munmap(address as *mut _, size) };
    call.done(OK)
}

#[unsafe(no_mangle)]
extern "C" fn halMemCreate(out: Out<Address>, size: usize, prop: Option<&MemProp>, flag: u64) -> i32 {
    let call = trace::enter("halMemCreate").num("size", size).num("flag", flag);
    let Some(prop) = prop else { return call.done(INVALID_VALUE) };
    let call = call.num("side", prop.side).num("device", prop.device).num("module", prop.module);
    let page = if prop.page == 0 { NORMAL_PAGE } else { HUGE_PAGE };
    let Some(bytes) = size.checked_next_multiple_of(page).filter(|&n| n > 0) else {
        return call.done(INVALID_VALUE);
    };
    let owner = (prop.side == 1).then_some(prop.device);
    let charged = owner.map_or(Ok(()), |id| {
        let memory = device(id)?;
        memory.charge(&mut lock(&memory.state), bytes)
    });
    if let Err(error) = charged {
        return call.done(error);
    }
    let handle = lock(&VIRTUAL).add(Physical { bytes, device: owner, references: 1 });
    let error = if put(out, handle) { OK } else { INVALID_VALUE };
    call.num("handle", handle).done(error)
}

#[unsafe(no_mangle)]
extern "C" fn halMemRelease(handle: Address) -> i32 {
    let call = trace::enter("halMemRelease").num("handle", handle);
    call.done(status(lock(&VIRTUAL).release(handle)))
}

#[unsafe(no_mangle)]
extern "C" fn halMemMap(address: Address, size: usize, _offset: usize, handle: Address, _flag: u64) -> i32 {
    let call = trace::enter("halMemMap").num("ptr", address).num("size", size).num("handle", handle);
    call.done(status(lock(&VIRTUAL).map(address, size, handle)))
}

#[unsafe(no_mangle)]
extern "C" fn halMemUnmap(address: Address) -> i32 {
    let call = trace::enter("halMemUnmap").num("ptr", address);
    call.done(status(lock(&VIRTUAL).unmap(address)))
}

#[unsafe(no_mangle)]
extern "C" fn halMemRetainAllocationHandle(out: Out<Address>, address: Address) -> i32 {
    let call = trace::enter("halMemRetainAllocationHandle").num("ptr", address);
    let mut state = lock(&VIRTUAL);
    let Some(handle) = state.handle_at(address) else { return call.done(INVALID_VALUE) };
    if let Some(physical) = state.physical.get_mut(&handle) {
        physical.references += 1;
    }
    let error = if put(out, handle) { OK } else { INVALID_VALUE };
    call.num("handle", handle).done(error)
}

#[unsafe(no_mangle)]
extern "C" fn halMemSetAccess(_address: Address, _size: usize, _desc: Address, _count: usize) -> i32 {
    OK
}

/// The shareable form of a handle is the handle: only its own process can import it.
#[unsafe(no_mangle)]
extern "C" fn halMemExportToShareableHandle(
    handle: Address,
    _kind: u32,
    _flag: u64,
    shareable: Out<u64>,
) -> i32 {
    let known = lock(&VIRTUAL).physical.contains_key(&handle);
    if known && put(shareable, handle as u64) { OK } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
extern "C" fn halMemImportFromShareableHandle(shareable: u64, id: u32, out: Out<Address>) -> i32 {
    let call = trace::enter("halMemImportFromShareableHandle").num("device", id);
    let mut state = lock(&VIRTUAL);
    let Some(bytes) = state.physical.get(&(shareable as Address)).map(|physical| physical.bytes) else {
        return call.done(INVALID_VALUE);
    };
    let handle = state.add(Physical { bytes, device: None, references: 1 });
    let error = if put(out, handle) { OK } else { INVALID_VALUE };
    call.num("handle", handle).done(error)
}

#[unsafe(no_mangle)]
extern "C" fn halHostRegister(source: Address, size: u64, _flag: u32, id: u32, out: Out<Address>) -> i32 {
    let call = trace::enter("halHostRegister").num("ptr", source).num("size", size).num("device", id);
    put(out, source);
    call.done(OK)
}

#[unsafe(no_mangle)]
extern "C" fn halHostUnregister(source: Address, _device: u32) -> i32 {
    trace::enter("halHostUnregister").num("ptr", source).done(OK)
}

#[unsafe(no_mangle)]
extern "C" fn halDeviceOpen(id: u32, _input: Address, _output: Address) -> i32 {
    trace::enter("halDeviceOpen").num("device", id).done(device(id).err().unwrap_or(OK))
}

/// Takes back whatever the process still holds on the device, without any free call.
#[unsafe(no_mangle)]
extern "C" fn halDeviceClose(id: u32, _input: Address) -> i32 {
    let call = trace::enter("halDeviceClose").num("device", id);
    let Ok(memory) = device(id) else { return call.done(INVALID_VALUE) };
    let mut physical = lock(&VIRTUAL);
    let mut state = lock(&memory.state);
    let reclaimed = state.used;
    physical.physical.retain(|_, held| held.device != Some(id));
    discard(memory.range.start, memory.range.len());
    state.space.clear();
    state.used = 0;
    call.num("reclaimed", reclaimed).done(OK)
}

#[unsafe(no_mangle)]
extern "C" fn drvGetDevNum(count: Out<u32>) -> i32 {
    if put(count, device_count() as u32) { OK } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
extern "C" fn halGetDeviceInfo(_device: u32, _module: i32, _kind: i32, value: Out<i64>) -> i32 {
    if put(value, 0) { OK } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
extern "C" fn halGetAPIVersion(version: Out<i32>) -> i32 {
    if put(version, 0x07_19_05) { OK } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn drvMemcpyInner(target: Address, capacity: usize, source: Address, size: usize) -> i32 {
    let call = trace::enter("drvMemcpy").num("dst", target).num("src", source).num("size", size);
    if size > capacity || target == 0 || source == 0 {
        return call.done(INVALID_VALUE);
    }
    // SAFETY: the C API asks its caller for `size` valid bytes at both addresses.
    unsafe { std::ptr::copy(source as *const u8, target as *mut u8, size) };
    call.done(OK)
}

sim_cann::forwards! { drvMemcpy => drvMemcpyInner }

#[unsafe(no_mangle)]
extern "C" fn drvMemsetD8(target: Address, capacity: usize, value: u8, count: usize) -> i32 {
    let call = trace::enter("drvMemsetD8").num("dst", target).num("count", count);
    if count > capacity || target == 0 {
        return call.done(INVALID_VALUE);
    }
    // SAFETY: the C API asks its caller for `count` writable bytes.
    unsafe { std::ptr::write_bytes(target as *mut u8, value, count) };
    call.done(OK)
}

#[unsafe(no_mangle)]
extern "C" fn halSqTaskSend(id: u32, info: Option<&TaskSend>) -> i32 {
    let call = trace::enter("halSqTaskSend").num("device", id);
    let Some(info) = info else { return call.done(INVALID_VALUE) };
    call.num("queue", info.queue).num("count", info.count).done(OK)
}
