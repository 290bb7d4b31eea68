//! All there is to know of each probed site, in one table: attach lists, `memscope-trace probes`, the
//! documentation and the simulated libraries are made from it or checked against it.
//!
//! Sources of the facts: hicann/driver, hicann/runtime, Ascend/pytorch and Ascend/mstx as published in August
//! 2026, and the exports of the released wheels.

use memscope_ebpf::{NO_ARG, ret};
use serde::Serialize;

/// A row: one function that is probed wherever it is found.
#[derive(Debug, Clone, Serialize)]
pub struct Probe {
    /// Name in every output: the symbol, or `torch_npu::…` where the binary has none.
    pub site: &'static str,
    pub at: At,
    /// File names in which it is expected. It is looked for in every mapped file; when one of these is mapped
    /// and lacks it, it counts as not found.
    pub libraries: &'static [&'static str],
    pub observes: Fact,
    pub shape: Shape,
    pub class: Class,
    /// Attached only where none of these sites is found: the layers below or before it that say the same.
    pub unless: &'static [&'static str],
    /// Since which version, where it is not in all.
    pub since: &'static str,
}

/// How the function is found in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum At {
    /// A defined dynamic symbol.
    Symbol(&'static str),
    /// torch_npu is stripped: found by the rules of [`super::torch_npu`].
    TorchNpu(TorchNpuSite),
    /// CANN's Python module `mstx`: found by the rules of [`super::mstx_python`].
    MstxPython(MstxPythonSite),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TorchNpuSite {
    PoolReport,
    Mark,
    RangeStart,
    RangeEnd,
    RangePush,
    RangePop,
    Enqueue,
    Run,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MstxPythonSite {
    Mark,
    RangeStart,
    RangeEnd,
}

/// What a hit says. The argument numbers in [`Shape`] belong to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fact {
    /// `(void **pp, u64 size, u64 flag)`.
    DriverAlloc,
    /// `(void *p)`.
    DriverFree,
    /// `(handle **, size_t size, const drv_mem_prop *, u64 flag)`.
    DriverCreate,
    /// `(handle *)`: one reference less.
    DriverRelease,
    /// `(handle **, void *ptr)`: one reference more.
    DriverRetain,
    /// `(void *va, size_t size, size_t offset, handle *, u64 flag)`.
    DriverMap,
    /// `(void *va)`.
    DriverUnmap,
    /// `(void **pp, u64 size, …)`: a runtime call above the driver's, which only annotates it.
    RuntimeAlloc,
    /// The same where no driver site was found: then it is counted as the driver's.
    RuntimeAllocCounted,
    RuntimeFreeCounted,
    RuntimeHostAllocCounted,
    RuntimeHostFreeCounted,
    /// torch_npu's `MemoryUsage`.
    PoolReport,
    /// `(this, size, persistent, recycle, stream)`, returns the address.
    MindsporeAlloc,
    /// `(this, void *const &address)`.
    MindsporeFree,
    Mark,
    RangeStart,
    /// `(id)` or `(this, id, domain)`.
    RangeEnd,
    RangePop,
    /// Returns the handle that other calls name the domain by.
    DomainCreate,
    Op,
    Launch,
    /// A tensor is described, to be given to the operator that is named next by the thread.
    Tensor,
    /// `(void *address)` of a tensor, in place of its description.
    TensorAddress,
    /// `(void *data, size_t size)`, for the operator that the thread has named.
    OperandBuffer,
    /// All tensors of the operator that the thread has named, or names not at all.
    TensorPack,
    /// The name of the operator that took the tensors, on threads that name none otherwise.
    OperandsOf,
    /// Addresses that a kernel is launched with.
    LaunchArguments,
    /// `(void *dst, size_t max, const void *src, size_t size, i32 kind, …)`.
    Copy,
    /// `(void *ptr, size_t max, i32 value, size_t size, …)`.
    Fill,
    /// `(const void *send, void *receive, u64 count, i32 type, …)`.
    Collective,
    /// `(void *buffer, u64 count, i32 type, …)`: sent, received, or both.
    CollectiveSend,
    CollectiveReceive,
    CollectiveInPlace,
    /// `(i32 device)`.
    SetDevice,
    /// `(u32 device, …)`: as the driver numbers it.
    DeviceClose,
    /// `(ctx *, i32 device)`.
    CreateContext,
    /// `(ctx *)`: the thread's own.
    GetContext,
    /// `(ctx)`.
    SetContext,
    AclInit,
    AclFinalize,
    /// An operator is enqueued, or a task run: which call a task is of.
    TaskQueue,
    /// The dynamic linker has new libraries.
    LibrariesMapped,
}

impl Fact {
    /// Whether it makes blocks, of which the stack is wanted.
    pub fn is_allocation(self) -> bool {
        matches!(
            self,
            Self::DriverAlloc
                | Self::DriverCreate
                | Self::RuntimeAllocCounted
                | Self::RuntimeHostAllocCounted
                | Self::PoolReport
                | Self::MindsporeAlloc
        )
    }
}

/// Which programs run at the site, and what they read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// Entry: the arguments.
    Enter,
    /// Entry: out-pointer and bytes asked (arguments 0 and 1), which go into the record of the driver's call below.
    Annotate,
    /// Entry and return: arguments, return value, and what the out-pointer in argument `out` holds.
    EnterReturn { out: u8, ret: u8, structure: u8 },
    /// Entry: 56 bytes that argument `arg` points to.
    Report { arg: u8 },
    /// Entry: the text reached from argument `arg`: `offset` added, then `derefs` pointers followed.
    Name { arg: u8, offset: u16, derefs: u8 },
    /// Entry: text of a mark or range (where `arg` is one), and its domain. With `id`, its return value names it.
    Mark { arg: u8, domain: u8, id: bool },
    /// Entry: address and size of a tensor, by arguments (sizes, rank, type, …, address as argument 8).
    Tensor,
    /// Entry: the words that argument `arg` points to, as many bytes as the next argument says; with `derefs` 1, `arg`
    /// is an `rtArgsEx_t` that holds both.
    Arguments { arg: u8, derefs: u8 },
    /// Entry: the tensors of the `atb::VariantPack` that argument `arg` points to.
    Pack { arg: u8 },
    /// Entry: `(category, name, task)` of torch_npu's task queue.
    Enqueue,
    /// Entry: `(category, cells, cell)` of it.
    Run,
    /// Entry: only that it happened, at once.
    Notify,
}

