"""Prints a code object a line: the lines of its instructions, as this interpreter knows them.

    for python in python3.8 ... python3.13; do $python lines.py; done > lines.jsonl
"""

import dis
import json
import sys

SOURCE = '''
def loops(a,
          b):
    for x in a:
        if x:
            continue
        y = (x +
             b)
        while y:
            try:
                y -= 1
                raise KeyError(
                    y,
                )
            except (KeyError,
                    ValueError) as e:
                print(e); y -= 2
            finally:
                z = lambda: [
                    y for y in
                    a]
    with open(a) as f, open(
            b) as g:
        yield f
    return {k: v
            for k, v in b}
''' + "\n" * 300 + '''
def far(x):
    return (x

''' + "\n" * 140 + '''
            + 1)

class Backwards:
    name = [
        1, 2,
        3][
        0]

    async def wait(self, other):
        async with other as o:
            await o
        return await other.go(
            a=1,
            b=await other)
'''


def lines(code):
    """The line of each instruction; None where it has none."""
    if hasattr(code, "co_lines"):
        found = {}
        for start, end, line in code.co_lines():
            for offset in range(start, end, 2):
                found[offset] = line
        return found
    starts, found, line = dict(dis.findlinestarts(code)), {}, code.co_firstlineno
    for offset in range(0, len(code.co_code), 2):
        line = starts.get(offset, line)
        found[offset] = line
    return found


def show(code):
    table = code.co_linetable if hasattr(code, "co_linetable") else code.co_lnotab
    print(
        json.dumps(
            {
                "minor": sys.version_info[1],
                "name": code.co_name,
                "first": code.co_firstlineno,
                "table": table.hex(),
                "lines": [line for _, line in sorted(lines(code).items())],
            }
        )
    )
    for constant in code.co_consts:
        if hasattr(constant, "co_code"):
            show(constant)


show(compile(SOURCE, "sample.py", "exec"))
