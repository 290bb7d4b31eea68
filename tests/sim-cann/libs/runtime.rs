//! libruntime.so: contexts, streams and launches between ACL and the driver.
//!
//! A task takes effect when it is submitted; only its completion, which events, queries and waits see, comes
//! a fixed lag later (`SIM_CANN_STREAM_LAG_US`).

#![allow(non_snake_case)]

use std::cell::Cell;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use sim_cann::ffi::{Address, Out, Text, put, text};
use sim_cann::hal::{self, MemInfo, MemProp, TaskSend, flag, module};
use sim_cann::rt::{
    CONTEXT_NULL, DRIVER_ERROR, INVALID_DEVICE, INVALID_PARAM, Kernel, KernelArgs, OK, OUT_OF_MEMORY, policy,
};
use sim_cann::settings::{self, MAX_DEVICES};
use sim_cann::{lock, now_ns, trace};

/// "Huge page first" means huge pages for allocations above this size.
const HUGE_PAGE_THRESHOLD: u64 = 1 << 20;

/// What the runtime allocates for itself on a device at its first use: 14 blocks of 21.4 MB together, and 3
/// pinned ones of 11.3 MB (counts and sums as measured on the real runtime).
const INTERNAL_DEVICE: [u64; 14] = [
    8 << 20,
    4 << 20,
    2 << 20,
    2 << 20,
    2 << 20,
    1 << 20,
    512 << 10,
    512 << 10,
    128 << 10,
    128 << 10,
    128 << 10,
    4 << 10,
    4 << 10,
    4 << 10,
];
const INTERNAL_PINNED: [u64; 3] = [8 << 20, 2 << 20, 768 << 10];

/// A device as the process sees it.
struct Device {
    /// Its number for the driver: `ASCEND_RT_VISIBLE_DEVICES` maps one to the other.
    driver_id: u32,
    primary: OnceLock<&'static Context>,
    /// The runtime's own allocations while the device is in use.
    internal: Mutex<Vec<Address>>,
    /// When the last task submitted to any of its streams completes.
    drained_at: AtomicU64,
}

struct Context {
    id: i32,
    device: &'static Device,
    default_stream: Stream,
}

struct Stream {
    id: i32,
    device: &'static Device,
    drained_at: AtomicU64,
}

#[derive(Default)]
struct Event {
    completed_at: AtomicU64,
}

thread_local! {
    static CURRENT: Cell<Option<&'static Context>> = const { Cell::new(None) };
}

fn devices() -> &'static [Device] {
    static VISIBLE: OnceLock<Vec<Device>> = OnceLock::new();
    VISIBLE.get_or_init(|| {
        let mut count = std::mem::MaybeUninit::new(0);
        hal::drvGetDevNum(Some(&mut count));
        // SAFETY: initialised above.
        let count = unsafe { count.assume_init() }.min(MAX_DEVICES as u32);
        let ids: Vec<u32> = match std::env::var("ASCEND_RT_VISIBLE_DEVICES") {
            // As in CANN, the first id that does not exist ends the list.
            Ok(list) => {
                list.split(',').map_while(|id| id.trim().parse().ok().filter(|&id| id < count)).collect()
            }
            Err(_) => (0..count).collect(),
        };
        let device = |driver_id| Device {
            driver_id,
            primary: OnceLock::new(),
            internal: Mutex::default(),
            drained_at: AtomicU64::new(0),
        };
        ids.into_iter().map(device).collect()
    })
}

fn device(id: i32) -> Option<&'static Device> {
    devices().get(usize::try_from(id).ok()?)
}

impl Device {
    fn driver_error(error: i32) -> i32 {
        match error {
            hal::OK => OK,
            hal::OUT_OF_MEMORY => OUT_OF_MEMORY,
            hal::INVALID_VALUE => INVALID_PARAM,
            _ => DRIVER_ERROR,
        }
    }

