"""Runs programs of this folder in processes that have imported torch already: importing takes longer than they do.

The standard input brings a request a line: {"argv": [FILE, ARGUMENT...], "env": {NAME: VALUE}, "streams": [PATH, PATH,
PATH]}, where the streams are the program's standard ones. The answer is the id of its process, whose parent is the
nearest subreaper. Only what is not read before a device is used can be set in the environment.
"""

import atexit
import gc
import json
import os
import sys

import torch
import torch_npu

MODES = [os.O_RDONLY, os.O_WRONLY, os.O_WRONLY]


def serve():
    """Answers requests. Returns in the process that is to run a program, with its arguments."""
    requests = os.fdopen(os.dup(0))
    gc.freeze()
    print("ready", flush=True)
    for line in requests:
        request = json.loads(line)
        streams = [os.open(path, mode) for path, mode in zip(request["streams"], MODES)]
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for stream in streams:
                os.close(stream)
            continue
        program = os.fork()
        if program:
            print(program, flush=True)
            os._exit(0)
        requests.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.update(request["env"])
        return request["argv"]
    sys.exit()


sys.argv = serve()
with open(sys.argv[0]) as file:
    code = compile(file.read(), sys.argv[0], "exec")
# Kept to the end, as those of a program that was started are.
program = {"__name__": "__main__", "__file__": sys.argv[0]}
exec(code, program)
# To go through all that was imported once more, in memory that is shared, would take as long as importing.
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(0)
