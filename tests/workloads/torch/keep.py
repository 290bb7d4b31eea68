"""What programs keep, in the ways they do: each kind is a loop of marked steps.

`varying`: batches of a different length in each step, all kept.
`helper`: one function allocates for three callers; one keeps a ring, one all blocks, one those of every second step.
`concat`: keys and values that are copied into a larger block in each step.
`filled`: a cache with an entry for each of the first steps, and none later.
Truth: `keep` for each block that stays, with its step and the line that called for it.
"""

import collections
import sys

from workload import KIB, Workload, options


def main():
    parser = options(__doc__)
    parser.add_argument("kind", choices=["varying", "helper", "concat", "filled"])
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    run = Workload(args, warm=True)
    kept, ring, cache = [], collections.deque(maxlen=3), None

    def make(nbytes):
        return run.empty(nbytes)

    def keep(tensor, step):
        kept.append(tensor)
        run.tell_block("keep", tensor, kind=args.kind, step=step, line=sys._getframe(1).f_lineno)

    for step in range(1, args.steps + 1):
        run.tell("step", step=step)
        with run.range("step start"):
            run.empty(256 * KIB).add_(1)
            if args.kind == "varying" and step % 4 == 2:
                keep(run.empty((1 + step * 7 % 31) * 16 * KIB), step)
            if args.kind == "helper":
                ring.append(make(64 * KIB))
                keep(make(64 * KIB), step)
                if step % 2 == 0:
                    keep(make(64 * KIB), step)
            if args.kind == "concat":
                new = run.empty(32 * KIB)
                cache = new if cache is None else run.torch.cat([cache, new])
            if args.kind == "filled" and step <= args.steps // 4:
                keep(run.empty(64 * KIB), step)
    run.end()


main()
