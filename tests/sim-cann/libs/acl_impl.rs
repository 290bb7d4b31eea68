//! libascendcl_impl.so (CANN 8) or libacl_rt_impl.so (CANN 9): the bodies of the ACL runtime. The public
//! names, one jump each, are generated beside it from the names exported here.

#![allow(non_snake_case)]

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

use sim_cann::acl::{INVALID_PARAM, OK, REPEAT_INITIALIZE};
use sim_cann::ffi::{Address, Out, Text, put, put_text, text};
use sim_cann::hal::{MemProp, module};
use sim_cann::rt::{self, policy};
use sim_cann::{lock, settings, trace};

fn written(ok: bool) -> i32 {
    if ok { OK } else { INVALID_PARAM }
}

// ---- process and device

static INITIALIZED: AtomicBool = AtomicBool::new(false);

#[unsafe(no_mangle)]
extern "C" fn aclInitImpl(config: Text) -> i32 {
    let call = trace::enter("aclInit").text("config", &text(config));
    call.done(if INITIALIZED.swap(true, Relaxed) { REPEAT_INITIALIZE } else { OK })
}

#[unsafe(no_mangle)]
extern "C" fn aclFinalizeImpl() -> i32 {
    INITIALIZED.store(false, Relaxed);
    trace::enter("aclFinalize").done(OK)
}

