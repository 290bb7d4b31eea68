"""Forks processes that allocate device memory at once, each from code of its own as well. Truth: one JSON object a line
with the process and address of each block and the frames that it was allocated in, as the interpreter has them.

Runs on every Python from 3.8 on.
"""

import argparse
import ctypes
import json
import os
import sys
import threading
import time

from frames import frames

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--library", required=True, help="the library with aclrtMalloc")
parser.add_argument("--truth", required=True, metavar="FILE")
parser.add_argument("--wait-file", required=True, metavar="FILE", help="begin only when this file exists")
parser.add_argument("--end-file", required=True, metavar="FILE", help="end only when this file exists")
parser.add_argument("--children", type=int, default=40)
args = parser.parse_args()

library = ctypes.CDLL(args.library)
# Appended to by all.
out = open(args.truth, "a", buffering=1)
lock = threading.Lock()


def tell(event, **fields):
    with lock:
        print(json.dumps({"event": event, "pid": os.getpid(), **fields}), file=out)


def here():
    return frames(sys._getframe(1))


def allocate(kind):
    pointer = ctypes.c_void_p()
    # The call and the truth on one line: the innermost frame is to be the same.
    status, truth = library.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t(4096), 0), here()
    assert status == 0, status
    tell("block", kind=kind, ptr=pointer.value, python=truth)


def made(number):
    """A function that other processes have at the same place under another name."""
    source = f"def made_{number:03}(kind):\n    allocate(kind)\n"
    scope = {"allocate": allocate}
    exec(compile(source, f"<made {number:03}>", "exec"), scope)
    return scope[f"made_{number:03}"]


def child(number):
    allocate("first")
    function = made(number)
    function("own code")
    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    function("own code again")


def in_thread():
    assert library.aclrtSetDevice(0) == 0
    allocate("thread")


def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.005)


def main():
    # It is the tracer's business, not CANN's, that is done across the fork: the simulated one allows it.
    assert library.aclInit(None) == 0 and library.aclrtSetDevice(0) == 0
    tell("ready")
    wait_for(args.wait_file)
    allocate("before")
    # Held open by this process alone: it reads as ended when this one has.
    reading, writing = os.pipe()
    children = []
    for number in range(args.children):
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            # Children of children, of a parent that has not been looked at either.
            grandchild = os.fork() if number % 4 == 0 else None
            child(number if grandchild is None else number + args.children)
            os.read(reading, 1)
            if grandchild:
                os.waitpid(grandchild, 0)
            os._exit(0)
        children.append(pid)
    wait_for(args.end_file)
    os.close(writing)
    for pid in children:
        os.waitpid(pid, 0)
    tell("end")
    os._exit(0)


main()
