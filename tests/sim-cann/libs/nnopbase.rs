//! libnnopbase.so: tensor descriptors, and the way of every operator from phase 2 to its kernel launch.

#![allow(non_snake_case)]

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::sync::Mutex;

use sim_cann::acl::{self, INVALID_PARAM, OK};
use sim_cann::ffi::{Address, Out, Text, put, text};
use sim_cann::op::{DfxGuard, DfxId, Executor, Launch};
use sim_cann::rt::{self, KernelArgs};
use sim_cann::tensor::{Element, IntArray, MAX_DIMS, Scalar, ScalarList, Tensor, TensorList};
use sim_cann::{lock, now_ns, trace};

// ---- descriptors

/// # Safety
/// `data` is null or the address of `count` readable values.
unsafe fn slice<'a, T>(data: *const T, count: u64) -> &'a [T] {
    if data.is_null() {
        return &[];
    }
    // SAFETY: promised by the caller.
    unsafe { std::slice::from_raw_parts(data, count as usize) }
}

#[unsafe(no_mangle)]
extern "C" fn aclCreateTensor(
    dims: *const i64,
    rank: u64,
    data_type: i32,
    strides: *const i64,
    offset: i64,
    _format: i32,
    _storage_dims: *const i64,
    _storage_rank: u64,
    data: Address,
) -> Option<Box<Tensor>> {
    if rank > MAX_DIMS as u64 {
        return None;
    }
    // SAFETY: the C API asks its caller for `rank` sizes and, if any, as many strides.
    let (sizes, steps) = unsafe { (slice(dims, rank), slice(strides, rank)) };
    let element = Element::of(data_type);
    let first = data.wrapping_add_signed(offset as isize * element.size() as isize);
    let mut tensor =
        Tensor { data: first, element, rank: sizes.len(), dims: [1; MAX_DIMS], strides: [0; MAX_DIMS] };
    let mut contiguous = 1;
    for (axis, &size) in sizes.iter().enumerate().rev() {
        tensor.dims[axis] = size.max(0) as usize;
        tensor.strides[axis] = steps.get(axis).map_or(contiguous, |&step| step as isize);
        contiguous *= size as isize;
    }
    trace::enter("aclCreateTensor").num("ptr", data).num("rank", rank).num("type", data_type).done(OK);
    Some(Box::new(tensor))
}

#[unsafe(no_mangle)]
extern "C" fn aclDestroyTensor(tensor: Option<Box<Tensor>>) -> i32 {
    drop(tensor);
    OK
}

#[unsafe(no_mangle)]
extern "C" fn aclCreateScalar(value: Address, data_type: i32) -> Option<Box<Scalar>> {
    if value == 0 {
        return None;
    }
    // SAFETY: the C API asks its caller for the address of a value of that type.
    Some(Box::new(Scalar(unsafe { Element::of(data_type).load(value) })))
}

#[unsafe(no_mangle)]
extern "C" fn aclDestroyScalar(scalar: Option<Box<Scalar>>) -> i32 {
    drop(scalar);
    OK
}

#[unsafe(no_mangle)]
extern "C" fn aclCreateIntArray(values: *const i64, count: u64) -> Box<IntArray> {
    // SAFETY: the C API asks its caller for `count` values.
    Box::new(IntArray(unsafe { slice(values, count) }.to_vec()))
}

#[unsafe(no_mangle)]
extern "C" fn aclDestroyIntArray(array: Option<Box<IntArray>>) -> i32 {
    drop(array);
    OK
}

/// Float and bool arrays only occur with operators that compute nothing here: they keep their length.
#[unsafe(no_mangle)]
extern "C" fn aclCreateFloatArray(_values: Address, count: u64) -> Box<u64> {
    Box::new(count)
}

#[unsafe(no_mangle)]
extern "C" fn aclDestroyFloatArray(array: Option<Box<u64>>) -> i32 {
    drop(array);
    OK
}

