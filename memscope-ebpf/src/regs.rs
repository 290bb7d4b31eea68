//! Registers of the probed thread, read from the program's context by plain loads (no helper call).

use core::ffi::c_void;

use memscope_ebpf::ARGS;

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
    /// Arguments in registers; the others follow the return address on the stack.
    pub const REGISTER_ARGS: usize = 6;
    pub const STACK_ARGS: u64 = 8;
}

#[cfg(bpf_target_arch = "aarch64")]
mod layout {
    pub const ARGS: [usize; super::IN_REGISTERS] = [0, 1, 2, 3, 4, 5];
    pub const RET: usize = 0;
    pub const SP: usize = 31;
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
