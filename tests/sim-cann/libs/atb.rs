//! libatb.so: operators that are given all their tensors at once, as far as beginning one goes.

use sim_cann::acl;
use sim_cann::ffi::Address;
use sim_cann::trace;

/// `OperationBase::Execute(const VariantPack &, uint8_t *workspace, uint64_t size, Context *)`.
#[unsafe(export_name = "_ZN3atb13OperationBase7ExecuteERKNS_11VariantPackEPhmPNS_7ContextE")]
extern "C" fn execute(
    _this: Address,
    pack: Address,
    workspace: Address,
    size: u64,
    _context: Address,
) -> i32 {
    let call = trace::enter("OperationBase::Execute").num("pack", pack);
    call.num("workspace", workspace).num("size", size).done(acl::OK)
}
