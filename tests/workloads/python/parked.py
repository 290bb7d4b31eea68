"""Allocates device memory on two threads, each of which then waits on the very line that it has allocated on, until the
standard input ends. Truth: one JSON object a line with the address of each block.

Runs on every Python from 3.8 on.
"""

import argparse
import ctypes
import json
import os
import threading
import time

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--library", required=True, help="the library with aclrtMalloc")
parser.add_argument("--truth", required=True, metavar="FILE")
parser.add_argument("--wait-file", required=True, metavar="FILE", help="begin only when this file exists")
args = parser.parse_args()

cann, c = ctypes.CDLL(args.library), ctypes.CDLL(None)
out = open(args.truth, "w", buffering=1)
lock = threading.Lock()


def tell(event, **fields):
    with lock:
        print(json.dumps({"event": event, **fields}), file=out)


class Place:
    def park(self, thread):
        block, byte = ctypes.c_void_p(), ctypes.create_string_buffer(1)
        # On one line: whoever looks at the waiting thread is to see the frames of the allocation.
        cann.aclrtMalloc(ctypes.byref(block), 4096, 0), tell("block", ptr=block.value, thread=thread), c.read(0, byte, 1)


def generator(thread):
    yield (lambda: Place().park(thread))()


def recurse(depth, thread):
    return recurse(depth - 1, thread) if depth else list(generator(thread))


def work():
    assert cann.aclrtSetDevice(0) == 0
    recurse(3, "worker")


def main():
    assert cann.aclInit(None) == 0 and cann.aclrtSetDevice(0) == 0
    tell("ready", pid=os.getpid())
    while not os.path.exists(args.wait_file):
        time.sleep(0.005)
    worker = threading.Thread(target=work)
    worker.start()
    recurse(20, "main")
    worker.join()
    tell("end")


main()