    /// Opens the device, which costs the process the runtime's own memory on it.
    fn open(&self) {
        let mut internal = lock(&self.internal);
        if !internal.is_empty() {
            return;
        }
        hal::halDeviceOpen(self.driver_id, 0, 0);
        let on_device = flag::of(flag::DEVICE, module::RUNTIME) | u64::from(self.driver_id);
        let pinned = flag::of(flag::HOST, module::RUNTIME);
        let wanted = INTERNAL_DEVICE.map(|size| (size, on_device)).into_iter();
        for (size, flag) in wanted.chain(INTERNAL_PINNED.map(|size| (size, pinned))) {
            let mut address = std::mem::MaybeUninit::new(0);
            if hal::halMemAlloc(Some(&mut address), size, flag) == hal::OK {
                // SAFETY: initialised above.
                internal.push(unsafe { address.assume_init() });
            }
        }
    }

    /// Closes the device: the runtime frees what is its own, the driver takes back the rest.
    fn close(&self) {
        let internal = std::mem::take(&mut *lock(&self.internal));
        if internal.is_empty() {
            return;
        }
        for address in internal {
            hal::halMemFree(address);
        }
        hal::halDeviceClose(self.driver_id, 0);
    }
}

impl Context {
    fn new(id: i32, device: &'static Device) -> &'static Self {
        // Contexts are never freed: a thread may still hold a destroyed one as its current context.
        Box::leak(Box::new(Self { id, device, default_stream: Stream::new(device) }))
    }

    fn current() -> Option<&'static Self> {
        CURRENT.get()
    }
}

impl Stream {
    fn new(device: &'static Device) -> Self {
        static NEXT: AtomicI32 = AtomicI32::new(0);
        Self { id: NEXT.fetch_add(1, Relaxed), device, drained_at: AtomicU64::new(0) }
    }

    /// The stream behind a handle; the default stream of the current context behind null.
    fn of<'a>(handle: Address) -> Option<&'a Self> {
        if handle == 0 {
            return Context::current().map(|context| &context.default_stream);
        }
        // SAFETY: the C API asks its caller for a handle of `rtStreamCreate…` that was not destroyed.
        Some(unsafe { &*(handle as *const Self) })
    }

    /// Accepts one task: it completes a lag from now, after all before it.
    fn submit(&self) -> u64 {
        static LAG_NS: OnceLock<u64> = OnceLock::new();
        let lag = *LAG_NS.get_or_init(|| settings::get("SIM_CANN_STREAM_LAG_US", 200u64) * 1000);
        self.drains_at_least(now_ns() + lag)
    }

    fn drains_at_least(&self, time: u64) -> u64 {
        self.device.drained_at.fetch_max(time, Relaxed);
        self.drained_at.fetch_max(time, Relaxed).max(time)
    }

    /// Puts one task into the hardware queue.
    fn send(&self) -> i32 {
        self.submit();
        let task = [0u64; 8];
        let info = TaskSend {
            kind: 0,
            scheduler: 0,
            queue: self.id as u32,
            timeout: 0,
            tasks: task.as_ptr() as Address,
            count: 1,
            position: 0,
        };
        Device::driver_error(hal::halSqTaskSend(self.device.driver_id, Some(&info)))
    }
}

impl Event {
    fn of<'a>(handle: Address) -> Option<&'a Self> {
        // SAFETY: the C API asks its caller for a handle of `rtEventCreate…` that was not destroyed, or null.
        unsafe { (handle as *const Self).as_ref() }
    }
}

/// Waits until `time`, at most `limit`; `false` when the limit came first.
fn wait_until(time: u64, limit: Option<Duration>) -> bool {
    let deadline = limit.map(|limit| now_ns() + limit.as_nanos() as u64);
    loop {
        let now = now_ns();
        if now >= time {
            return true;
        }
        if deadline.is_some_and(|deadline| now >= deadline) {
            return false;
        }
        std::thread::sleep(Duration::from_nanos(time.min(deadline.unwrap_or(u64::MAX)) - now));
    }
}

fn written(ok: bool) -> i32 {
    if ok { OK } else { INVALID_PARAM }
}

// ---- devices and contexts

#[unsafe(no_mangle)]
extern "C" fn rtGetDeviceCount(count: Out<i32>) -> i32 {
    written(put(count, devices().len() as i32))
}

#[unsafe(no_mangle)]
extern "C" fn rtSetDevice(id: i32) -> i32 {
    let call = trace::enter("rtSetDevice").num("device", id);
    let Some(device) = device(id) else { return call.done(INVALID_DEVICE) };
    device.open();
    CURRENT.set(Some(device.primary.get_or_init(|| Context::new(id, device))));
    call.num("driver_id", device.driver_id).done(OK)
}

