"""Memory that a serving framework allocates: functions of its worker, which is made up here, as vLLM-Ascend has them.

No mark says whose memory it is. Truth: `tensor` for each tensor, with the `label` that the functions give it.
"""

import os
import sys
import tempfile

from workload import MIB, Workload, options

RUNNER = '''
class NPUModelRunner:
    def __init__(self, empty):
        self.empty = empty

    def load_model(self):
        return self.empty(8)

    def profile_run(self):
        return self.empty(2)

    def initialize_kv_cache(self):
        return self._allocate(4)

    def _allocate(self, size):
        return [self.empty(size) for _ in range(2)]

    def execute_model(self):
        return self.empty(1)
'''

WORKER = '''
class NPUWorker:
    def __init__(self, runner):
        self.runner = runner

    def load_model(self):
        return self.runner.load_model()

    def compile_or_warm_up_model(self):
        return self.runner.profile_run()

    def execute_model(self):
        return self.runner.execute_model()
'''


def worker(empty):
    packages = tempfile.mkdtemp()
    directory = os.path.join(packages, "vllm_ascend", "worker")
    os.makedirs(directory)
    for name, text in [("model_runner_v1.py", RUNNER), ("worker_v1.py", WORKER)]:
        with open(os.path.join(directory, name), "w") as file:
            file.write(text)
    sys.path.insert(0, packages)
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner
    from vllm_ascend.worker.worker_v1 import NPUWorker

    runner = NPUModelRunner(empty)
    return NPUWorker(runner), runner


def main():
    workload = Workload(options(__doc__).parse_args(), warm=True)
    worker_, runner = worker(lambda mib: workload.empty(mib * MIB))
    held = []

    def tell(label, tensors):
        for tensor in tensors if isinstance(tensors, list) else [tensors]:
            held.append(tensor)
            workload.tell_block("tensor", tensor, label=label)

    tell("vllm@weights", worker_.load_model())
    tell("vllm@profile", runner.profile_run())
    tell("vllm@warmup@vllm@profile", worker_.compile_or_warm_up_model())
    tell("vllm@kv_cache", runner.initialize_kv_cache())
    tell("vllm@serve", worker_.execute_model())
    with workload.range("request"):
        tell("request@vllm@serve", worker_.execute_model())
    tell(None, workload.empty(16 * MIB))
    workload.mark("end")
    workload.end()


if __name__ == "__main__":
    main()