#[unsafe(no_mangle)]
extern "C" fn aclGetRecentErrMsgImpl() -> Text {
    Text::of(c"")
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetSocNameImpl() -> Text {
    static NAME: OnceLock<&CStr> = OnceLock::new();
    let name = || CString::new(settings::get("SIM_CANN_SOC", String::from("Ascend910B1")));
    Text::of(NAME.get_or_init(|| Box::leak(name().unwrap_or_default().into_boxed_c_str())))
}

/// Fills `aclCANNPackageVersion`: the version as text, then its four parts and a reserve, left empty.
#[unsafe(no_mangle)]
extern "C" fn aclsysGetCANNVersionImpl(package: i32, version: Address) -> i32 {
    const DRIVER: i32 = 7;
    const TEXT: usize = 128;
    const SIZE: usize = TEXT + 4 * 64 + 128;
    if version == 0 {
        return INVALID_PARAM;
    }
    let name = match package {
        DRIVER => String::from("25.2.0"),
        _ => settings::get("SIM_CANN_VERSION", String::from("8.3.RC1")),
    };
    // SAFETY: the C API asks its caller for an `aclCANNPackageVersion`, which has SIZE bytes.
    unsafe { (version as *mut u8).write_bytes(0, SIZE) };
    put_text(version, TEXT, &name);
    OK
}

/// The version of one package as text, for which the caller has at least 64 bytes.
#[unsafe(no_mangle)]
extern "C" fn aclsysGetVersionStrImpl(_package: Text, version: Address) -> i32 {
    put_text(version, 64, &settings::get("SIM_CANN_VERSION", String::from("8.3.RC1")));
    written(version != 0)
}

/// Options of the process, such as deterministic computing: kept, without effect.
static OPTIONS: Mutex<BTreeMap<i32, i64>> = Mutex::new(BTreeMap::new());

#[unsafe(no_mangle)]
extern "C" fn aclrtSetSysParamOptImpl(option: i32, value: i64) -> i32 {
    lock(&OPTIONS).insert(option, value);
    OK
}

#[unsafe(no_mangle)]
extern "C" fn aclrtCtxSetSysParamOptImpl(option: i32, value: i64) -> i32 {
    aclrtSetSysParamOptImpl(option, value)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetSysParamOptImpl(option: i32, value: Out<i64>) -> i32 {
    let kept = lock(&OPTIONS).get(&option).copied().unwrap_or_default();
    written(put(value, kept))
}

#[unsafe(no_mangle)]
extern "C" fn aclGetCannAttributeListImpl(list: Out<*const i32>, count: Out<usize>) -> i32 {
    static ATTRIBUTES: [i32; 3] = [0, 1, 2];
    written(put(list, ATTRIBUTES.as_ptr()) && put(count, ATTRIBUTES.len()))
}

/// Attributes 0 and 1 (INF/NAN mode, BF16) are there, 2 (jit compile) is not.
#[unsafe(no_mangle)]
extern "C" fn aclGetCannAttributeImpl(attribute: i32, value: Out<i32>) -> i32 {
    written(put(value, i32::from(attribute != 2)))
}

/// 24 cube cores, 48 vector cores, 192 MiB of L2: a 910B.
#[unsafe(no_mangle)]
extern "C" fn aclGetDeviceCapabilityImpl(_device: u32, kind: i32, value: Out<i64>) -> i32 {
    written(put(value, [24, 48].get(kind as usize).copied().unwrap_or(192 << 20)))
}

fn put_cores(kind: i32, count: Out<u32>) -> i32 {
    written(put(count, if kind == 0 { 24 } else { 48 }))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetDeviceResLimitImpl(_device: i32, kind: i32, value: Out<u32>) -> i32 {
    put_cores(kind, value)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetStreamResLimitImpl(_stream: Address, kind: i32, value: Out<u32>) -> i32 {
    put_cores(kind, value)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetResInCurrentThreadImpl(kind: i32, value: Out<u32>) -> i32 {
    put_cores(kind, value)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetDeviceCountImpl(count: Out<u32>) -> i32 {
    let mut devices = MaybeUninit::new(0);
    let error = rt::rtGetDeviceCount(Some(&mut devices));
    // SAFETY: initialised above.
    let devices = unsafe { devices.assume_init() };
    if put(count, devices as u32) { error } else { INVALID_PARAM }
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetLogicDevIdByUserDevIdImpl(device: i32, logic: Out<i32>) -> i32 {
    written(put(logic, device))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetDeviceInfoImpl(device: u32, kind: i32, value: Out<i64>) -> i32 {
    aclGetDeviceCapabilityImpl(device, kind, value)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetPrimaryCtxStateImpl(device: i32, flags: Out<u32>, active: Out<i32>) -> i32 {
    let in_use = rt::rtGetPrimaryCtxState(device, flags, active);
    if in_use == rt::OK { OK } else { INVALID_PARAM }
}

#[unsafe(no_mangle)]
extern "C" fn aclrtSetDeviceImpl(device: i32) -> i32 {
    trace::enter("aclrtSetDevice").num("device", device).done(rt::rtSetDevice(device))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetDeviceImpl(device: Out<i32>) -> i32 {
    rt::rtGetDevice(device)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtResetDeviceImpl(device: i32) -> i32 {
    trace::enter("aclrtResetDevice").num("device", device).done(rt::rtDeviceReset(device))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtResetDeviceForceImpl(device: i32) -> i32 {
    trace::enter("aclrtResetDeviceForce").num("device", device).done(rt::rtDeviceResetForce(device))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtCreateContextImpl(out: Out<Address>, device: i32) -> i32 {
    trace::enter("aclrtCreateContext").num("device", device).done(rt::rtCtxCreate(out, 0, device))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtDestroyContextImpl(context: Address) -> i32 {
    rt::rtCtxDestroy(context)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtSetCurrentContextImpl(context: Address) -> i32 {
    trace::enter("aclrtSetCurrentContext").num("context", context).done(rt::rtCtxSetCurrent(context))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetCurrentContextImpl(out: Out<Address>) -> i32 {
    rt::rtCtxGetCurrent(out)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtDeviceCanAccessPeerImpl(can: Out<i32>, device: i32, peer: i32) -> i32 {
    written(put(can, i32::from(device != peer)))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtDeviceGetBareTgidImpl(pid: Out<i32>) -> i32 {
    written(put(pid, std::process::id() as i32))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetDeviceUtilizationRateImpl(_device: i32, rates: Out<[i32; 4]>) -> i32 {
    written(put(rates, [0; 4]))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetMemUceInfoImpl(_device: i32, _info: Address, _room: usize, count: Out<usize>) -> i32 {
    written(put(count, 0))
}

// ---- memory

/// Allocates through `rtMalloc` with an `aclrtMemMallocPolicy`.
fn malloc(out: Out<Address>, padded: usize, acl_policy: u32) -> i32 {
    let kind = match acl_policy {
        1 | 4 => policy::HUGE_ONLY,
        2 | 5 => policy::NORMAL_ONLY,
        _ => policy::HUGE_FIRST,
    };
    rt::rtMalloc(out, padded as u64, kind, module::APP)
}

/// One logged allocation: `size` wanted, `padded` asked of the runtime.
fn allocate(name: &str, out: Out<Address>, size: usize, padded: Option<usize>, acl_policy: u32) -> i32 {
    let call = trace::enter(name).num("size", size).num("policy", acl_policy);
    let (Some(slot), Some(padded), 1..) = (out, padded, size) else { return call.done(INVALID_PARAM) };
    let error = malloc(Some(slot), padded, acl_policy);
    // SAFETY: a successful allocation wrote the slot.
    let address = if error == OK { unsafe { slot.assume_init() } } else { 0 };
    call.num("ptr", address).done(error)
}

/// What ACL adds to most sizes: 32 bytes, and alignment to 32.
fn pad(size: usize) -> Option<usize> {
    size.checked_add(32)?.checked_next_multiple_of(32)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMallocImpl(out: Out<Address>, size: usize, acl_policy: u32) -> i32 {
    allocate("aclrtMalloc", out, size, pad(size), acl_policy)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMallocCachedImpl(out: Out<Address>, size: usize, acl_policy: u32) -> i32 {
    allocate("aclrtMallocCached", out, size, pad(size), acl_policy)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMallocAlign32Impl(out: Out<Address>, size: usize, acl_policy: u32) -> i32 {
    allocate("aclrtMallocAlign32", out, size, size.checked_next_multiple_of(32), acl_policy)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMallocWithCfgImpl(
    out: Out<Address>,
    size: usize,
    acl_policy: u32,
    _config: Address,
) -> i32 {
    allocate("aclrtMallocWithCfg", out, size, Some(size), acl_policy)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtFreeImpl(address: Address) -> i32 {
    trace::enter("aclrtFree").num("ptr", address).done(rt::rtFree(address))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtFreeWithDevSyncImpl(address: Address) -> i32 {
    trace::enter("aclrtFreeWithDevSync").num("ptr", address).done(rt::rtFreeWithDevSync(address))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMallocHostImpl(out: Out<Address>, size: usize) -> i32 {
    let call = trace::enter("aclrtMallocHost").num("size", size);
    let Some(slot) = out else { return call.done(INVALID_PARAM) };
    let error = rt::rtMallocHost(Some(slot), size as u64, module::APP);
    // SAFETY: a successful allocation wrote the slot.
    let address = if error == OK { unsafe { slot.assume_init() } } else { 0 };
    call.num("ptr", address).done(error)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMallocHostWithCfgImpl(out: Out<Address>, size: u64, _config: Address) -> i32 {
    trace::enter("aclrtMallocHostWithCfg").num("size", size).done(rt::rtMallocHost(out, size, module::APP))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtFreeHostImpl(address: Address) -> i32 {
    trace::enter("aclrtFreeHost").num("ptr", address).done(rt::rtFreeHost(address))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtHostRegisterImpl(source: Address, size: u64, kind: u32, out: Out<Address>) -> i32 {
    trace::enter("aclrtHostRegister")
        .num("ptr", source)
        .num("size", size)
        .done(rt::rtHostRegister(source, size, kind, out))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtHostRegisterV2Impl(source: Address, size: u64, flags: u32) -> i32 {
    let mut seen = MaybeUninit::uninit();
    trace::enter("aclrtHostRegisterV2").num("ptr", source).num("size", size).done(rt::rtHostRegister(
        source,
        size,
        flags,
        Some(&mut seen),
    ))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtHostUnregisterImpl(source: Address) -> i32 {
    trace::enter("aclrtHostUnregister").num("ptr", source).done(rt::rtHostUnregister(source))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMemAllocManagedImpl(out: Out<Address>, size: u64, flag: u32) -> i32 {
    let call = trace::enter("aclrtMemAllocManaged").num("size", size);
    call.done(rt::rtMemAllocManaged(out, size, flag, module::APP))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtGetMemInfoImpl(kind: u32, free: Out<usize>, total: Out<usize>) -> i32 {
    rt::rtMemGetInfoEx(kind, free, total)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtReserveMemAddressImpl(
    out: Out<Address>,
    size: usize,
    align: usize,
    hint: Address,
    flags: u64,
) -> i32 {
    rt::rtReserveMemAddress(out, size, align, hint, flags)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtReleaseMemAddressImpl(address: Address) -> i32 {
    rt::rtReleaseMemAddress(address)
}

/// `aclrtPhysicalMemProp`.
#[repr(C)]
struct PhysicalProp {
    handle_kind: u32,
    allocation_kind: u32,
    attribute: u32,
    location_id: u32,
    /// 0 host, 1 device.
    location_kind: u32,
    reserved: u32,
    reserve: u64,
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMallocPhysicalImpl(
    out: Out<Address>,
    size: usize,
    prop: Option<&PhysicalProp>,
    flags: u64,
) -> i32 {
    const NORMAL_PAGES: [u32; 2] = [3, 5];
    let call = trace::enter("aclrtMallocPhysical").num("size", size);
    let Some(prop) = prop else { return call.done(INVALID_PARAM) };
    let driver_prop = MemProp {
        side: prop.location_kind,
        device: prop.location_id,
        module: u32::from(module::APP),
        page: u32::from(!NORMAL_PAGES.contains(&prop.attribute)),
        memory: 0,
        reserved: 0,
        reserve: prop.reserve,
    };
    call.num("device", prop.location_id).done(rt::rtMallocPhysical(out, size, Some(&driver_prop), flags))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtFreePhysicalImpl(handle: Address) -> i32 {
    trace::enter("aclrtFreePhysical").num("handle", handle).done(rt::rtFreePhysical(handle))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMapMemImpl(
    address: Address,
    size: usize,
    offset: usize,
    handle: Address,
    flags: u64,
) -> i32 {
    rt::rtMapMem(address, size, offset, handle, flags)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtUnmapMemImpl(address: Address) -> i32 {
    rt::rtUnmapMem(address)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMemRetainAllocationHandleImpl(address: Address, out: Out<Address>) -> i32 {
    rt::rtMemRetainAllocationHandle(address, out)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMemcpyImpl(target: Address, room: usize, source: Address, size: usize, kind: u32) -> i32 {
    trace::enter("aclrtMemcpy")
        .num("dst", target)
        .num("src", source)
        .num("size", size)
        .num("kind", kind)
        .done(rt::rtMemcpy(target, room as u64, source, size as u64, kind))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMemcpyAsyncImpl(
    target: Address,
    room: usize,
    source: Address,
    size: usize,
    kind: u32,
    stream: Address,
) -> i32 {
    trace::enter("aclrtMemcpyAsync")
        .num("dst", target)
        .num("src", source)
        .num("size", size)
        .num("kind", kind)
        .num("stream", stream)
        .done(rt::rtMemcpyAsync(target, room as u64, source, size as u64, kind, stream))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMemcpyAsyncWithConditionImpl(
    target: Address,
    room: usize,
    source: Address,
    size: usize,
    kind: u32,
    stream: Address,
) -> i32 {
    aclrtMemcpyAsyncImpl(target, room, source, size, kind, stream)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMemsetImpl(target: Address, room: usize, value: i32, count: usize) -> i32 {
    trace::enter("aclrtMemset").num("dst", target).num("count", count).done(rt::rtMemset(
        target,
        room as u64,
        value as u32,
        count as u64,
    ))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMemsetAsyncImpl(
    target: Address,
    room: usize,
    value: i32,
    count: usize,
    stream: Address,
) -> i32 {
    trace::enter("aclrtMemsetAsync")
        .num("dst", target)
        .num("count", count)
        .num("stream", stream)
        .done(rt::rtMemsetAsync(target, room as u64, value as u32, count as u64, stream))
}

// ---- streams and events

#[unsafe(no_mangle)]
extern "C" fn aclrtCreateStreamWithConfigImpl(out: Out<Address>, priority: u32, flags: u32) -> i32 {
    rt::rtStreamCreateWithFlags(out, priority as i32, flags)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtCreateStreamImpl(out: Out<Address>) -> i32 {
    rt::rtStreamCreateWithFlags(out, 0, 0)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtDestroyStreamImpl(stream: Address) -> i32 {
    rt::rtStreamDestroy(stream)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtDestroyStreamForceImpl(stream: Address) -> i32 {
    rt::rtStreamDestroy(stream)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtStreamGetIdImpl(stream: Address, id: Out<i32>) -> i32 {
    rt::rtGetStreamId(stream, id)
}

/// Status 0: complete; 1: not yet.
#[unsafe(no_mangle)]
extern "C" fn aclrtStreamQueryImpl(stream: Address, status: Out<i32>) -> i32 {
    written(put(status, i32::from(rt::rtStreamQuery(stream) != rt::OK)))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtSynchronizeStreamImpl(stream: Address) -> i32 {
    trace::enter("aclrtSynchronizeStream").num("stream", stream).done(rt::rtStreamSynchronize(stream))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtSynchronizeStreamWithTimeoutImpl(stream: Address, milliseconds: i32) -> i32 {
    trace::enter("aclrtSynchronizeStreamWithTimeout")
        .num("stream", stream)
        .done(rt::rtStreamSynchronizeWithTimeout(stream, milliseconds))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtSynchronizeDeviceImpl() -> i32 {
    trace::enter("aclrtSynchronizeDevice").done(rt::rtDeviceSynchronize())
}

#[unsafe(no_mangle)]
extern "C" fn aclrtSynchronizeDeviceWithTimeoutImpl(_milliseconds: i32) -> i32 {
    trace::enter("aclrtSynchronizeDeviceWithTimeout").done(rt::rtDeviceSynchronize())
}

#[unsafe(no_mangle)]
extern "C" fn aclrtCreateEventExWithFlagImpl(out: Out<Address>, flags: u32) -> i32 {
    rt::rtEventCreateExWithFlag(out, flags)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtCreateEventWithFlagImpl(out: Out<Address>, flags: u32) -> i32 {
    rt::rtEventCreateExWithFlag(out, flags)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtCreateEventImpl(out: Out<Address>) -> i32 {
    rt::rtEventCreateExWithFlag(out, 0)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtDestroyEventImpl(event: Address) -> i32 {
    rt::rtEventDestroy(event)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtRecordEventImpl(event: Address, stream: Address) -> i32 {
    let call = trace::enter("aclrtRecordEvent").num("event", event).num("stream", stream);
    call.done(rt::rtEventRecord(event, stream))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtResetEventImpl(event: Address, stream: Address) -> i32 {
    rt::rtEventReset(event, stream)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtStreamWaitEventImpl(stream: Address, event: Address) -> i32 {
    let call = trace::enter("aclrtStreamWaitEvent").num("event", event).num("stream", stream);
    call.done(rt::rtStreamWaitEvent(stream, event))
}

#[unsafe(no_mangle)]
extern "C" fn aclrtSynchronizeEventImpl(event: Address) -> i32 {
    trace::enter("aclrtSynchronizeEvent").num("event", event).done(rt::rtEventSynchronize(event))
}

/// Status 1: what was recorded is complete; 0: not yet.
#[unsafe(no_mangle)]
extern "C" fn aclrtQueryEventStatusImpl(event: Address, status: Out<i32>) -> i32 {
    rt::rtEventQueryStatus(event, status)
}

/// Status 0: the waits are over; 1: not yet.
#[unsafe(no_mangle)]
extern "C" fn aclrtQueryEventWaitStatusImpl(event: Address, status: Out<i32>) -> i32 {
    let mut complete = MaybeUninit::new(0);
    let error = rt::rtEventQueryStatus(event, Some(&mut complete));
    // SAFETY: initialised above.
    let complete = unsafe { complete.assume_init() } != 0;
    if put(status, i32::from(!complete)) { error } else { INVALID_PARAM }
}

#[unsafe(no_mangle)]
extern "C" fn aclrtEventElapsedTimeImpl(milliseconds: Out<f32>, start: Address, end: Address) -> i32 {
    rt::rtEventElapsedTime(milliseconds, start, end)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtEventGetTimestampImpl(event: Address, time_us: Out<u64>) -> i32 {
    rt::rtEventGetTimeStamp(time_us, event)
}

/// Runs the callback at once: what is submitted took effect at once, too.
#[unsafe(no_mangle)]
extern "C" fn aclrtLaunchCallbackImpl(
    callback: Option<extern "C" fn(Address)>,
    data: Address,
    _blocking: i32,
    _stream: Address,
) -> i32 {
    let Some(callback) = callback else { return INVALID_PARAM };
    callback(data);
    OK
}

#[unsafe(no_mangle)]
extern "C" fn aclrtLaunchHostFuncImpl(
    stream: Address,
    callback: Option<extern "C" fn(Address)>,
    data: Address,
) -> i32 {
    aclrtLaunchCallbackImpl(callback, data, 0, stream)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtProcessReportImpl(milliseconds: i32) -> i32 {
    const LONGEST_MS: u64 = 100;
    let wait = u64::try_from(milliseconds).map_or(LONGEST_MS, |ms| ms.min(LONGEST_MS));
    std::thread::sleep(std::time::Duration::from_millis(wait));
    OK
}

// ---- kernels

#[unsafe(no_mangle)]
extern "C" fn aclrtBinaryLoadFromDataImpl(
    data: Address,
    length: usize,
    _options: Address,
    out: Out<Address>,
) -> i32 {
    rt::rtBinaryLoadFromData(data, length as u64, out)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtBinaryGetFunctionImpl(binary: Address, name: Text, out: Out<Address>) -> i32 {
    rt::rtBinaryGetFunctionByName(binary, name, out)
}

#[unsafe(no_mangle)]
extern "C" fn aclrtLaunchKernelWithHostArgsImpl(
    function: Address,
    blocks: u32,
    stream: Address,
    config: Address,
    args: Address,
    args_size: usize,
    placeholders: Address,
    placeholder_count: usize,
) -> i32 {
    let call = trace::enter("aclrtLaunchKernelWithHostArgs").num("function", function).num("blocks", blocks);
    let error = rt::rtsLaunchKernelWithHostArgs(
        function,
        blocks,
        stream,
        config,
        args,
        args_size as u32,
        placeholders,
        placeholder_count as u32,
    );
    call.num("stream", stream).num("args", args).num("args_size", args_size).done(error)
}

// ---- descriptors of the operator interface before aclnn

const MAX_DIMS: usize = 32;

struct TensorDesc {
    data_type: i32,
    format: i32,
    dims: Vec<i64>,
}

#[unsafe(no_mangle)]
extern "C" fn aclCreateTensorDescImpl(
    data_type: i32,
    count: i32,
    dims: *const i64,
    format: i32,
) -> Option<Box<TensorDesc>> {
    let count = usize::try_from(count).ok().filter(|&count| count <= MAX_DIMS)?;
    // SAFETY: the C API asks its caller for `count` dimensions, or null when there are none.
    let dims = if dims.is_null() { &[] } else { unsafe { std::slice::from_raw_parts(dims, count) } };
    Some(Box::new(TensorDesc { data_type, format, dims: dims.to_vec() }))
}

#[unsafe(no_mangle)]
extern "C" fn aclDestroyTensorDescImpl(desc: Option<Box<TensorDesc>>) {
    drop(desc);
}

#[unsafe(no_mangle)]
extern "C" fn aclGetTensorDescTypeImpl(desc: Option<&TensorDesc>) -> i32 {
    desc.map_or(-1, |desc| desc.data_type)
}

#[unsafe(no_mangle)]
extern "C" fn aclGetTensorDescFormatImpl(desc: Option<&TensorDesc>) -> i32 {
    desc.map_or(-1, |desc| desc.format)
}

#[unsafe(no_mangle)]
extern "C" fn aclGetTensorDescNumDimsImpl(desc: Option<&TensorDesc>) -> usize {
    desc.map_or(0, |desc| desc.dims.len())
}

#[unsafe(no_mangle)]
extern "C" fn aclGetTensorDescDimV2Impl(desc: Option<&TensorDesc>, index: usize, dim: Out<i64>) -> i32 {
    let value = desc.and_then(|desc| desc.dims.get(index));
    value.map_or(INVALID_PARAM, |&value| written(put(dim, value)))
}

/// An opaque (address, size) pair.
struct DataBuffer {
    _data: Address,
    _size: usize,
}

#[unsafe(no_mangle)]
extern "C" fn aclCreateDataBufferImpl(data: Address, size: usize) -> Box<DataBuffer> {
    Box::new(DataBuffer { _data: data, _size: size })
}

#[unsafe(no_mangle)]
extern "C" fn aclDestroyDataBufferImpl(buffer: Option<Box<DataBuffer>>) -> i32 {
    drop(buffer);
    OK
}