#[unsafe(no_mangle)]
extern "C" fn rtGetDevice(id: Out<i32>) -> i32 {
    Context::current().map_or(CONTEXT_NULL, |context| written(put(id, context.id)))
}

#[unsafe(no_mangle)]
extern "C" fn rtDeviceReset(id: i32) -> i32 {
    let call = trace::enter("rtDeviceReset").num("device", id);
    let Some(device) = device(id) else { return call.done(INVALID_DEVICE) };
    device.close();
    if Context::current().is_some_and(|context| context.id == id) {
        CURRENT.set(None);
    }
    call.done(OK)
}

#[unsafe(no_mangle)]
extern "C" fn rtDeviceResetForce(id: i32) -> i32 {
    rtDeviceReset(id)
}

#[unsafe(no_mangle)]
extern "C" fn rtDeviceSynchronize() -> i32 {
    let Some(context) = Context::current() else { return CONTEXT_NULL };
    wait_until(context.device.drained_at.load(Relaxed), None);
    OK
}

#[unsafe(no_mangle)]
extern "C" fn rtGetPrimaryCtxState(id: i32, flags: Out<u32>, active: Out<i32>) -> i32 {
    let Some(device) = device(id) else { return INVALID_DEVICE };
    let in_use = !lock(&device.internal).is_empty();
    written(put(flags, 0) && put(active, i32::from(in_use)))
}

#[unsafe(no_mangle)]
extern "C" fn rtCtxCreate(out: Out<Address>, _flags: u32, id: i32) -> i32 {
    let call = trace::enter("rtCtxCreate").num("device", id);
    let Some(device) = device(id) else { return call.done(INVALID_DEVICE) };
    device.open();
    let context = Context::new(id, device);
    CURRENT.set(Some(context));
    let handle = &raw const *context as Address;
    let error = written(put(out, handle));
    call.num("context", handle).done(error)
}

#[unsafe(no_mangle)]
extern "C" fn rtCtxDestroy(context: Address) -> i32 {
    if Context::current().is_some_and(|current| &raw const *current as Address == context) {
        CURRENT.set(None);
    }
    OK
}

#[unsafe(no_mangle)]
extern "C" fn rtCtxSetCurrent(context: Address) -> i32 {
    // SAFETY: the C API asks its caller for a context handle, and contexts are never freed.
    CURRENT.set(unsafe { (context as *const Context).as_ref() });
    OK
}

#[unsafe(no_mangle)]
extern "C" fn rtCtxGetCurrent(out: Out<Address>) -> i32 {
    Context::current().map_or(CONTEXT_NULL, |context| written(put(out, &raw const *context as Address)))
}

// ---- memory

fn allocate(out: &mut std::mem::MaybeUninit<Address>, size: u64, kind: u32, owner: u16) -> i32 {
    let Some(context) = Context::current() else { return CONTEXT_NULL };
    let Some(size) = size.checked_next_multiple_of(32).filter(|&size| size > 0) else { return INVALID_PARAM };
    let normal = flag::of(flag::DEVICE, owner) | flag::HBM | u64::from(context.device.driver_id);
    let huge = normal | flag::HUGE_PAGE;
    if kind & policy::HUGE_ONLY != 0 {
        return Device::driver_error(hal::halMemAlloc(Some(out), size, huge));
    }
    let prefers_huge = kind & policy::HUGE_FIRST != 0 && size > HUGE_PAGE_THRESHOLD;
    if prefers_huge && hal::halMemAlloc(Some(out), size, huge) == hal::OK {
        return OK;
    }
    Device::driver_error(hal::halMemAlloc(Some(out), size, normal))
}

#[unsafe(no_mangle)]
extern "C" fn rtMalloc(out: Out<Address>, size: u64, kind: u32, owner: u16) -> i32 {
    let call = trace::enter("rtMalloc").num("size", size).num("module", owner);
    let error = out.map_or(INVALID_PARAM, |out| allocate(out, size, kind, owner));
    call.done(error)
}

