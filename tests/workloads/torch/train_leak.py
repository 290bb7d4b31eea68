"""A training loop that leaks, among much that only looks like a leak.

Every step is an mstx range "step start" with the ranges forward, backward and optimizer inside, and ends with
a mark. Truth: `step` when one begins, `leak` for each block that stays for good, with the stack on which it was allocated, or on which its
backward pass was called; `keep` and `drop` for those that are let go of.
"""

import collections
import math
import os
import time

from workload import KIB, MIB, Workload, options

CACHE_ENTRIES = 4
LATE_STEPS = 3
RING_BATCHES = 3
STATE_STEP = 5


def build(torch, name):
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)).to("npu")
    if name == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def main():
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=12, help="0: until the stop file exists")
    parser.add_argument("--stop-file", metavar="FILE", help="end after the step in which this file appears")
    parser.add_argument("--step-ms", type=float, default=0, help="shortest duration of a step")
    parser.add_argument("--pause-ms", type=float, default=0, help="pause so long at the end of each step")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--last-block", action="store_true", help="allocate 64 MiB in the last step")
    parser.add_argument("--no-leaks", action="store_true")
    parser.add_argument("--leak-gradients", action="store_true", help="keep a gradient every 4 steps")
    parser.add_argument("--no-marks", action="store_true", help="no step ranges and no marks")
    parser.add_argument("--empty-cache", action="store_true", help="give free segments back after the last step")
    parser.add_argument("--exit-in-step", type=int, metavar="STEP", help="os._exit between forward and backward")
    args = parser.parse_args()
    run = Workload(args)
    torch = run.torch
    if args.no_marks:
        run.npu.mstx.mark = run.npu.mstx.range_end = lambda *_: None
        run.npu.mstx.range_start = lambda *_: 0

    model, optimizer = build(torch, args.optimizer)
    leaked, state = [], []
    raw = {"dtype": torch.uint8, "device": "npu"}
    cache = collections.OrderedDict()
    late, ring = collections.deque(), collections.deque(maxlen=RING_BATCHES)

    def drop(kind, tensor, step):
        run.tell_block("drop", tensor, kind=kind, step=step)

    def keep(kind, nbytes, step):
        tensor = run.empty(nbytes)
        run.tell_block("keep", tensor, kind=kind, step=step)
        return tensor

    def leak(tensor, step, **stack):
        leaked.append(tensor)
        run.tell_block("leak", tensor, step=step, **stack)

    def is_last(step):
        return step == args.steps or bool(args.stop_file and os.path.exists(args.stop_file))

    run.mark("before the first step")
    step = 0
    while True:
        step += 1
        last = is_last(step)
        begin = time.monotonic()
        run.tell("step", step=step, cpu_ns=time.process_time_ns())
        with run.range("step start"):
            batch, target = torch.randn(64, 256).to("npu"), torch.randn(64, 256).to("npu")
            if len(ring) == RING_BATCHES:
                drop("ring", ring[0], step)
            ring.append(batch)
            run.tell_block("keep", batch, kind="ring", step=step)
            with run.range("forward"):
                loss = torch.nn.functional.mse_loss(model(batch), target)
            if step == args.exit_in_step:
                run.tell("exit", step=step)
                os._exit(3)
            with run.range("backward"):
                optimizer.zero_grad()
                _, stack = loss.backward(), run.stack()
                if step % 4 == 0 and args.leak_gradients:
                    leak(model[0].weight.grad, step, via=stack)
            with run.range("optimizer"):
                optimizer.step()

            key = step % (CACHE_ENTRIES + 2)
            cache[key] = keep("cache", (1 + step % 3) * 256 * KIB, step)
            while len(cache) > CACHE_ENTRIES:
                drop("cache", cache.popitem(last=False)[1], step)
            late.append(keep("late", 2 * MIB, step))
            if len(late) > LATE_STEPS:
                drop("late", late.popleft(), step)
            if step == STATE_STEP:
                state.append(keep("state", 8 * MIB, step))
            if args.last_block and last:
                state.append(keep("last", 64 * MIB, step))
            # Each leak and its truth on one line: their stacks are to be the same.
            if step % 4 == 2 and not args.no_leaks:
                leak(torch.empty(3 * MIB, **raw), step, python=run.stack())
            if step % 3 == 1 and not args.no_leaks:
                leak(torch.empty(3 * MIB // 2, **raw), step, python=run.stack())
            if step % 5 == 3 and not args.no_leaks:
                leak(torch.empty(96 * KIB, **raw), step, python=run.stack())

            value = loss.item()
            remaining = args.step_ms / 1000 - (time.monotonic() - begin)
            time.sleep(max(remaining, args.pause_ms / 1000))
            run.mark(f"end of step {step}", step=step, loss=value if math.isfinite(value) else None)
        if last:
            break
    if args.empty_cache:
        run.npu.empty_cache()
        run.tell("emptied", allocated=run.npu.memory_allocated(), reserved=run.npu.memory_reserved())
    run.end()


main()
