"""One block of each kind of inefficiency, and a clean one, as the workload `ineff` that msMemScope was run on.

Truth: `block` with the kind that it must be found to be (`null`: none).
"""

from workload import MIB, Workload, options

# More than msMemScope's threshold of calls between two accesses.
IDLE_OPERATORS = 3100


def main():
    parser = options(__doc__)
    run = Workload(parser.parse_args(), warm=True)
    torch = run.torch

    def block(mib, kind):
        tensor = torch.empty(mib * MIB // 4, dtype=torch.float32, device="npu")
        run.tell_block("block", tensor, kind=kind)
        return tensor

    clean = block(3, None)
    clean.add_(1)
    del clean

    # Another block is freed between the allocation of `early` and its first use; `before` itself waits for that.
    before = block(4, "late_deallocation")
    before.add_(1)
    early = block(5, "early_allocation")
    del before
    early.add_(1)
    early.add_(1)
    del early

    # Another block is allocated between the last use and the free; that one waits for the end of the loop.
    late = block(6, "late_deallocation")
    late.add_(1)
    late.add_(1)
    filler = block(7, "late_deallocation")
    del late

    idle = block(8, "temporary_idleness")
    idle.add_(1)
    tick = torch.empty(16, dtype=torch.float32, device="npu")
    for _ in range(IDLE_OPERATORS):
        tick.add_(1)
    idle.add_(1)
    run.npu.synchronize()
    del idle, filler, tick
    run.end()


main()