#[unsafe(no_mangle)]
extern "C" fn rtMallocCached(out: Out<Address>, size: u64, kind: u32, owner: u16) -> i32 {
    let call = trace::enter("rtMallocCached").num("size", size).num("module", owner);
    let error = out.map_or(INVALID_PARAM, |out| allocate(out, size, kind, owner));
    call.done(error)
}

#[unsafe(no_mangle)]
extern "C" fn rtMemAlloc(out: Out<Address>, size: u64, kind: u32, _advise: u32, _config: Address) -> i32 {
    let call = trace::enter("rtMemAlloc").num("size", size);
    let error = out.map_or(INVALID_PARAM, |out| allocate(out, size, kind, module::APP));
    call.done(error)
}

#[unsafe(no_mangle)]
extern "C" fn rtFree(address: Address) -> i32 {
    let call = trace::enter("rtFree").num("ptr", address);
    call.done(Device::driver_error(hal::halMemFree(address)))
}

#[unsafe(no_mangle)]
extern "C" fn rtFreeWithDevSync(address: Address) -> i32 {
    let call = trace::enter("rtFreeWithDevSync").num("ptr", address);
    rtDeviceSynchronize();
    call.done(Device::driver_error(hal::halMemFree(address)))
}

#[unsafe(no_mangle)]
extern "C" fn rtMallocHost(out: Out<Address>, size: u64, owner: u16) -> i32 {
    let call = trace::enter("rtMallocHost").num("size", size).num("module", owner);
    call.done(Device::driver_error(hal::halMemAlloc(out, size.max(1), flag::of(flag::HOST, owner))))
}

#[unsafe(no_mangle)]
extern "C" fn rtFreeHost(address: Address) -> i32 {
    let call = trace::enter("rtFreeHost").num("ptr", address);
    call.done(Device::driver_error(hal::halMemFree(address)))
}

#[unsafe(no_mangle)]
extern "C" fn rtMemAllocManaged(out: Out<Address>, size: u64, _flag: u32, owner: u16) -> i32 {
    let call = trace::enter("rtMemAllocManaged").num("size", size).num("module", owner);
    let Some(context) = Context::current() else { return call.done(CONTEXT_NULL) };
    let flag = flag::of(flag::SVM, owner) | flag::HBM | u64::from(context.device.driver_id);
    call.done(Device::driver_error(hal::halMemAlloc(out, size, flag)))
}

#[unsafe(no_mangle)]
extern "C" fn rtReserveMemAddress(
    out: Out<Address>,
    size: usize,
    align: usize,
    hint: Address,
    flags: u64,
) -> i32 {
    Device::driver_error(hal::halMemAddressReserve(out, size, align, hint, flags))
}

#[unsafe(no_mangle)]
extern "C" fn rtReleaseMemAddress(address: Address) -> i32 {
    Device::driver_error(hal::halMemAddressFree(address))
}

#[unsafe(no_mangle)]
extern "C" fn rtMallocPhysical(out: Out<Address>, size: usize, prop: Option<&MemProp>, flags: u64) -> i32 {
    let Some(mut prop) = prop.copied() else { return INVALID_PARAM };
    let Some(device) = device(prop.device as i32) else { return INVALID_DEVICE };
    prop.device = device.driver_id;
    Device::driver_error(hal::halMemCreate(out, size, Some(&prop), flags))
}

#[unsafe(no_mangle)]
extern "C" fn rtFreePhysical(handle: Address) -> i32 {
    Device::driver_error(hal::halMemRelease(handle))
}

#[unsafe(no_mangle)]
extern "C" fn rtMapMem(address: Address, size: usize, offset: usize, handle: Address, flags: u64) -> i32 {
    let error = hal::halMemMap(address, size, offset, handle, flags);
    if error == hal::OK {
        hal::halMemSetAccess(address, size, 0, 0);
    }
    Device::driver_error(error)
}

#[unsafe(no_mangle)]
extern "C" fn rtUnmapMem(address: Address) -> i32 {
    Device::driver_error(hal::halMemUnmap(address))
}

#[unsafe(no_mangle)]
extern "C" fn rtMemRetainAllocationHandle(address: Address, out: Out<Address>) -> i32 {
    Device::driver_error(hal::halMemRetainAllocationHandle(out, address))
}

