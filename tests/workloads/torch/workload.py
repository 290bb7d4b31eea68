"""What the torch workloads have in common: options, waiting, and the truth file.

The truth is one JSON object a line, with the time (CLOCK_MONOTONIC, nanoseconds) and the event. Steps count
from 1. Sizes are bytes; `nbytes` of a tensor is what it asked for, its block in the pool is a multiple of 512.
"""

import argparse
import json
import os
import sys
import time

MIB = 1 << 20
KIB = 1 << 10


def options(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--truth", metavar="FILE", help="write the truth there, not to the standard output")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--wait-file", metavar="FILE", help="begin only when this file exists")
    parser.add_argument(
        "--end", choices=["return", "os-exit"], default="return", help="how the process ends: os._exit runs no cleanup"
    )
    return parser


class Workload:
    """One run. torch is imported here, so that `--help` does not wait for it.

    `warm`: runs an operator before it says that it is ready, so that CANN's operator libraries are there by then.
    """

    def __init__(self, args, warm=False):
        import torch
        import torch_npu

        self.torch, self.npu, self.args = torch, torch_npu.npu, args
        self.out = open(args.truth, "w", buffering=1) if args.truth else sys.stdout
        torch.manual_seed(0)
        self.npu.set_device(args.device)
        if warm:
            torch.ones(1, device="npu").add_(1)
        self.tell("ready", pid=os.getpid())
        while args.wait_file and not os.path.exists(args.wait_file):
            time.sleep(0.005)

    def tell(self, event, **fields):
        print(json.dumps({"event": event, "ns": time.monotonic_ns(), **fields}), file=self.out, flush=True)

    def tell_block(self, event, tensor, **fields):
        self.tell(event, ptr=tensor.data_ptr(), nbytes=tensor.nbytes, **fields)

    @staticmethod
    def stack():
        """The frames of the caller, innermost first: file, function, line."""
        frame, frames = sys._getframe(1), []
        while frame:
            code = frame.f_code
            function = getattr(code, "co_qualname", code.co_name)
            frames.append({"file": code.co_filename, "function": function, "line": frame.f_lineno})
            frame = frame.f_back
        return frames

    def mark(self, text, **fields):
        """A mark, and what the allocator says at that moment."""
        self.npu.mstx.mark(text)
        device = self.npu.current_device()
        stats = self.npu.memory_stats(device)
        self.tell(
            "mark",
            text=text,
            device=device,
            allocated=self.npu.memory_allocated(device),
            reserved=self.npu.memory_reserved(device),
            active=stats.get("active_bytes.all.current", 0),
            **fields,
        )

    def range(self, text):
        return _Range(self.npu.mstx, text)

    def empty(self, nbytes, device="npu"):
        """A tensor of that many bytes, not filled."""
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device=device)

    def end(self):
        self.tell("end")
        if self.args.end == "os-exit":
            os._exit(0)


class _Range:
    def __init__(self, mstx, text):
        self.mstx, self.text = mstx, text

    def __enter__(self):
        self.id = self.mstx.range_start(self.text)

    def __exit__(self, *error):
        self.mstx.range_end(self.id)
