"""Stands in for SGLang's kernel wheels, which hold CUDA code only.

SGLang imports kernels by name wherever it might need one. With the torch_native attention backend
and the pytorch sampling backend it calls one alone: the hash of its deterministic mode, which is
here (../../deterministic.py). It takes other submodules' absence as a word that they are not there.
"""

import absent
import torch

absent.install("sgl_kernel", ("speculative", "mamba", "kvcacheio"))

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")


def _hash(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    import deterministic

    return deterministic.murmur_hash(seed, positions, columns)


_library.impl("murmur_hash32_cpu", _hash, "CPU")
