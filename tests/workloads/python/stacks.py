"""Allocates device memory from all sorts of Python functions, without torch. Truth: one JSON object a line with the
address of each block and the frames that it was allocated in, as the interpreter has them.

Runs on every Python from 3.8 on.
"""

import argparse
import asyncio
import contextlib
import ctypes
import functools
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
parser.add_argument("--rounds", type=int, default=2)
args = parser.parse_args()

# A call through the first lets go of the GIL, one through the second holds it.
LIBRARIES = {"released": ctypes.CDLL(args.library), "held": ctypes.PyDLL(args.library)}
out = open(args.truth, "w", buffering=1)
lock = threading.Lock()
size = 0


def tell(event, **fields):
    with lock:
        print(json.dumps({"event": event, **fields}), file=out)


def allocate(kind):
    for gil, library in LIBRARIES.items():
        pointer = ctypes.c_void_p()
        # The truth and the call on one line: the innermost frame is to be the same.
        status, truth = library.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t(4096), 0), here()
        assert status == 0, status
        tell("block", kind=kind, gil=gil, ptr=pointer.value, python=truth)


def here():
    return frames(sys._getframe(1))


def recurse(depth, kind):
    if depth:
        recurse(depth - 1, kind)
    else:
        allocate(kind)


def generator(kind):
    allocate(kind)
    yield 1
    # Another line, and the generator has been away meanwhile.
    allocate(kind)
    yield 2


def delegating(kind):
    yield from generator(kind)


def decorator(function):
    @functools.wraps(function)
    def wrapper(*arguments, **named):
        return function(*arguments, **named)

    return wrapper


class Base:
    def __init__(self, kind):
        allocate(kind)


class Derived(Base):
    def __init__(self, kind):
        super().__init__(kind)
        self.kind = kind

    @property
    def value(self):
        allocate(self.kind + " property")

    @staticmethod
    def static(kind):
        allocate(kind)

    @classmethod
    def of_class(cls, kind):
        return cls(kind)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        allocate("__getattr__")

    @decorator
    def decorated(self):
        class Inner:
            def method(self):
                (lambda: allocate("lambda in a method of a local class"))()

        Inner().method()

    def größe_меняется_大小(self):
        allocate("names in other alphabets")


@contextlib.contextmanager
def manager():
    allocate("entering a context")
    try:
        yield
    finally:
        allocate("leaving a context")


async def coroutine(depth):
    if depth:
        await asyncio.sleep(0)
        return await coroutine(depth - 1)
    allocate("coroutine")


def on_lines(kind):
    # Statements over several lines, and far from the function's first line.
    values = [
        1,
        2,
        allocate(kind) or
        3,
    ]
    for _ in values[:1]:
        try:
            raise ValueError(kind)
        except ValueError:
            allocate(kind)
        finally:
            allocate(kind)
    return functools.reduce(
        lambda total, value: total + (allocate(kind) or value),
        [1],
        0,
    )


def long_function():
    source = "def far(kind):\n" + "    x = 0\n" * 700 + "    allocate(kind)\n"
    scope = {"allocate": allocate}
    exec(compile(source, "<made of \u5b57 and \U0001f40d>", "exec"), scope)
    # Kept: what is freed before it is read can have no name.
    kept.append(scope)
    scope["far"]("far down in made code")


kept = []


def everything():
    allocate("function")
    recurse(40, "recursion")
    list(delegating("generator"))
    [allocate("comprehension") for _ in range(1)]
    sorted([2], key=lambda _: allocate("key of sorted") or 0)
    Derived.static("static method")
    thing = Derived.of_class("class method")
    thing.value
    thing.missing
    thing.decorated()
    getattr(thing, "größe_меняется_大小")()
    with manager():
        allocate("inside a context")
    asyncio.run(coroutine(3))
    on_lines("lines")
    long_function()


def worker():
    assert LIBRARIES["released"].aclrtSetDevice(0) == 0
    everything()


def main():
    library = LIBRARIES["released"]
    assert library.aclInit(None) == 0 and library.aclrtSetDevice(0) == 0
    tell("ready", version=sys.version, pid=os.getpid())
    while not os.path.exists(args.wait_file):
        time.sleep(0.005)
    for _ in range(args.rounds):
        everything()
    threads = [threading.Thread(target=worker, name=f"worker {n}") for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tell("end")
    # Until the tracer has read what the names are.
    time.sleep(0.5)
    os._exit(0)


main()
