"""True values for small tensors: every operation on the device is also done on the CPU, over the
same memory.

torch's own code runs in full first: dispatcher, device and shape checks, allocator, launches,
waits. Then, where no tensor has more than LIMIT elements, the CPU computes what the kernels did
not. With a larger tensor nothing is computed; small new results are then zero, so that what reads
them (counts, flags) reads something definite.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Iterable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import TorchDispatchMode

from tools.nullcuda.generators import as_default, on_cpu
from tools.nullcuda.library import library
from tools.nullcuda.memory import (
    alias,
    aliases,
    is_small,
    leaves,
    mapped,
    on_device,
    placed,
    write,
)
from tools.nullcuda.operators import OPERATORS

# Operations without values, or whose values copies already are.
_UNTOUCHED = {"record_stream", "_local_scalar_dense", "set_", "resize_", "_pin_memory", "is_pinned"}
_UNTOUCHED |= {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Operations whose result has a shape that depends on values: CUDA waits for the count.
_SHAPED = {"nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount"}
_SHAPED |= {"repeat_interleave", "equal"}
# (operator, why the CPU has no value for it) -> how often, in this process
not_computed: collections.Counter[tuple[str, str]] = collections.Counter()


class Values(TorchDispatchMode):
    """See the module. Every operation enters it: its overhead is most of a small run."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # torch's own way to the same takes a third of an operation's time

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, Tensor) and kind not in _PLAIN for kind in types):
            return NotImplemented  # the tensor's own class unfolds it first
        given = [*leaves(args), *leaves(kwargs)]
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        held = [tensor for tensor in tensors if tensor.device.type == "cuda"]
        name = func._schema.name.removeprefix("aten::")
        if not held and not any(map(_is_cuda, given)):
            return func(*args, **kwargs)
        if _is_composite(func):  # as under inference mode
            with self:
                return func.decompose(*args, **kwargs)
        if func.namespace not in _TORCHS:  # written in Python, of operations that have values
            with self:
                return func.redispatch(_DEVICE, *args, **kwargs)
        if func.is_view or name in _UNTOUCHED or func.namespace != "aten":
            return func(*args, **kwargs)
        if not is_small(*tensors):
            return _without_values(func, args, kwargs, held)
        if name in _SHAPED or (name == "index" and _has_mask(args)):
            return _shaped_by_values(func, args, kwargs, held)
        if "index_put" in name and _has_mask(args):
            library().nullcuda_waited()
            result = func(*aliases(args), **aliases(kwargs))
            return args[0] if func._schema.is_mutable else placed(result, held[0].device)
        return _with_values(func, name, args, kwargs, held)


# torch.compile must not trace what stands for kernels.
_SKIP = eval_frame._FrameAction.SKIP
eval_frame.set_code_exec_strategy(
    Values.__torch_dispatch__.__code__, eval_frame._FrameExecStrategy(_SKIP, _SKIP)
)
_TORCHS = {"aten", "prims", "c10d", "_c10d_functional", "profiler", "inductor"}
_DEVICE = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _is_cuda(leaf: Any) -> bool:
    return isinstance(leaf, torch.device) and leaf.type == "cuda"


@functools.cache
def _is_composite(func: Any) -> bool:
    return func._can_decompose() and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )


@functools.cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _has_mask(args: tuple[Any, ...]) -> bool:
    return any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
        for index in (args[1] if len(args) > 1 else ())
    )


def _without_values(func: Any, args: Any, kwargs: Any, held: list[Tensor]) -> Any:
    out = func(*args, **kwargs)
    _zero_fresh(leaves(out), held)
    return out


def _zero_fresh(outputs: Iterable[Any], held: list[Tensor]) -> None:
    """Zero the small results that lie in no argument's memory."""
    known = {tensor.untyped_storage().data_ptr() for tensor in held}
    for tensor in outputs:
        fresh = on_device(tensor) and tensor.untyped_storage().data_ptr() not in known
        if fresh and tensor.numel() and is_small(tensor):
            alias(tensor).zero_()


def _shaped_by_values(func: Any, args: Any, kwargs: Any, held: list[Tensor]) -> Any:
    if kwargs.get("output_size") is None:
        library().nullcuda_waited()
    device = held[0].device
    result = func(*aliases(args), **aliases(kwargs))
    return mapped(lambda leaf: placed(leaf, device) if isinstance(leaf, Tensor) else leaf, result)


def _with_values(func: Any, name: str, args: Any, kwargs: Any, held: list[Tensor]) -> Any:
    if torch.Tag.inplace_view in func.tags:  # another shape of the same memory
        return func(*args, **kwargs)
    kept = [(tensor, alias(tensor).clone()) for tensor in _mutated(func, args, kwargs)]
    host_args, host_kwargs = _host(args), _host(kwargs)
    draws = as_default(torch.cuda.current_device()) if _is_random(func) else nullcontext()
    out = func(*args, **kwargs)  # raises what CUDA would
    for tensor, before in kept:  # CUDA's own copies within an operation carried no values
        write(tensor, before)
    outputs = tensors_of(out)
    if not is_small(*outputs):
        return out
    compute = OPERATORS.get(f"{name}.{func._overloadname}") or OPERATORS.get(name) or func
    try:
        with draws:
            result = compute(*host_args, **host_kwargs)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        not_computed[name, str(error)[:120]] += 1
        _zero_fresh(outputs, held)
        return out
    for tensor, value in zip(outputs, tensors_of(result), strict=False):
        if tensor.shape != value.shape:
            continue  # what a kernel keeps for its own backward
        if tensor.device.type == "cuda":
            write(tensor, value)
        elif tensor.data_ptr() != value.data_ptr():
            tensor.copy_(value)
    return out


def tensors_of(values: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]


def _mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors of the device that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written += [leaf for leaf in leaves(value) if on_device(leaf)]
    return written


def _host(values: Any) -> Any:
    """Arguments for the CPU."""

    def on_host(value: Any) -> Any:
        if on_device(value):
            return alias(value)
        if _is_cuda(value):
            return torch.device("cpu")
        return on_cpu(value) if isinstance(value, torch.Generator) else value

    values = mapped(on_host, values)
    if isinstance(values, dict):
        values.pop("pin_memory", None)
    return values


def install(module: ModuleType) -> None:
    """Every thread of this process, from now on."""
    module.backends.cuda.enable_cudnn_sdp(False)  # its library looks for a GPU of its own accord
    Values().__enter__()
    run = threading.Thread.run

    @functools.wraps(run)
    def run_with_values(self: threading.Thread) -> None:
        with Values():
            run(self)

    threading.Thread.run = run_with_values  # type: ignore[method-assign]
    plain = Tensor.__repr__

    @functools.wraps(plain)
    def readable(self: Tensor, **kwargs: Any) -> str:
        """torch leaves every mode while it prints, and would print what was not computed."""
        if type(self) not in _PLAIN or not on_device(self) or not is_small(self):
            return plain(self, **kwargs)
        return f"{plain(alias(self.detach()))[:-1]}, device='{self.device}')"

    Tensor.__repr__ = readable  # type: ignore[method-assign]