#[unsafe(no_mangle)]
extern "C" fn rtMemGetInfoEx(_kind: u32, free: Out<usize>, total: Out<usize>) -> i32 {
    let Some(context) = Context::current() else { return CONTEXT_NULL };
    let mut info = std::mem::MaybeUninit::new(MemInfo { total: 0, free: 0, other: [0; 6] });
    let error = hal::halMemGetInfo(context.device.driver_id, hal::MEM_INFO_HBM, Some(&mut info));
    // SAFETY: initialised above.
    let info = unsafe { info.assume_init() };
    if !put(free, info.free as usize) || !put(total, info.total as usize) {
        return INVALID_PARAM;
    }
    Device::driver_error(error)
}

#[unsafe(no_mangle)]
extern "C" fn rtHostRegister(source: Address, size: u64, kind: u32, out: Out<Address>) -> i32 {
    let Some(context) = Context::current() else { return CONTEXT_NULL };
    Device::driver_error(hal::halHostRegister(source, size, kind, context.device.driver_id, out))
}

#[unsafe(no_mangle)]
extern "C" fn rtHostUnregister(source: Address) -> i32 {
    let Some(context) = Context::current() else { return CONTEXT_NULL };
    Device::driver_error(hal::halHostUnregister(source, context.device.driver_id))
}

#[unsafe(no_mangle)]
extern "C" fn rtMemcpy(target: Address, capacity: u64, source: Address, size: u64, _kind: u32) -> i32 {
    Device::driver_error(hal::drvMemcpy(target, capacity as usize, source, size as usize))
}

#[unsafe(no_mangle)]
extern "C" fn rtMemcpyAsync(
    target: Address,
    capacity: u64,
    source: Address,
    size: u64,
    _kind: u32,
    stream: Address,
) -> i32 {
    if size > capacity {
        return INVALID_PARAM;
    }
    let Some(stream) = Stream::of(stream) else { return CONTEXT_NULL };
    // SAFETY: the C API asks its caller for `size` valid bytes at both addresses.
    unsafe { std::ptr::copy(source as *const u8, target as *mut u8, size as usize) };
    stream.send()
}

#[unsafe(no_mangle)]
extern "C" fn rtMemset(target: Address, capacity: u64, value: u32, count: u64) -> i32 {
    Device::driver_error(hal::drvMemsetD8(target, capacity as usize, value as u8, count as usize))
}

#[unsafe(no_mangle)]
extern "C" fn rtMemsetAsync(target: Address, capacity: u64, value: u32, count: u64, stream: Address) -> i32 {
    if count > capacity {
        return INVALID_PARAM;
    }
    let Some(stream) = Stream::of(stream) else { return CONTEXT_NULL };
    // SAFETY: the C API asks its caller for `count` writable bytes.
    unsafe { std::ptr::write_bytes(target as *mut u8, value as u8, count as usize) };
    stream.send()
}

// ---- streams and events

#[unsafe(no_mangle)]
extern "C" fn rtStreamCreateWithFlags(out: Out<Address>, _priority: i32, _flags: u32) -> i32 {
    let Some(context) = Context::current() else { return CONTEXT_NULL };
    let Some(out) = out else { return INVALID_PARAM };
    out.write(Box::into_raw(Box::new(Stream::new(context.device))) as Address);
    OK
}

#[unsafe(no_mangle)]
extern "C" fn rtStreamDestroy(stream: Address) -> i32 {
    if stream != 0 {
        // SAFETY: the C API asks its caller for a handle of `rtStreamCreate…`, destroyed once.
        drop(unsafe { Box::from_raw(stream as *mut Stream) });
    }
    OK
}

/// 0 when everything submitted is complete, 107023 otherwise.
#[unsafe(no_mangle)]
extern "C" fn rtStreamQuery(stream: Address) -> i32 {
    const NOT_COMPLETE: i32 = 107023;
    let Some(stream) = Stream::of(stream) else { return CONTEXT_NULL };
    if now_ns() >= stream.drained_at.load(Relaxed) { OK } else { NOT_COMPLETE }
}

