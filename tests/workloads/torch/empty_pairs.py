"""Allocates and frees small tensors as fast as Python can. Truth: `pairs` with the times of one pair."""

import time

from workload import Workload, options


def main():
    parser = options(__doc__)
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    run = Workload(args)
    empty, device = run.torch.empty, f"npu:{args.device}"
    empty(64, device=device)
    for number in range(args.rounds):
        wall, cpu = time.monotonic_ns(), time.process_time_ns()
        for _ in range(args.pairs):
            tensor = empty(64, device=device)
            del tensor
        wall, cpu = time.monotonic_ns() - wall, time.process_time_ns() - cpu
        run.tell(
            "pairs", round=number, pairs=args.pairs, ns_per_pair=wall / args.pairs, cpu_ns_per_pair=cpu / args.pairs
        )
    run.end()


main()
