"""Lets the CUDA build of torch from PyPI pass for the CPU build that torch_npu is made for.

A `.pth` file in the site-packages imports this at the start of the interpreter. torch asks its extension
module whether it was built with CUDA; the answer is changed as soon as that module is loaded.
"""

from importlib.machinery import ExtensionFileLoader

_load = ExtensionFileLoader.exec_module


def _load_as_cpu_build(loader, module):
    _load(loader, module)
    if module.__name__ == "torch._C":
        ExtensionFileLoader.exec_module = _load
        module._has_cuda = False


ExtensionFileLoader.exec_module = _load_as_cpu_build
