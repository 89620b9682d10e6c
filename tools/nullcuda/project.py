"""The project's own Triton kernels: compiled and launched, their values from their forms in torch,
which are many times faster than Triton's interpreter and tested against it on the CPU.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from tools.nullcuda import triton_values
from tools.nullcuda.memory import aliases, is_small
from tools.nullcuda.values import tensors_of


def install(module: ModuleType) -> None:
    """Around `megatron_stare.numerics.vocab_kernels`."""
    from megatron_stare.numerics import vocab_statistics

    triton_values.COMPUTED_ELSEWHERE |= {"_statistics_kernel", "_gradient_kernel"}
    for name in ("add_tile_", "write_gradient_"):
        setattr(
            module, name, _with_in_torch(getattr(module, name), getattr(vocab_statistics, name))
        )


def _with_in_torch(kernel: Any, in_torch: Any) -> Any:
    @functools.wraps(kernel)
    def launched(*args: Any) -> None:
        kernel(*args)
        if is_small(*tensors_of(args)):
            in_torch(*aliases(args))

    return launched