#[unsafe(no_mangle)]
extern "C" fn rtStreamSynchronizeWithTimeout(stream: Address, milliseconds: i32) -> i32 {
    const TIMEOUT: i32 = 507046;
    let call = trace::enter("rtStreamSynchronize").num("stream", stream);
    let Some(stream) = Stream::of(stream) else { return call.done(CONTEXT_NULL) };
    let limit = u64::try_from(milliseconds).ok().map(Duration::from_millis);
    let drained = wait_until(stream.drained_at.load(Relaxed), limit);
    call.done(if drained { OK } else { TIMEOUT })
}

#[unsafe(no_mangle)]
extern "C" fn rtStreamSynchronize(stream: Address) -> i32 {
    rtStreamSynchronizeWithTimeout(stream, -1)
}

#[unsafe(no_mangle)]
extern "C" fn rtGetStreamId(stream: Address, id: Out<i32>) -> i32 {
    Stream::of(stream).map_or(CONTEXT_NULL, |stream| written(put(id, stream.id)))
}

#[unsafe(no_mangle)]
extern "C" fn rtEventCreateExWithFlag(out: Out<Address>, _flags: u32) -> i32 {
    let Some(out) = out else { return INVALID_PARAM };
    out.write(Box::into_raw(Box::new(Event::default())) as Address);
    OK
}

#[unsafe(no_mangle)]
extern "C" fn rtEventDestroy(event: Address) -> i32 {
    if event != 0 {
        // SAFETY: the C API asks its caller for a handle of `rtEventCreate…`, destroyed once.
        drop(unsafe { Box::from_raw(event as *mut Event) });
    }
    OK
}

#[unsafe(no_mangle)]
extern "C" fn rtEventRecord(event: Address, stream: Address) -> i32 {
    let Some(event) = Event::of(event) else { return INVALID_PARAM };
    let Some(stream) = Stream::of(stream) else { return CONTEXT_NULL };
    event.completed_at.store(stream.submit(), Relaxed);
    OK
}

#[unsafe(no_mangle)]
extern "C" fn rtEventReset(event: Address, _stream: Address) -> i32 {
    let Some(event) = Event::of(event) else { return INVALID_PARAM };
    event.completed_at.store(0, Relaxed);
    OK
}

/// Status 1: complete (an event never recorded is); 0: not yet.
#[unsafe(no_mangle)]
extern "C" fn rtEventQueryStatus(event: Address, status: Out<i32>) -> i32 {
    let Some(event) = Event::of(event) else { return INVALID_PARAM };
    written(put(status, i32::from(now_ns() >= event.completed_at.load(Relaxed))))
}

#[unsafe(no_mangle)]
extern "C" fn rtEventSynchronize(event: Address) -> i32 {
    let call = trace::enter("rtEventSynchronize").num("event", event);
    let Some(event) = Event::of(event) else { return call.done(INVALID_PARAM) };
    wait_until(event.completed_at.load(Relaxed), None);
    call.done(OK)
}

#[unsafe(no_mangle)]
extern "C" fn rtStreamWaitEvent(stream: Address, event: Address) -> i32 {
    let Some(event) = Event::of(event) else { return INVALID_PARAM };
    let Some(stream) = Stream::of(stream) else { return CONTEXT_NULL };
    stream.drains_at_least(event.completed_at.load(Relaxed));
    OK
}

#[unsafe(no_mangle)]
extern "C" fn rtEventGetTimeStamp(time_us: Out<u64>, event: Address) -> i32 {
    let Some(event) = Event::of(event) else { return INVALID_PARAM };
    written(put(time_us, event.completed_at.load(Relaxed) / 1000))
}

#[unsafe(no_mangle)]
extern "C" fn rtEventElapsedTime(milliseconds: Out<f32>, start: Address, end: Address) -> i32 {
    let (Some(start), Some(end)) = (Event::of(start), Event::of(end)) else { return INVALID_PARAM };
    let (start, end) = (start.completed_at.load(Relaxed), end.completed_at.load(Relaxed));
    written(put(milliseconds, end.saturating_sub(start) as f32 / 1e6))
}

// ---- kernels