#[unsafe(no_mangle)]
extern "C" fn aclCreateBoolArray(_values: Address, count: u64) -> Box<u64> {
    Box::new(count)
}

#[unsafe(no_mangle)]
extern "C" fn aclDestroyBoolArray(array: Option<Box<u64>>) -> i32 {
    drop(array);
    OK
}

#[unsafe(no_mangle)]
extern "C" fn aclCreateTensorList(tensors: *const Option<Box<Tensor>>, count: u64) -> Box<TensorList> {
    // SAFETY: the C API asks its caller for `count` tensors, which the list takes over.
    let tensors = unsafe { slice(tensors, count) }.iter().map(|tensor| unsafe { std::ptr::read(tensor) });
    Box::new(TensorList(tensors.collect()))
}

#[unsafe(no_mangle)]
extern "C" fn aclDestroyTensorList(list: Option<Box<TensorList>>) -> i32 {
    drop(list);
    OK
}

#[unsafe(no_mangle)]
extern "C" fn aclCreateScalarList(scalars: *const Option<Box<Scalar>>, count: u64) -> Box<ScalarList> {
    // SAFETY: the C API asks its caller for `count` scalars, which the list takes over.
    let scalars = unsafe { slice(scalars, count) }.iter().map(|scalar| unsafe { std::ptr::read(scalar) });
    Box::new(ScalarList(scalars.collect()))
}

#[unsafe(no_mangle)]
extern "C" fn aclDestroyScalarList(list: Option<Box<ScalarList>>) -> i32 {
    drop(list);
    OK
}

// ---- kernels

/// What a kernel name is registered as: `funcHandle`, program or host stub.
struct Kernels {
    binary: Address,
    handles: HashMap<&'static str, Address>,
}

static KERNELS: Mutex<Option<Kernels>> = Mutex::new(None);

/// A name as the compiler gives: operator, hash of the build, variant.
fn kernel_name(operator: &str) -> &'static CStr {
    let operator = operator.strip_prefix("aclnn").unwrap_or(operator);
    let hash = operator.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let name = CString::new(format!("{operator}_{hash:016x}_mix_aic_0")).unwrap_or_default();
    Box::leak(name.into_boxed_c_str())
}

fn handle_of(operator: &'static str, launch: Launch) -> Address {
    let mut kernels = lock(&KERNELS);
    let kernels = kernels.get_or_insert_with(|| {
        let mut binary = std::mem::MaybeUninit::new(0);
        acl::aclrtBinaryLoadFromData(0, 0, 0, Some(&mut binary));
        // SAFETY: initialised above.
        Kernels { binary: unsafe { binary.assume_init() }, handles: HashMap::new() }
    });
    let binary = kernels.binary;
    *kernels.handles.entry(operator).or_insert_with(|| {
        let name = kernel_name(operator);
        match launch {
            Launch::HostArgs => {
                let mut function = std::mem::MaybeUninit::new(0);
                acl::aclrtBinaryGetFunction(binary, Text::of(name), Some(&mut function));
                // SAFETY: initialised above.
                unsafe { function.assume_init() }
            }
            Launch::Handle => binary,
            Launch::Stub => {
                let stub = aclrtlaunch_InplaceFill as *const () as Address;
                rt::rtFunctionRegister(binary, stub, Text::of(name), 0, 0);
                stub
            }
        }
    })
}

/// The host stub of the kernel that is launched by `rtKernelLaunch`: its address stands for the kernel, and
/// its symbol carries the name.
#[unsafe(no_mangle)]
extern "C" fn aclrtlaunch_InplaceFill() {}

