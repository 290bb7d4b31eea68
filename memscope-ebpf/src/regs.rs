//! Registers of the probed thread, read from the program's context by plain loads (no helper call).

use core::ffi::c_void;

use memscope_ebpf::ARGS;

/// The context of a uprobe program: `struct pt_regs` (x86_64) or `struct user_pt_regs` (aarch64).
#[derive(Clone, Copy)]
pub struct Regs(*const u64);

#[cfg(bpf_target_arch = "x86_64")]
mod layout {
    /// Indices of rdi, rsi, rdx, rcx, r8, r9 in `struct pt_regs`.
    pub const ARGS: [usize; 6] = [14, 13, 12, 11, 9, 8];
    /// rax.
    pub const RET: usize = 10;
    /// rsp.
    pub const SP: usize = 19;
}

#[cfg(bpf_target_arch = "aarch64")]
mod layout {
    pub const ARGS: [usize; 6] = [0, 1, 2, 3, 4, 5];
    pub const RET: usize = 0;
    pub const SP: usize = 31;
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

    /// All arguments.
    ///
    /// Loaded one by one, whichever is wanted: a load from "context plus something" is refused by the verifier,
    /// and that is what a choice between loads is compiled to.
    #[inline(always)]
    pub fn args(self) -> [u64; ARGS] {
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

/// One of the arguments, by comparing: the stack of a BPF program has no computed addresses before 5.12.
#[inline(always)]
pub fn choose(args: [u64; ARGS], n: u8) -> u64 {
    let [a, b, c, d, e, f] = args;
    match n {
        0 => a,
        1 => b,
        2 => c,
        3 => d,
        4 => e,
        _ => f,
    }
}
