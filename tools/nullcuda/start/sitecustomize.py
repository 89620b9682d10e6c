"""The start of every Python process on the null device: as soon as it imports torch (or
TransformerEngine), small tensors get true values.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys

_PREPARED = {
    "torch": "tools.nullcuda.values",
    "transformer_engine.common": "tools.nullcuda.engine",
    "transformer_engine.pytorch.triton.permutation": "tools.nullcuda.engine.permutation",
    "triton.runtime.jit": "tools.nullcuda.triton_values",
    "triton.runtime.autotuner": "tools.nullcuda.triton_values",
    "megatron_stare.numerics.vocab_kernels": "tools.nullcuda.project",
}


class _Loader(importlib.abc.Loader):
    """Loads a module as another loader does, then has it prepared."""

    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        importlib.import_module(_PREPARED[module.__name__]).install(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in _PREPARED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if os.environ.get("NULLCUDA_LIBRARY"):
    sys.meta_path.insert(0, _Finder())
    if os.environ.get("NULLCUDA_WITHOUT_TE"):
        # importing them fails, as where they are not installed
        sys.modules["transformer_engine"] = sys.modules["transformer_engine_torch"] = None
    if os.environ.get("NULLCUDA_LINES"):
        importlib.import_module("tools.nullcuda.lines").start()