impl Shape {
    /// Whether the return is probed as well.
    pub fn has_return(self) -> bool {
        matches!(self, Self::EnterReturn { .. } | Self::Mark { id: true, .. })
    }
}

/// What the user switches on and off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Allocations and frees, and what is needed to read them.
    Memory,
    /// Marks and ranges.
    Mark,
    /// Operators (`--level op`).
    Op,
    /// Kernel launches (`--level kernel`).
    Launch,
    /// Which operator uses which block: attached when an analysis wants to know.
    Access,
    /// The same of kernels (with `--level kernel`).
    LaunchAccess,
    /// Which device a thread uses, what becomes of the process.
    Context,
    /// Which call a task of torch_npu's queue is of: attached to a process whose queue allocates.
    Queue,
}

const fn out(out: u8) -> Shape {
    Shape::EnterReturn { out, ret: ret::ZERO_IS_OK, structure: NO_ARG }
}

const STATUS: Shape = out(NO_ARG);
const fn text(arg: u8) -> Shape {
    Shape::Name { arg, offset: 0, derefs: 0 }
}
/// `const std::string &`: the first word of the object is the text's address in both string ABIs.
const fn string(arg: u8) -> Shape {
    Shape::Name { arg, offset: 0, derefs: 1 }
}

/// `(self, args, kwargs)`: the first item of the tuple. Where its bytes lie depends on the interpreter and is
/// filled in on attaching.
const PYTHON_TEXT: Shape = Shape::Mark { arg: 1, domain: NO_ARG, id: false };

