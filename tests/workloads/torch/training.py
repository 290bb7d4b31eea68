"""Trains a small network as fast as the host can, or as the device can when it is waited for after each step.

For each line of the standard input, so many steps. Truth: `training` with the times of a step.
"""

import sys
import time

from workload import Workload, options


def main():
    parser = options(__doc__)
    parser.add_argument("--wait", action="store_true", help="wait for the device at the end of each step")
    args = parser.parse_args()
    run = Workload(args)
    torch = run.torch
    widths = [64] * 5
    layers = [layer for pair in zip(widths, widths[1:]) for layer in (torch.nn.Linear(*pair), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).to("npu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch, target = torch.randn(16, 64).to("npu"), torch.randn(16, 64).to("npu")

    def train(steps):
        for _ in range(steps):
            with run.range("step start"):
                loss = torch.nn.functional.mse_loss(model(batch), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if args.wait:
                    run.npu.synchronize()

    train(10)
    run.tell("trained")
    for line in sys.stdin:
        steps = int(line)
        train(10)
        wall, cpu = time.monotonic_ns(), time.process_time_ns()
        train(steps)
        wall, cpu = time.monotonic_ns() - wall, time.process_time_ns() - cpu
        run.tell("training", steps=steps, ns_per_step=wall / steps, cpu_ns_per_step=cpu / steps)
    run.end()


main()
