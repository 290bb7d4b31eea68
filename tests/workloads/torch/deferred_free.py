"""Tensors that another stream still uses when they are dropped: their blocks come back later.

Truth: `drop` when Python lets go; the marks around tell allocated (falls at the drop) and active bytes (fall
only when the pool sees that the other stream is done).
"""

import time

from workload import MIB, Workload, options


def main():
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    run = Workload(args)
    side = run.npu.Stream()
    for step in range(1, args.steps + 1):
        with run.range("step start"):
            tensor = run.empty(4 * MIB)
            with run.npu.stream(side):
                tensor.fill_(step)
            tensor.record_stream(side)
            run.mark("held", step=step)
            run.tell_block("drop", tensor, kind="deferred", step=step)
            del tensor
            run.mark("dropped", step=step)
            side.synchronize()
            time.sleep(0.002)
            # The next allocation looks at what streams have finished.
            run.empty(MIB)
            run.mark("returned", step=step)
    run.end()


main()