/// Makes the handle of a kernel. It lives as long as the process: launches may come at any time.
fn kernel(program: Address, stub: Address, name: &str) -> Address {
    let name: &'static str = Box::leak(format!("{name}\0").into_boxed_str());
    let kernel: &'static Kernel = Box::leak(Box::new(Kernel {
        program,
        kind: 0,
        mix: 0,
        stub,
        name: name.as_ptr(),
        name_length: name.len() - 1,
        name_buffer: [0; 16],
    }));
    let object = &raw const *kernel as Address;
    if !settings::flag("SIM_CANN_FUNC_GUARD") {
        return object;
    }
    const GUARD: Address = 0x4655_4e43;
    let guard: &'static [Address; 2] = Box::leak(Box::new([GUARD, object]));
    guard.as_ptr() as Address
}

#[unsafe(no_mangle)]
extern "C" fn rtBinaryLoadFromData(_data: Address, length: u64, out: Out<Address>) -> i32 {
    let binary: &'static u64 = Box::leak(Box::new(length));
    written(put(out, &raw const *binary as Address))
}

#[unsafe(no_mangle)]
extern "C" fn rtBinaryGetFunctionByName(binary: Address, name: Text, out: Out<Address>) -> i32 {
    let name = text(name);
    let call = trace::enter("rtBinaryGetFunctionByName").text("name", &name);
    let handle = kernel(binary, 0, &name);
    let error = written(put(out, handle));
    call.num("function", handle).done(error)
}

#[unsafe(no_mangle)]
extern "C" fn rtsLaunchKernelWithHostArgs(
    function: Address,
    blocks: u32,
    stream: Address,
    _config: Address,
    args: Address,
    args_size: u32,
    _placeholders: Address,
    _placeholder_count: u32,
) -> i32 {
    let call = trace::enter("rtsLaunchKernelWithHostArgs").num("function", function).num("blocks", blocks);
    let call = call.num("stream", stream).num("args", args).num("args_size", args_size);
    call.done(Stream::of(stream).map_or(CONTEXT_NULL, Stream::send))
}

/// `rtDevBinary_t` in, handle of the program out.
#[unsafe(no_mangle)]
extern "C" fn rtDevBinaryRegister(binary: Address, out: Out<Address>) -> i32 {
    rtBinaryLoadFromData(binary, 0, out)
}

#[unsafe(no_mangle)]
extern "C" fn rtRegisterAllKernel(binary: Address, out: Out<Address>) -> i32 {
    rtBinaryLoadFromData(binary, 0, out)
}

#[unsafe(no_mangle)]
extern "C" fn rtFunctionRegister(
    binary: Address,
    stub: Address,
    name: Text,
    _info: Address,
    _mode: u32,
) -> i32 {
    let name = text(name);
    let call = trace::enter("rtFunctionRegister").num("binary", binary).num("stub", stub);
    call.text("name", &name).done(OK)
}

#[unsafe(no_mangle)]
extern "C" fn rtKernelLaunch(
    stub: Address,
    blocks: u32,
    args: Address,
    args_size: u32,
    _descriptor: Address,
    stream: Address,
) -> i32 {
    let call = trace::enter("rtKernelLaunch").num("stub", stub).num("blocks", blocks);
    let call = call.num("stream", stream).num("args", args).num("args_size", args_size);
    call.done(Stream::of(stream).map_or(CONTEXT_NULL, Stream::send))
}

#[unsafe(no_mangle)]
extern "C" fn rtKernelLaunchWithHandleV2(
    handle: Address,
    tiling_key: u64,
    blocks: u32,
    args: Option<&KernelArgs>,
    _descriptor: Address,
    stream: Address,
    _config: Address,
) -> i32 {
    let call = trace::enter("rtKernelLaunchWithHandleV2").num("handle", handle).num("blocks", blocks);
    let Some(args) = args else { return call.done(INVALID_PARAM) };
    let call = call.num("tiling_key", tiling_key).num("stream", stream);
    let call = call.num("args", args.args).num("args_size", args.size);
    call.done(Stream::of(stream).map_or(CONTEXT_NULL, Stream::send))
}

sim_cann::forwards! {
    rtsMalloc => rtMemAlloc,
    rtsFree => rtFree,
    rtsFreeHost => rtFreeHost,
    rtsSetDevice => rtSetDevice,
    rtsStreamSynchronize => rtStreamSynchronize,
}