/// Launches the kernel of `executor`, then lets it take effect.
fn launch(executor: Executor, workspace: Address, stream: Address) -> i32 {
    const BLOCKS: u32 = 24;
    let handle = handle_of(executor.name, executor.launch);
    let mut args = executor.tensors;
    args.push(workspace);
    let (block, size) = (args.as_ptr() as Address, args.len() * size_of::<Address>());
    let error = match executor.launch {
        Launch::HostArgs => acl::aclrtLaunchKernelWithHostArgs(handle, BLOCKS, stream, 0, block, size, 0, 0),
        Launch::Handle => {
            let args = KernelArgs { args: block, host_inputs: 0, size: size as u32, rest: [0; 5] };
            rt::rtKernelLaunchWithHandleV2(handle, 1, BLOCKS, Some(&args), 0, stream, 0)
        }
        Launch::Stub => rt::rtKernelLaunch(handle, BLOCKS, block, size as u32, 0, stream),
    };
    (executor.compute)();
    error
}

// ---- composite operators

#[unsafe(export_name = "_Z19InitL2Phase1ContextPKcPP13aclOpExecutor")]
extern "C" fn init_phase1(name: Text, _executor: Address) {
    trace::enter("InitL2Phase1Context").text("name", &text(name)).done(OK);
}

#[unsafe(export_name = "_Z19InitL2Phase2ContextPKcP13aclOpExecutor")]
extern "C" fn init_phase2(name: Text, executor: Address) {
    trace::enter("InitL2Phase2Context").text("name", &text(name)).num("executor", executor).done(OK);
}

#[unsafe(export_name = "_ZN2op10OpDfxGuardC1EPKciNS_7OpLevelES2_")]
extern "C" fn dfx_guard_begin(guard: Option<&mut DfxGuard>, _file: Text, _line: i32, level: u32, name: Text) {
    if let Some(guard) = guard {
        guard[0] = u64::from(level);
    }
    trace::enter("OpDfxGuard").text("name", &text(name)).num("level", level).done(OK);
}

#[unsafe(export_name = "_ZN2op10OpDfxGuardD1Ev")]
extern "C" fn dfx_guard_end(guard: Option<&mut DfxGuard>) {
    if let Some(guard) = guard {
        guard[0] = 0;
    }
}

#[unsafe(export_name = "_Z19CommonOpExecutorRunPvmP13aclOpExecutorS_")]
extern "C" fn run_composite(
    workspace: Address,
    size: u64,
    executor: Option<Box<Executor>>,
    stream: Address,
) -> i32 {
    let call = trace::enter("CommonOpExecutorRun").num("workspace", workspace).num("size", size);
    let Some(executor) = executor else { return call.done(INVALID_PARAM) };
    let call = call.text("name", executor.name).num("stream", stream).list("tensors", &executor.tensors);
    call.done(launch(*executor, workspace, stream))
}

// ---- individual operators

#[unsafe(no_mangle)]
extern "C" fn NnopbaseMsprofSysTime() -> u64 {
    now_ns()
}

#[unsafe(no_mangle)]
extern "C" fn NnopbaseRunForWorkspace(_executor: Address, size: Out<u64>) -> i32 {
    if put(size, 0) { OK } else { INVALID_PARAM }
}

#[unsafe(no_mangle)]
extern "C" fn NnopbaseRunWithWorkspace(
    executor: Option<Box<Executor>>,
    stream: Address,
    workspace: Address,
    size: u64,
) -> i32 {
    let call = trace::enter("NnopbaseRunWithWorkspace").num("workspace", workspace).num("size", size);
    let Some(executor) = executor else { return call.done(INVALID_PARAM) };
    let call = call.text("name", executor.name).num("stream", stream).list("tensors", &executor.tensors);
    call.done(launch(*executor, workspace, stream))
}

#[unsafe(no_mangle)]
extern "C" fn NnopbaseReportApiInfo(begin: u64, id: Option<&DfxId>) {
    let name = id.map(|id| text(id.name)).unwrap_or_default();
    trace::enter("NnopbaseReportApiInfo").text("name", &name).num("begin", begin).done(OK);
}
