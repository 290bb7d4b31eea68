//! Registers of the probed thread, read from the program's context by plain loads (no helper call).

use core::ffi::c_void;

use memscope_ebpf::ARGS;
#[cfg(doc)]
use memscope_ebpf::NativeHead;

#[cfg(bpf_target_arch = "x86_64")]
use crate::user::read_u64;

/// Integer arguments that are passed in registers, as far as both machines have them.
const IN_REGISTERS: usize = 6;

/// The context of a uprobe program: `struct pt_regs` (x86_64) or `struct user_pt_regs` (aarch64).
#[derive(Clone, Copy)]
pub struct Regs(*const u64);

#[cfg(bpf_target_arch = "x86_64")]
mod layout {
    /// Indices of rdi, rsi, rdx, rcx, r8, r9 in `struct pt_regs`.
    pub const ARGS: [usize; super::IN_REGISTERS] = [14, 13, 12, 11, 9, 8];
    /// rax.
    pub const RET: usize = 10;
    /// rsp.
    pub const SP: usize = 19;
    /// rip.
    pub const IP: usize = 16;
    /// rbx, rbp, r12, r13, r14, r15: what calls preserve.
    pub const SAVED: [usize; 6] = [5, 4, 3, 2, 1, 0];
    /// Arguments in registers; the others follow the return address on the stack.
    pub const REGISTER_ARGS: usize = 6;
    pub const STACK_ARGS: u64 = 8;
}

#[cfg(bpf_target_arch = "aarch64")]
mod layout {
    pub const ARGS: [usize; super::IN_REGISTERS] = [0, 1, 2, 3, 4, 5];
    pub const RET: usize = 0;
    pub const SP: usize = 31;
    /// pc.
    pub const IP: usize = 32;
    /// The link register.
    pub const LR: usize = 30;
    /// x29 and those before it.
    pub const SAVED: [usize; 6] = [29, 28, 27, 26, 25, 24];
    pub const REGISTER_ARGS: usize = 8;
    pub const STACK_ARGS: u64 = 0;
}

impl Regs {
    #[inline(always)]
    pub fn new(ctx: *mut c_void) -> Self {
        Self(ctx.cast_const().cast())
    }

    #[inline(always)]
    pub fn arg<const N: usize>(self) -> u64 {
        // SAFETY: the context is a pt_regs of the target architecture; the verifier checks the access.
        unsafe { *self.0.add(layout::ARGS[N]) }
    }

    /// The arguments that records carry.
    #[inline(always)]
    pub fn first_args(self) -> [u64; ARGS] {
        [self.arg::<0>(), self.arg::<1>(), self.arg::<2>(), self.arg::<3>()]
    }

    /// All arguments in registers.
    ///
    /// Loaded one by one, whichever is wanted: a load from "context plus something" is refused by the verifier,
    /// and that is what a choice between loads is compiled to.
    #[inline(always)]
    fn args(self) -> [u64; IN_REGISTERS] {
        let load = |n: usize| {
            // SAFETY: as in `arg`.
            unsafe { self.0.add(layout::ARGS[n]).read_volatile() }
        };
        [load(0), load(1), load(2), load(3), load(4), load(5)]
    }

    /// The argument whose number is known at run time only.
    #[inline(always)]
    pub fn arg_at(self, n: u8) -> u64 {
        choose(self.args(), n)
    }

    /// The address of an argument that has no register.
    #[inline(always)]
    pub fn stack_arg<const N: usize>(self) -> u64 {
        const { assert!(N >= layout::REGISTER_ARGS) };
        self.sp().wrapping_add(layout::STACK_ARGS + 8 * (N - layout::REGISTER_ARGS) as u64)
    }

    #[inline(always)]
    pub fn sp(self) -> u64 {
        // SAFETY: as in `arg`.
        unsafe { *self.0.add(layout::SP) }
    }

    #[inline(always)]
    pub fn ip(self) -> u64 {
        // SAFETY: as in `arg`.
        unsafe { *self.0.add(layout::IP) }
    }

    /// The registers that calls preserve, as in [`NativeHead::saved`].
    #[inline(always)]
    pub fn saved(self) -> [u64; 6] {
        let load = |n: usize| {
            // SAFETY: as in `arg`.
            unsafe { self.0.add(layout::SAVED[n]).read_volatile() }
        };
        [load(0), load(1), load(2), load(3), load(4), load(5)]
    }

    /// At the entry of a function: where it returns to.
    #[cfg(bpf_target_arch = "x86_64")]
    #[inline(always)]
    pub fn return_address(self) -> Option<u64> {
        read_u64(self.sp())
    }

    #[cfg(bpf_target_arch = "aarch64")]
    #[inline(always)]
    pub fn return_address(self) -> Option<u64> {
        // SAFETY: as in `arg`.
        Some(unsafe { *self.0.add(layout::LR) })
    }

    /// At the entry of a function: the stack pointer when it has returned.
    #[inline(always)]
    pub fn sp_after_return(self) -> u64 {
        self.sp().wrapping_add(layout::STACK_ARGS)
    }

    #[inline(always)]
    pub fn ret(self) -> u64 {
        // SAFETY: as in `arg`.
        unsafe { *self.0.add(layout::RET) }
    }
}

/// One of the arguments (the last, for a number beyond), by comparing: the stack of a BPF program has no computed
/// addresses before 5.12.
#[inline(always)]
pub fn choose<const N: usize>(args: [u64; N], n: u8) -> u64 {
    let mut chosen = args[N - 1];
    for (i, arg) in args.into_iter().enumerate() {
        if n as usize == i {
            chosen = arg;
        }
    }
    chosen
}
