//! The ACL runtime's header: what the operator libraries and HCCL call in libascendcl.so or libacl_rt.so.

use crate::ffi::{Address, Out, Text};

pub const OK: i32 = 0;
pub const INVALID_PARAM: i32 = 100000;
pub const REPEAT_INITIALIZE: i32 = 100002;

/// `aclrtMemMallocPolicy`: huge pages where they fit, else normal ones.
pub const HUGE_FIRST: u32 = 0;

unsafe extern "C" {
    pub safe fn aclrtMallocAlign32(out: Out<Address>, size: usize, policy: u32) -> i32;
    pub safe fn aclrtFree(address: Address) -> i32;
    pub safe fn aclrtMemcpyAsync(
        target: Address,
        capacity: usize,
        source: Address,
        size: usize,
        kind: u32,
        stream: Address,
    ) -> i32;
    pub safe fn aclrtBinaryLoadFromData(
        data: Address,
        length: usize,
        options: Address,
        out: Out<Address>,
    ) -> i32;
    pub safe fn aclrtBinaryGetFunction(binary: Address, name: Text, out: Out<Address>) -> i32;
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
}
