"""True values for TransformerEngine's kernels on small tensors, those of fp8 included.

Its bindings run in full: checks, allocations, launches. Then the functions of this folder compute
what the kernels did not. cuBLASLt's products are computed by the device itself (device/blas.c).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tools.nullcuda.memory import alias, is_small, mapped, on_device
from tools.nullcuda.values import not_computed, tensors_of

# Products, which the device computes; what makes tensors without values of their own.
COMPUTED_BELOW = {"generic_gemm", "te_general_grouped_gemm", "bulk_allocate"}
COMPUTED_BELOW |= {"create_empty_quantized_tensor"}


def install(module: ModuleType) -> None:
    """Around `transformer_engine.common`, which loads the bindings."""
    load = module.load_framework_extension

    @functools.wraps(load)
    def load_framework_extension(framework: str) -> None:
        load(framework)
        if framework == "torch":
            _prepare(sys.modules["transformer_engine_torch"])

    module.load_framework_extension = load_framework_extension


def _prepare(bindings: ModuleType) -> None:
    parts = [
        importlib.import_module(f"{__name__}.{name}")
        for name in ("kernels", "rotation", "fp8", "experts")
    ]
    computed = {name: compute for part in parts for name, compute in part.AFTERWARDS.items()}
    for name, kernel in vars(bindings).copy().items():
        if name in computed:
            setattr(bindings, name, _then(name, kernel, computed[name]))
        elif type(kernel).__name__ == "builtin_function_or_method" and name not in COMPUTED_BELOW:
            setattr(bindings, name, _zeroed(name, kernel))
    importlib.import_module(f"{__name__}.fused_attention").prepare(bindings)


def _zeroed(name: str, kernel: Callable[..., Any]) -> Any:
    """A kernel whose values are not computed: its new small tensors are zero."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        _zero(name, "no values: zero", result, (args, kwargs))
        return result

    return run


def _zero(name: str, reason: str, result: Any, given: Any) -> None:
    """Write zeros to the small tensors of a result that were not given to the kernel."""
    known = {id(tensor) for tensor in tensors_of(given)}
    fresh = [x for x in tensors_of(result) if id(x) not in known and on_device(x)]
    if fresh:
        not_computed[name, reason] += 1
    for tensor in fresh:
        if _is_plain(tensor) and tensor.numel() and is_small(tensor):
            alias(tensor).zero_()


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter)


def _then(name: str, kernel: Callable[..., Any], compute: Callable[..., None]) -> Any:
    """`kernel`, then `compute(result, *args)`, which gets plain tensors as their aliases and
    quantised ones as they are.
    """

    def on_host(values: Any) -> Any:
        return mapped(lambda x: alias(x) if _is_plain(x) and on_device(x) else x, values)

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        if not is_small(*tensors_of((result, args, kwargs))):
            return result
        try:
            with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
                compute(on_host(result), *on_host(args), **on_host(kwargs))
        except NotImplementedError as error:
            _zero(name, str(error), result, (args, kwargs))
        return result

    return run
