//! The part of CANN's C API that the workload uses.

use std::ffi::{CStr, c_char};
use std::marker::PhantomData;

use anyhow::bail;

/// An address or opaque handle.
pub type Address = usize;

/// `aclError` of an allocation that does not fit.
pub const OUT_OF_MEMORY: i32 = 207001;

/// `aclrtPhysicalMemProp`.
#[repr(C)]
pub struct PhysicalProp {
    pub handle_kind: u32,
    pub allocation_kind: u32,
    pub attribute: u32,
    pub device: u32,
    /// 1: device.
    pub location_kind: u32,
    pub reserved: u32,
    pub reserve: u64,
}

/// `rtArgsEx_t`.
#[repr(C)]
pub struct KernelArgs {
    pub args: Address,
    pub host_inputs: Address,
    pub size: u32,
    pub rest: [u32; 5],
}

/// A NUL-terminated text for C.
#[repr(transparent)]
pub struct Text<'a>(*const c_char, PhantomData<&'a CStr>);

impl<'a> From<&'a CStr> for Text<'a> {
    fn from(text: &'a CStr) -> Self {
        Self(text.as_ptr(), PhantomData)
    }
}

// In libascendcl.so or libacl_rt.so, libruntime.so and libms_tools_ext.so: `cargo xtask sim` links them.
unsafe extern "C" {
    pub safe fn aclInit(config: Address) -> i32;
    pub safe fn aclFinalize() -> i32;
    pub safe fn aclrtSetDevice(device: i32) -> i32;
    pub safe fn aclrtResetDevice(device: i32) -> i32;
    pub safe fn aclrtCreateContext(out: &mut Address, device: i32) -> i32;
    pub safe fn aclrtSetCurrentContext(context: Address) -> i32;
    pub safe fn aclrtFree(address: Address) -> i32;
    pub safe fn aclrtFreeHost(address: Address) -> i32;
    pub safe fn aclrtMalloc(out: &mut Address, size: usize, policy: u32) -> i32;
    pub safe fn aclrtMallocHost(out: &mut Address, size: usize) -> i32;
    pub safe fn aclrtHostRegister(source: Address, size: u64, kind: u32, out: &mut Address) -> i32;
    pub safe fn aclrtHostUnregister(source: Address) -> i32;
    pub safe fn aclrtReserveMemAddress(
        out: &mut Address,
        size: usize,
        align: usize,
        hint: Address,
        flags: u64,
    ) -> i32;
    pub safe fn aclrtReleaseMemAddress(address: Address) -> i32;
    pub safe fn aclrtMallocPhysical(out: &mut Address, size: usize, prop: &PhysicalProp, flags: u64) -> i32;
    pub safe fn aclrtFreePhysical(handle: Address) -> i32;
    pub safe fn aclrtMapMem(address: Address, size: usize, offset: usize, handle: Address, flags: u64)
    -> i32;
    pub safe fn aclrtUnmapMem(address: Address) -> i32;
    pub safe fn aclrtMemRetainAllocationHandle(address: Address, out: &mut Address) -> i32;
    pub safe fn aclrtMemset(address: Address, room: usize, value: i32, count: usize) -> i32;
    pub safe fn aclrtMemcpyAsync(
        target: Address,
        room: usize,
        source: Address,
        size: usize,
        kind: u32,
        stream: Address,
    ) -> i32;
    pub safe fn aclrtSynchronizeStream(stream: Address) -> i32;
    pub safe fn aclrtBinaryLoadFromData(
        data: Address,
        length: usize,
        options: Address,
        out: &mut Address,
    ) -> i32;
    pub safe fn aclrtBinaryGetFunction(binary: Address, name: Text<'_>, out: &mut Address) -> i32;
    pub safe fn aclrtLaunchKernelWithHostArgs(
        function: Address,
        blocks: u32,
        stream: Address,
        config: Address,
        args: Address,
        args_size: usize,
        placeholders: Address,
        placeholder_count: usize,
    ) -> i32;
    pub safe fn rtFree(address: Address) -> i32;
    pub safe fn rtMalloc(out: &mut Address, size: u64, kind: u32, module: u16) -> i32;
    pub safe fn rtFunctionRegister(
        binary: Address,
        stub: Address,
        name: Text<'_>,
        info: Address,
        mode: u32,
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
        args: &KernelArgs,
        descriptor: Address,
        stream: Address,
        config: Address,
    ) -> i32;
    pub safe fn mstxMarkA(message: Text<'_>, stream: Address);
    pub safe fn mstxRangeStartA(message: Text<'_>, stream: Address) -> u64;
    pub safe fn mstxRangeEnd(id: u64);
}

/// An error for a `code` other than 0.
pub fn check(code: i32, function: &str) -> anyhow::Result<()> {
    if code != 0 {
        bail!("{function} answered {code}");
    }
    Ok(())
}

/// `aclrtMalloc` with huge pages first.
pub fn allocate(size: usize) -> anyhow::Result<Address> {
    let mut address = 0;
    check(aclrtMalloc(&mut address, size, 0), "aclrtMalloc")?;
    Ok(address)
}

pub fn free(address: Address) -> anyhow::Result<()> {
    check(aclrtFree(address), "aclrtFree")
}