const HAL: &[&str] = &["libascend_hal.so"];
const RT: &[&str] = &["libruntime.so"];
const ACL: &[&str] = &["libascendcl.so", "libacl_rt.so"];
const MSTX: &[&str] = &["libms_tools_ext.so"];
const TORCH: &[&str] = &["libtorch_npu.so"];
const NNOPBASE: &[&str] = &["libnnopbase.so"];
const ATB: &[&str] = &["libatb.so"];
const HCCL: &[&str] = &["libhccl.so"];
const MINDSPORE: &[&str] = &["libmindspore_memory_pool.so"];
/// Expected nowhere in particular: lacking it means nothing.
const ANY: &[&str] = &[];
const ALWAYS: &[&str] = &[];

macro_rules! rows {
    ($($class:ident: { $($site:expr, $at:expr, $libraries:expr, $fact:ident, $shape:expr, $unless:expr, $since:expr;)* })*) => {
        &[$($(Probe {
            site: $site, at: $at, libraries: $libraries, observes: Fact::$fact, shape: $shape,
            class: Class::$class, unless: $unless, since: $since,
        },)*)*]
    };
}

use At::{MstxPython, Symbol, TorchNpu};

/// Operators of torch_npu by the newest of its choke points that a wheel has.
pub(super) const RUN_OP_API_V2: &str = "_ZN6at_npu6native9OpCommand10RunOpApiV2ERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKSt8functionIFivEEb";
pub(super) const RUN_OP_API_V2_OLD_ABI: &str =
    "_ZN6at_npu6native9OpCommand10RunOpApiV2ERKSsRKSt8functionIFivEEb";
const RUN_OP_API_V3: &str = "_ZN6at_npu6native9OpCommand10RunOpApiV3ERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKSt8functionIFivEEbPN7c10_npu9NPUStreamE";
const RUN_OP_API_V3_OLD_ABI: &str =
    "_ZN6at_npu6native9OpCommand10RunOpApiV3ERKSsRKSt8functionIFivEEbPN7c10_npu9NPUStreamE";
const RUN_OP_API: &str = "_ZN6at_npu6native9OpCommand8RunOpApiERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESt8functionIFivEEb";
const RUN_OP_API_OLD_ABI: &str = "_ZN6at_npu6native9OpCommand8RunOpApiERKSsSt8functionIFivEEb";
/// Where these are, operators are named by the thread that prepared their tensors.
const RUN_OP_API_V2S: &[&str] = &["OpCommand::RunOpApiV2", "OpCommand::RunOpApiV2 (old string ABI)"];
const OP_NAME: &str =
    "_ZN6at_npu6native9OpCommand4NameERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
const OP_NAME_OLD_ABI: &str = "_ZN6at_npu6native9OpCommand4NameERKSs";
const MS_ALLOC: &str = "_ZN9mindspore6device22AbstractDynamicMemPool14AllocTensorMemEmbbj";
const MS_FREE: &str = "_ZN9mindspore6device22AbstractDynamicMemPool13FreeTensorMemERKPv";
const MS_ALLOC_OLD: &str = "_ZN9mindspore6device21DynamicMemPoolBestFit14AllocTensorMemEmbbj";
const MS_FREE_OLD: &str = "_ZN9mindspore6device21DynamicMemPoolBestFit13FreeTensorMemERKPv";
const ATB_EXECUTE: &str = "_ZN3atb13OperationBase7ExecuteERKNS_11VariantPackEPhmPNS_7ContextE";

/// Whether a file is, by its name, one that sites are looked for in.
pub fn is_ascend_library(path: &std::path::Path) -> bool {
    let Some(name) = path.file_name().and_then(|n| n.to_str()) else { return false };
    CATALOGUE.iter().flat_map(|p| p.libraries).any(|library| name.starts_with(library))
}

