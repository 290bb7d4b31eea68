//! What an operator library (libopapi.so) and the operator base (libnnopbase.so) have in common: the
//! executor, and the functions that carry it from phase 1 to a kernel launch.

use crate::ffi::{Address, Out, Text};

/// How a kernel is launched: CANN has moved from one to the other, and libraries of all ages are in use.
#[derive(Debug, Clone, Copy)]
pub enum Launch {
    /// `aclrtLaunchKernelWithHostArgs`.
    HostArgs,
    /// `rtKernelLaunchWithHandleV2`: a program and a tiling key, no name.
    Handle,
    /// `rtKernelLaunch` of a host stub registered with `rtFunctionRegister`.
    Stub,
}

/// `aclOpExecutor`: one operator made ready by phase 1 (`aclnnXxxGetWorkspaceSize`), used up by phase 2.
pub struct Executor {
    /// Name of the phase-2 function.
    pub name: &'static str,
    pub launch: Launch,
    /// Addresses that the kernel gets: inputs, then outputs.
    pub tensors: Vec<Address>,
    /// The effect on the outputs.
    pub compute: Box<dyn FnOnce()>,
}

/// `NnopbaseDfxId`.
#[repr(C)]
#[derive(Debug)]
pub struct DfxId {
    pub id: u32,
    pub name: Text,
    pub has_kernel: bool,
}

/// Size of an `op::OpDfxGuard`, generously: it lives in its user's frame.
pub type DfxGuard = [u64; 16];

// Executors pass as addresses: of the `Box<Executor>` that phase 1 made and the run functions take over.
unsafe extern "C" {
    #[link_name = "_Z19InitL2Phase1ContextPKcPP13aclOpExecutor"]
    pub safe fn init_phase1(name: Text, executor: Address);
    #[link_name = "_Z19InitL2Phase2ContextPKcP13aclOpExecutor"]
    pub safe fn init_phase2(name: Text, executor: Address);
    #[link_name = "_ZN2op10OpDfxGuardC1EPKciNS_7OpLevelES2_"]
    pub safe fn dfx_guard_begin(guard: Option<&mut DfxGuard>, file: Text, line: i32, level: u32, name: Text);
    #[link_name = "_ZN2op10OpDfxGuardD1Ev"]
    pub safe fn dfx_guard_end(guard: Option<&mut DfxGuard>);
    #[link_name = "_Z19CommonOpExecutorRunPvmP13aclOpExecutorS_"]
    pub safe fn run_composite(workspace: Address, size: u64, executor: Address, stream: Address) -> i32;
    pub safe fn NnopbaseMsprofSysTime() -> u64;
    pub safe fn NnopbaseRunForWorkspace(executor: Address, size: Out<u64>) -> i32;
    pub safe fn NnopbaseRunWithWorkspace(
        executor: Address,
        stream: Address,
        workspace: Address,
        size: u64,
    ) -> i32;
    pub safe fn NnopbaseReportApiInfo(begin: u64, id: Option<&DfxId>);
}
