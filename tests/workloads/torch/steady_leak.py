"""Steps of a constant leak, as the workload `leak6` that msMemScope was run on: each uses 16 MiB for a while and
keeps 3 MiB for good.

Truth: `leak` for each block that stays, with its step.
"""

from workload import MIB, Workload, options

STEPS = 6


def main():
    run = Workload(options(__doc__).parse_args())
    held = [run.empty(MIB)]
    for step in range(1, STEPS + 1):
        with run.range("step start"):
            scratch = run.empty(16 * MIB)
            kept = run.empty(3 * MIB)
            run.tell_block("leak", kept, step=step)
            held.append(kept)
            del scratch
            run.npu.synchronize()
    run.end()


main()
