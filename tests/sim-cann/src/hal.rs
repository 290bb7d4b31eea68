//! The driver's header: what libruntime.so calls in libascend_hal.so.

use crate::ffi::{Address, Out};

pub const OK: i32 = 0;
pub const INVALID_VALUE: i32 = 3;
pub const OUT_OF_MEMORY: i32 = 6;

/// The flag word of `halMemAlloc`: device in bits 0-9, virtual kind in 10-13, physical kind in 14-16, page
/// in 17-18, owner module in 56-63.
pub mod flag {
    /// Virtual kinds.
    pub const SVM: u64 = 0;
    pub const DEVICE: u64 = 1;
    pub const HOST: u64 = 2;

    pub const HBM: u64 = 1 << 14;
    pub const HUGE_PAGE: u64 = 1 << 17;

    pub fn device(flag: u64) -> u32 {
        (flag & 0x3ff) as u32
    }

    pub fn kind(flag: u64) -> u64 {
        flag >> 10 & 0xf
    }

    pub fn module(flag: u64) -> u64 {
        flag >> 56
    }

    /// The word for memory of virtual kind `kind` owned by `module`, without page or device.
    pub fn of(kind: u64, module: u16) -> u64 {
        kind << 10 | u64::from(module) << 56
    }
}

/// Owner modules that the simulation uses.
pub mod module {
    pub const HCCL: u16 = 3;
    pub const RUNTIME: u16 = 7;
    pub const APP: u16 = 33;
}

/// `struct drv_mem_prop`: what a physical allocation is of.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MemProp {
    /// 0 host, 1 device.
    pub side: u32,
    pub device: u32,
    pub module: u32,
    /// 0: 4 KiB, 1: 2 MiB, 2: 1 GiB.
    pub page: u32,
    /// 0 HBM, 1 DDR.
    pub memory: u32,
    pub reserved: u32,
    pub reserve: u64,
}

/// `struct MemInfo`, of memory of one type.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MemInfo {
    pub total: u64,
    pub free: u64,
    pub other: [u64; 6],
}

/// The type of `halMemGetInfo` that means HBM.
pub const MEM_INFO_HBM: u32 = 2;

/// `struct halTaskSendInfo`: tasks put into a hardware queue.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct TaskSend {
    pub kind: u32,
    pub scheduler: u32,
    pub queue: u32,
    pub timeout: u32,
    pub tasks: Address,
    pub count: u32,
    pub position: u32,
}

unsafe extern "C" {
    pub safe fn drvGetDevNum(count: Out<u32>) -> i32;
    pub safe fn halDeviceOpen(device: u32, input: Address, output: Address) -> i32;
    pub safe fn halDeviceClose(device: u32, input: Address) -> i32;
    pub safe fn halMemAlloc(out: Out<Address>, size: u64, flag: u64) -> i32;
    pub safe fn halMemFree(address: Address) -> i32;
    pub safe fn halMemGetInfo(device: u32, kind: u32, info: Out<MemInfo>) -> i32;
    pub safe fn halMemAddressReserve(
        out: Out<Address>,
        size: usize,
        align: usize,
        hint: Address,
        flag: u64,
    ) -> i32;
    pub safe fn halMemAddressFree(address: Address) -> i32;
    pub safe fn halMemCreate(out: Out<Address>, size: usize, prop: Option<&MemProp>, flag: u64) -> i32;
    pub safe fn halMemRelease(handle: Address) -> i32;
    pub safe fn halMemMap(address: Address, size: usize, offset: usize, handle: Address, flag: u64) -> i32;
    pub safe fn halMemUnmap(address: Address) -> i32;
    pub safe fn halMemRetainAllocationHandle(out: Out<Address>, address: Address) -> i32;
    pub safe fn halMemSetAccess(address: Address, size: usize, desc: Address, count: usize) -> i32;
    pub safe fn halHostRegister(source: Address, size: u64, flag: u32, device: u32, out: Out<Address>)
    -> i32;
    pub safe fn halHostUnregister(source: Address, device: u32) -> i32;
    pub safe fn drvMemcpy(target: Address, capacity: usize, source: Address, size: usize) -> i32;
    pub safe fn drvMemsetD8(target: Address, capacity: usize, value: u8, count: usize) -> i32;
    pub safe fn halSqTaskSend(device: u32, info: Option<&TaskSend>) -> i32;
}
