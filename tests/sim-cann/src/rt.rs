//! The runtime's header: what the ACL, HCCL and operator libraries call in libruntime.so.

use crate::ffi::{Address, Out, Text};
use crate::hal::MemProp;

pub const OK: i32 = 0;
pub const INVALID_PARAM: i32 = 107000;
pub const INVALID_DEVICE: i32 = 107001;
pub const CONTEXT_NULL: i32 = 107002;
pub const OUT_OF_MEMORY: i32 = 207001;
pub const DRIVER_ERROR: i32 = 507899;

/// The policy part of `rtMemType_t` (bits 0-9 are the memory kind).
pub mod policy {
    pub const HUGE_FIRST: u32 = 1 << 10;
    pub const HUGE_ONLY: u32 = 1 << 11;
    pub const NORMAL_ONLY: u32 = 1 << 12;
}

/// A kernel as `funcHandle` points to it. Nothing but the place of its name is public knowledge: a
/// `std::string` at offset 24, whose first word is the address of the characters.
#[repr(C)]
#[derive(Debug)]
pub struct Kernel {
    pub program: Address,
    pub kind: u32,
    pub mix: u32,
    pub stub: Address,
    pub name: *const u8,
    pub name_length: usize,
    pub name_buffer: [u8; 16],
}

const _: () = assert!(std::mem::offset_of!(Kernel, name) == 24);

/// `rtArgsEx_t`, the part that counts: where a launch finds its arguments.
#[repr(C)]
#[derive(Debug)]
pub struct KernelArgs {
    pub args: Address,
    pub host_inputs: Address,
    pub size: u32,
    pub rest: [u32; 5],
}

unsafe extern "C" {
    pub safe fn rtGetDeviceCount(count: Out<i32>) -> i32;
    pub safe fn rtSetDevice(device: i32) -> i32;
    pub safe fn rtGetDevice(device: Out<i32>) -> i32;
    pub safe fn rtDeviceReset(device: i32) -> i32;
    pub safe fn rtDeviceResetForce(device: i32) -> i32;
    pub safe fn rtDeviceSynchronize() -> i32;
    pub safe fn rtGetPrimaryCtxState(device: i32, flags: Out<u32>, active: Out<i32>) -> i32;
    pub safe fn rtCtxCreate(out: Out<Address>, flags: u32, device: i32) -> i32;
    pub safe fn rtCtxDestroy(context: Address) -> i32;
    pub safe fn rtCtxSetCurrent(context: Address) -> i32;
    pub safe fn rtCtxGetCurrent(out: Out<Address>) -> i32;

    pub safe fn rtMalloc(out: Out<Address>, size: u64, kind: u32, module: u16) -> i32;
    pub safe fn rtMallocCached(out: Out<Address>, size: u64, kind: u32, module: u16) -> i32;
    pub safe fn rtFree(address: Address) -> i32;
    pub safe fn rtFreeWithDevSync(address: Address) -> i32;
    pub safe fn rtMallocHost(out: Out<Address>, size: u64, module: u16) -> i32;
    pub safe fn rtFreeHost(address: Address) -> i32;
    pub safe fn rtMemAllocManaged(out: Out<Address>, size: u64, flag: u32, module: u16) -> i32;
    pub safe fn rtReserveMemAddress(
        out: Out<Address>,
        size: usize,
        align: usize,
        hint: Address,
        flags: u64,
    ) -> i32;
    pub safe fn rtReleaseMemAddress(address: Address) -> i32;
    pub safe fn rtMallocPhysical(out: Out<Address>, size: usize, prop: Option<&MemProp>, flags: u64) -> i32;
    pub safe fn rtFreePhysical(handle: Address) -> i32;
    pub safe fn rtMapMem(address: Address, size: usize, offset: usize, handle: Address, flags: u64) -> i32;
    pub safe fn rtUnmapMem(address: Address) -> i32;
    pub safe fn rtMemRetainAllocationHandle(address: Address, out: Out<Address>) -> i32;
    pub safe fn rtMemGetInfoEx(kind: u32, free: Out<usize>, total: Out<usize>) -> i32;
    pub safe fn rtHostRegister(source: Address, size: u64, kind: u32, out: Out<Address>) -> i32;
    pub safe fn rtHostUnregister(source: Address) -> i32;
    pub safe fn rtMemcpy(target: Address, capacity: u64, source: Address, size: u64, kind: u32) -> i32;
    pub safe fn rtMemcpyAsync(
        target: Address,
        capacity: u64,
        source: Address,
        size: u64,
        kind: u32,
        stream: Address,
    ) -> i32;
    pub safe fn rtMemset(target: Address, capacity: u64, value: u32, count: u64) -> i32;
    pub safe fn rtMemsetAsync(target: Address, capacity: u64, value: u32, count: u64, stream: Address)
    -> i32;

    pub safe fn rtStreamCreateWithFlags(out: Out<Address>, priority: i32, flags: u32) -> i32;
    pub safe fn rtStreamDestroy(stream: Address) -> i32;
    pub safe fn rtStreamQuery(stream: Address) -> i32;
    pub safe fn rtStreamSynchronize(stream: Address) -> i32;
    pub safe fn rtStreamSynchronizeWithTimeout(stream: Address, milliseconds: i32) -> i32;
    pub safe fn rtGetStreamId(stream: Address, id: Out<i32>) -> i32;
    pub safe fn rtEventCreateExWithFlag(out: Out<Address>, flags: u32) -> i32;
    pub safe fn rtEventDestroy(event: Address) -> i32;
    pub safe fn rtEventRecord(event: Address, stream: Address) -> i32;
    pub safe fn rtEventReset(event: Address, stream: Address) -> i32;
    pub safe fn rtEventQueryStatus(event: Address, status: Out<i32>) -> i32;
    pub safe fn rtEventSynchronize(event: Address) -> i32;
    pub safe fn rtStreamWaitEvent(stream: Address, event: Address) -> i32;
    pub safe fn rtEventGetTimeStamp(time_us: Out<u64>, event: Address) -> i32;
    pub safe fn rtEventElapsedTime(milliseconds: Out<f32>, start: Address, end: Address) -> i32;

    pub safe fn rtBinaryGetFunctionByName(binary: Address, name: Text, out: Out<Address>) -> i32;
    pub safe fn rtBinaryLoadFromData(data: Address, length: u64, out: Out<Address>) -> i32;
    pub safe fn rtFunctionRegister(
        binary: Address,
        stub: Address,
        name: Text,
        info: Address,
        mode: u32,
    ) -> i32;
    pub safe fn rtsLaunchKernelWithHostArgs(
        function: Address,
        blocks: u32,
        stream: Address,
        config: Address,
        args: Address,
        args_size: u32,
        placeholders: Address,
        placeholder_count: u32,
    ) -> i32;
    pub safe fn rtKernelLaunch(
        stub: Address,
        blocks: u32,
        args: Address,
        args_size: u32,
        descriptor: Address,
        stream: Address,
    ) -> i32;
    pub safe fn rtKernelLaunchWithHandleV2(
        handle: Address,
        tiling_key: u64,
        blocks: u32,
        args: Option<&KernelArgs>,
        descriptor: Address,
        stream: Address,
        config: Address,
    ) -> i32;
}