pub static CATALOGUE: &[Probe] = rows! {
    Memory: {
        // The truth about bytes on a device. The *Inner functions are the bodies of these: never probe both.
        "halMemAlloc", Symbol("halMemAlloc"), HAL, DriverAlloc, out(0), ALWAYS, "";
        // Frees are recorded at entry: at the return another thread may have been given the address already.
        "halMemFree", Symbol("halMemFree"), HAL, DriverFree, Shape::Enter, ALWAYS, "";
        "halMemCreate", Symbol("halMemCreate"), HAL, DriverCreate,
            Shape::EnterReturn { out: 0, ret: ret::ZERO_IS_OK, structure: 2 }, ALWAYS, "";
        "halMemRelease", Symbol("halMemRelease"), HAL, DriverRelease, Shape::Enter, ALWAYS, "";
        "halMemRetainAllocationHandle", Symbol("halMemRetainAllocationHandle"), HAL, DriverRetain, out(0), ALWAYS, "";
        "halMemMap", Symbol("halMemMap"), HAL, DriverMap, Shape::Enter, ALWAYS, "";
        "halMemUnmap", Symbol("halMemUnmap"), HAL, DriverUnmap, Shape::Enter, ALWAYS, "";

        // Above the driver: who asked, and for how much. The driver's call is given the same out-pointer.
        "aclrtMalloc", Symbol("aclrtMalloc"), ACL, RuntimeAlloc, Shape::Annotate, ALWAYS, "";
        "aclrtMallocAlign32", Symbol("aclrtMallocAlign32"), ACL, RuntimeAlloc, Shape::Annotate, ALWAYS, "CANN 7.0";
        "aclrtMallocCached", Symbol("aclrtMallocCached"), ACL, RuntimeAlloc, Shape::Annotate, ALWAYS, "";
        "aclrtMallocWithCfg", Symbol("aclrtMallocWithCfg"), ANY, RuntimeAlloc, Shape::Annotate, ALWAYS, "CANN 8.5";
        "aclrtMallocHost", Symbol("aclrtMallocHost"), ACL, RuntimeAlloc, Shape::Annotate, ALWAYS, "";
        "aclrtMallocHostWithCfg", Symbol("aclrtMallocHostWithCfg"), ANY, RuntimeAlloc, Shape::Annotate, ALWAYS, "CANN 8.5";
        "aclrtMallocPhysical", Symbol("aclrtMallocPhysical"), ACL, RuntimeAlloc, Shape::Annotate, ALWAYS, "CANN 7.0";
        "rtMalloc", Symbol("rtMalloc"), RT, RuntimeAlloc, Shape::Annotate, ALWAYS, "";

        // Where no driver library can be probed, the runtime's own functions are counted instead.
        "rtMalloc (counted)", Symbol("rtMalloc"), ANY, RuntimeAllocCounted, out(0), &["halMemAlloc"], "";
        "rtFree (counted)", Symbol("rtFree"), ANY, RuntimeFreeCounted, Shape::Enter, &["halMemAlloc"], "";
        "rtMallocHost (counted)", Symbol("rtMallocHost"), ANY, RuntimeHostAllocCounted, out(0), &["halMemAlloc"], "";
        "rtFreeHost (counted)", Symbol("rtFreeHost"), ANY, RuntimeHostFreeCounted, Shape::Enter, &["halMemAlloc"], "";

        "torch_npu::reportMemoryDataToNpuProfiler", TorchNpu(TorchNpuSite::PoolReport), TORCH, PoolReport,
            Shape::Report { arg: 0 }, ALWAYS, "torch_npu 6.0.rc2";

        "AbstractDynamicMemPool::AllocTensorMem", Symbol(MS_ALLOC), MINDSPORE, MindsporeAlloc,
            Shape::EnterReturn { out: NO_ARG, ret: ret::IS_RESULT, structure: NO_ARG }, ALWAYS, "MindSpore 2.7";
        "AbstractDynamicMemPool::FreeTensorMem", Symbol(MS_FREE), MINDSPORE, MindsporeFree,
            Shape::Report { arg: 1 }, ALWAYS, "MindSpore 2.7";
        "DynamicMemPoolBestFit::AllocTensorMem", Symbol(MS_ALLOC_OLD), ANY, MindsporeAlloc,
            Shape::EnterReturn { out: NO_ARG, ret: ret::IS_RESULT, structure: NO_ARG },
            &["AbstractDynamicMemPool::AllocTensorMem"], "";
        "DynamicMemPoolBestFit::FreeTensorMem", Symbol(MS_FREE_OLD), ANY, MindsporeFree, Shape::Report { arg: 1 },
            &["AbstractDynamicMemPool::FreeTensorMem"], "";
    }
    Mark: {
        // torch_npu returns before it reaches libms_tools_ext.so unless a profiler runs: the entries of these
        // methods see every call.
        "torch_npu::MstxMgr::mark", TorchNpu(TorchNpuSite::Mark), TORCH, Mark,
            Shape::Mark { arg: 1, domain: 3, id: false }, ALWAYS, "torch_npu 6.0.rc2";
        "torch_npu::MstxMgr::rangeStart", TorchNpu(TorchNpuSite::RangeStart), TORCH, RangeStart,
            Shape::Mark { arg: 1, domain: 3, id: false }, ALWAYS, "torch_npu 6.0.rc3";
        "torch_npu::MstxMgr::rangeEnd", TorchNpu(TorchNpuSite::RangeEnd), TORCH, RangeEnd,
            Shape::Mark { arg: NO_ARG, domain: 2, id: false }, ALWAYS, "torch_npu 6.0.rc3";
        "torch_npu::MstxMgr::rangePush", TorchNpu(TorchNpuSite::RangePush), ANY, RangeStart,
            Shape::Mark { arg: 1, domain: 3, id: false }, ALWAYS, "torch_npu 26.0";
        "torch_npu::MstxMgr::rangePop", TorchNpu(TorchNpuSite::RangePop), ANY, RangePop,
            Shape::Mark { arg: NO_ARG, domain: 1, id: false }, ALWAYS, "torch_npu 26.0";
        "mstxMarkA", Symbol("mstxMarkA"), MSTX, Mark, Shape::Mark { arg: 0, domain: NO_ARG, id: false }, ALWAYS, "";
        "mstxRangeStartA", Symbol("mstxRangeStartA"), MSTX, RangeStart,
            Shape::Mark { arg: 0, domain: NO_ARG, id: true }, ALWAYS, "";
        "mstxRangeEnd", Symbol("mstxRangeEnd"), MSTX, RangeEnd, Shape::Enter, ALWAYS, "";
        "mstxDomainCreateA", Symbol("mstxDomainCreateA"), MSTX, DomainCreate,
            Shape::Mark { arg: 0, domain: NO_ARG, id: true }, ALWAYS, "";
        "mstxDomainMarkA", Symbol("mstxDomainMarkA"), MSTX, Mark,
            Shape::Mark { arg: 1, domain: NO_ARG, id: false }, ALWAYS, "";
        "mstxDomainRangeStartA", Symbol("mstxDomainRangeStartA"), MSTX, RangeStart,
            Shape::Mark { arg: 1, domain: NO_ARG, id: true }, ALWAYS, "";
        "mstxDomainRangeEnd", Symbol("mstxDomainRangeEnd"), MSTX, RangeEnd, Shape::Enter, ALWAYS, "";
        "mstx.mark (Python)", MstxPython(MstxPythonSite::Mark), ANY, Mark, PYTHON_TEXT, ALWAYS, "";
        "mstx.range_start (Python)", MstxPython(MstxPythonSite::RangeStart), ANY, RangeStart, PYTHON_TEXT, ALWAYS, "";
        "mstx.range_end (Python)", MstxPython(MstxPythonSite::RangeEnd), ANY, RangeEnd, Shape::Enter, ALWAYS, "";
    }
    Op: {
        "OpCommand::RunOpApiV2", Symbol(RUN_OP_API_V2), TORCH, Op, string(0), ALWAYS, "torch_npu 7.1.0";
        "OpCommand::RunOpApiV2 (old string ABI)", Symbol(RUN_OP_API_V2_OLD_ABI), ANY, Op, string(0), ALWAYS, "torch_npu 7.1.0";
        "OpCommand::RunOpApiV3", Symbol(RUN_OP_API_V3), ANY, Op, string(0), ALWAYS, "torch_npu 7.3.0";
        "OpCommand::RunOpApiV3 (old string ABI)", Symbol(RUN_OP_API_V3_OLD_ABI), ANY, Op, string(0), ALWAYS, "torch_npu 7.3.0";
        // Still there beside its successors, which the operators of those versions use.
        "OpCommand::RunOpApi (old string ABI)", Symbol(RUN_OP_API_OLD_ABI), ANY, Op, string(0), RUN_OP_API_V2S, "torch_npu 6.0.0 to 7.0.0";
        "OpCommand::RunOpApi", Symbol(RUN_OP_API), ANY, Op, string(0), RUN_OP_API_V2S, "torch_npu 6.0.0 to 7.0.0";
        "OpCommand::Name", Symbol(OP_NAME), TORCH, Op, string(1), ALWAYS, "";
        "OpCommand::Name (old string ABI)", Symbol(OP_NAME_OLD_ABI), ANY, Op, string(1), ALWAYS, "";
        "atb::OperationBase::Execute", Symbol(ATB_EXECUTE), ATB, Op,
            Shape::Name { arg: 0, offset: 8, derefs: 1 }, ALWAYS, "";
        "InitL2Phase2Context", Symbol("_Z19InitL2Phase2ContextPKcP13aclOpExecutor"), NNOPBASE, Op, text(0),
            &["OpCommand::RunOpApiV2", "OpCommand::RunOpApiV2 (old string ABI)", "OpCommand::RunOpApi",
              "OpCommand::RunOpApi (old string ABI)"], "";
    }
    Launch: {
        // A kernel's name lies 24 bytes into the function object that the handle points to.
        "aclrtLaunchKernelWithHostArgs", Symbol("aclrtLaunchKernelWithHostArgs"), ANY, Launch,
            Shape::Name { arg: 0, offset: 24, derefs: 1 }, ALWAYS, "CANN 8.5";
        "aclrtLaunchKernelWithConfig", Symbol("aclrtLaunchKernelWithConfig"), ANY, Launch,
            Shape::Name { arg: 0, offset: 24, derefs: 1 }, ALWAYS, "";
        "aclrtLaunchKernel", Symbol("aclrtLaunchKernel"), ANY, Launch,
            Shape::Name { arg: 0, offset: 24, derefs: 1 }, ALWAYS, "";
        "aclrtLaunchKernelV2", Symbol("aclrtLaunchKernelV2"), ANY, Launch,
            Shape::Name { arg: 0, offset: 24, derefs: 1 }, ALWAYS, "";
        // The runtime's own launch functions, called past ACL by HCCL, ATB and generated stubs.
        "rtKernelLaunch", Symbol("rtKernelLaunch"), ANY, Launch, Shape::Enter, ALWAYS, "";
        "rtKernelLaunchWithFlag", Symbol("rtKernelLaunchWithFlag"), ANY, Launch, Shape::Enter, ALWAYS, "";
        "rtKernelLaunchWithFlagV2", Symbol("rtKernelLaunchWithFlagV2"), ANY, Launch, Shape::Enter, ALWAYS, "";
        "rtKernelLaunchWithHandle", Symbol("rtKernelLaunchWithHandle"), ANY, Launch, Shape::Enter, ALWAYS, "";
        "rtKernelLaunchWithHandleV2", Symbol("rtKernelLaunchWithHandleV2"), ANY, Launch, Shape::Enter, ALWAYS, "";
        "rtAicpuKernelLaunchExWithArgs", Symbol("rtAicpuKernelLaunchExWithArgs"), ANY, Launch, text(1), ALWAYS, "";
        "rtFftsPlusTaskLaunchWithFlag", Symbol("rtFftsPlusTaskLaunchWithFlag"), ANY, Launch, Shape::Enter, ALWAYS, "";
        "rtFunctionRegister", Symbol("rtFunctionRegister"), ANY, Launch, text(2), ALWAYS, "";
    }
    Access: {
        // On the thread that enqueues, before the operator's name.
        "aclCreateTensor", Symbol("aclCreateTensor"), NNOPBASE, Tensor, Shape::Tensor, ALWAYS, "";
        // In place of that when the operator is known from before.
        "AddTensorAddrToCachedList", Symbol("AddTensorAddrToCachedList"), ANY, TensorAddress, Shape::Enter, ALWAYS, "";
        "aclCreateDataBuffer", Symbol("aclCreateDataBuffer"), ANY, OperandBuffer, Shape::Enter, ALWAYS, "";
        // With TASK_QUEUE_ENABLE=2 the tensors are described by another thread than the one that names the operator.
        "InitL2Phase2Context (operands)", Symbol("_Z19InitL2Phase2ContextPKcP13aclOpExecutor"), ANY, OperandsOf, text(0), ALWAYS, "";
        "NnopbaseReportApiInfo", Symbol("NnopbaseReportApiInfo"), ANY, OperandsOf,
            Shape::Name { arg: 1, offset: 8, derefs: 1 }, ALWAYS, "";
        "atb::OperationBase::Execute (operands)", Symbol(ATB_EXECUTE), ANY, TensorPack, Shape::Pack { arg: 1 }, ALWAYS, "";
        "aclrtMemcpy", Symbol("aclrtMemcpy"), ACL, Copy, Shape::Enter, ALWAYS, "";
        "aclrtMemcpyAsync", Symbol("aclrtMemcpyAsync"), ACL, Copy, Shape::Enter, ALWAYS, "";
        "aclrtMemcpyAsyncWithCondition", Symbol("aclrtMemcpyAsyncWithCondition"), ANY, Copy, Shape::Enter, ALWAYS, "CANN 8.3";
        "aclrtMemset", Symbol("aclrtMemset"), ACL, Fill, Shape::Enter, ALWAYS, "";
        "aclrtMemsetAsync", Symbol("aclrtMemsetAsync"), ACL, Fill, Shape::Enter, ALWAYS, "";
        "HcclAllReduce", Symbol("HcclAllReduce"), HCCL, Collective, Shape::Enter, ALWAYS, "";
        "HcclAllGather", Symbol("HcclAllGather"), HCCL, Collective, Shape::Enter, ALWAYS, "";
        "HcclReduceScatter", Symbol("HcclReduceScatter"), HCCL, Collective, Shape::Enter, ALWAYS, "";
        "HcclReduce", Symbol("HcclReduce"), ANY, Collective, Shape::Enter, ALWAYS, "";
        "HcclBroadcast", Symbol("HcclBroadcast"), HCCL, CollectiveInPlace, Shape::Enter, ALWAYS, "";
        "HcclSend", Symbol("HcclSend"), ANY, CollectiveSend, Shape::Enter, ALWAYS, "";
        "HcclRecv", Symbol("HcclRecv"), ANY, CollectiveReceive, Shape::Enter, ALWAYS, "";
    }
    LaunchAccess: {
        "aclrtLaunchKernelWithHostArgs (arguments)", Symbol("aclrtLaunchKernelWithHostArgs"), ANY, LaunchArguments,
            Shape::Arguments { arg: 4, derefs: 0 }, ALWAYS, "CANN 8.5";
        "aclrtLaunchKernel (arguments)", Symbol("aclrtLaunchKernel"), ANY, LaunchArguments,
            Shape::Arguments { arg: 2, derefs: 0 }, ALWAYS, "";
        "aclrtLaunchKernelV2 (arguments)", Symbol("aclrtLaunchKernelV2"), ANY, LaunchArguments,
            Shape::Arguments { arg: 2, derefs: 0 }, ALWAYS, "";
        "rtKernelLaunch (arguments)", Symbol("rtKernelLaunch"), ANY, LaunchArguments,
            Shape::Arguments { arg: 2, derefs: 0 }, ALWAYS, "";
        "rtKernelLaunchWithFlag (arguments)", Symbol("rtKernelLaunchWithFlag"), ANY, LaunchArguments,
            Shape::Arguments { arg: 2, derefs: 1 }, ALWAYS, "";
        "rtKernelLaunchWithFlagV2 (arguments)", Symbol("rtKernelLaunchWithFlagV2"), ANY, LaunchArguments,
            Shape::Arguments { arg: 2, derefs: 1 }, ALWAYS, "";
        "rtKernelLaunchWithHandle (arguments)", Symbol("rtKernelLaunchWithHandle"), ANY, LaunchArguments,
            Shape::Arguments { arg: 3, derefs: 1 }, ALWAYS, "";
        "rtKernelLaunchWithHandleV2 (arguments)", Symbol("rtKernelLaunchWithHandleV2"), ANY, LaunchArguments,
            Shape::Arguments { arg: 3, derefs: 1 }, ALWAYS, "";
    }
    Queue: {
        // Called whether or not the profiler listens, before and after.
        "torch_npu::ProfReportMarkDataToNpuProfiler (enqueue)", TorchNpu(TorchNpuSite::Enqueue), TORCH, TaskQueue,
            Shape::Enqueue, ALWAYS, "torch_npu 7.1.0";
        "torch_npu::ProfReportMarkDataToNpuProfiler (run)", TorchNpu(TorchNpuSite::Run), TORCH, TaskQueue,
            Shape::Run, ALWAYS, "torch_npu 7.1.0";
    }
    Context: {
        "aclInit", Symbol("aclInit"), &["libascendcl.so"], AclInit, Shape::Enter, ALWAYS, "";
        "aclFinalize", Symbol("aclFinalize"), &["libascendcl.so"], AclFinalize, Shape::Enter, ALWAYS, "";
        "aclrtSetDevice", Symbol("aclrtSetDevice"), ACL, SetDevice, Shape::Enter, ALWAYS, "";
        "rtSetDevice", Symbol("rtSetDevice"), RT, SetDevice, Shape::Enter, ALWAYS, "";
        // The driver takes everything back then. (aclrtResetDevice only counts down the uses of a device.)
        "halDeviceClose", Symbol("halDeviceClose"), HAL, DeviceClose, STATUS, ALWAYS, "";
        "aclrtCreateContext", Symbol("aclrtCreateContext"), ACL, CreateContext, out(0), ALWAYS, "";
        "aclrtGetCurrentContext", Symbol("aclrtGetCurrentContext"), ACL, GetContext, out(0), ALWAYS, "";
        "aclrtSetCurrentContext", Symbol("aclrtSetCurrentContext"), ACL, SetContext, Shape::Enter, ALWAYS, "";
        "_dl_debug_state", Symbol("_dl_debug_state"), ANY, LibrariesMapped, Shape::Notify, ALWAYS, "";
    }
};

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn sites_are_named_once_and_alternatives_exist() {
        let names: HashSet<_> = CATALOGUE.iter().map(|p| p.site).collect();
        assert_eq!(names.len(), CATALOGUE.len());
        for probe in CATALOGUE {
            for other in probe.unless {
                assert!(names.contains(other), "{}: unless {other}", probe.site);
            }
        }
    }
}
