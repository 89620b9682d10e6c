"""Preparation of unpatched Megatron-Core 0.19 for a machine without CUDA; with CUDA, of torch's
own cuDNN for TransformerEngine.

Megatron names its device outright: `torch.cuda.current_device()`, `device="cuda"`, `Tensor.type()
== "torch.cuda.FloatTensor"`, streams, events and the CUDA generator. On a CPU each of these gets
the CPU's answer, so the same training code runs over gloo, whose collectives also get shards of
unequal length. Only the factory functions that Megatron calls with a device are wrapped; a
TorchFunctionMode would do the same and tax every single operation.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device
from torch import Tensor

_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "empty_like",
    "zeros_like",
    "ones_like",
)
_installed = False


def device() -> torch.device:
    """The device of this process: its CUDA device, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def prepare() -> None:
    """Make Megatron-Core runnable here. Call it before any import of megatron.core; idempotent."""
    global _installed
    # Banners about packages that are optional here; real faults raise.
    for name in ("megatron.core", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="megatron|torch.distributed.checkpoint")
    if torch.cuda.is_available():
        load_torchs_cudnn()
        return
    if _installed:
        return
    _installed = True
    # TransformerEngine computes on GPUs alone. Where it cannot be imported, Megatron-Core takes its
    # own optimizer and norms of gradients.
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]
    sys.modules.setdefault("transformer_engine_torch", None)  # type: ignore[arg-type]
    _answer_for_device()
    _answer_for_streams()
    with _nothing_compiled():
        from megatron.core import jit
    jit.disable_jit_fuser()
    _answer_for_random_state()
    _answer_for_collectives()


@functools.cache
def load_torchs_cudnn() -> None:
    """Load the cuDNN that torch was installed with before TransformerEngine, if that is installed,
    loads another one: it prefers that of the system. Two versions in one process fail, and one
    before 9.18 computes NaN in the backward pass of packed attention.
    """
    nvidia = importlib.util.find_spec("nvidia")
    if nvidia is None or importlib.util.find_spec("transformer_engine") is None:
        return
    for root in map(Path, nvidia.submodule_search_locations or ()):
        for library in sorted(root.glob("cudnn/lib/libcudnn*.so.*")):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
            os.environ.setdefault("CUDNN_HOME", str(root / "cudnn"))


@contextlib.contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Megatron decorates functions with torch.compile as it is imported: that alone imports the
    compiler, for seconds, and to call one would run a C++ compiler for minutes.
    """
    compiling = torch.compile
    _replace(torch, compile=lambda function: function)
    try:
        yield
    finally:
        _replace(torch, compile=compiling)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)  # there is no device to copy to
        return factory(*args, **kwargs)

    return wrapped


def _replace(owner: Any, **answers: Any) -> None:
    for name, answer in answers.items():
        setattr(owner, name, answer)


def _answer_for_device() -> None:
    cpu = torch.device("cpu")
    # torch caches the factories that `with torch.device(...)` redirects; cached after the wrapping
    # it would know only our wrappers, and transformers' meta-device loading would leave buffers
    # uninitialised.
    torch.utils._device._device_constructors()
    _replace(
        torch.cuda,
        current_device=lambda: cpu,
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
    )
    _replace(torch, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})
    plain_type = torch.Tensor.type

    def cuda_spelling(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = plain_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    _replace(torch.Tensor, type=cuda_spelling, cuda=lambda self, *args, **kwargs: self)


class _Idle:
    """A stream or event with nothing to order: the CPU runs in program order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    record = wait = synchronize = wait_event = wait_stream = _nothing

    def record_event(self, event: _Idle | None = None) -> _Idle:
        return event or self

    def query(self) -> bool:
        return True


def _answer_for_streams() -> None:
    _replace(
        torch.cuda,
        Stream=_Idle,
        Event=_Idle,
        stream=_Idle,
        current_stream=lambda device=None: _Idle(),
        default_stream=lambda device=None: _Idle(),
    )
    _replace(torch.cuda.nvtx, range_push=lambda message: None, range_pop=lambda: None)


def _answer_for_random_state() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    _replace(
        torch.cuda,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
    )
    _replace(
        megatron_random,
        _get_cuda_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
    )


def _answer_for_collectives() -> None:
    """Tokens go to experts in unequal shares, which NCCL exchanges and gloo refuses."""
    exchange, gather, scatter = dist.all_to_all_single, dist.all_gather, dist.reduce_scatter

    def all_to_all_single(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **rest: Any,
    ) -> Any:
        return exchange(
            output, input, _counts(output_split_sizes), _counts(input_split_sizes), **rest
        )

    def all_gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, **rest: Any
    ) -> Any:
        if _are_alike(tensor_list):
            return gather(tensor_list, tensor, group=group, **rest)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for rank, share in enumerate(tensor_list):
            dist.broadcast(share, dist.get_global_rank(group, rank), group=group)
        return None

    def reduce_scatter(
        output: Tensor, input_list: list[Tensor], group: Any = None, **rest: Any
    ) -> Any:
        if _are_alike(input_list):
            return scatter(output, input_list, group=group, **rest)
        for rank, share in enumerate(input_list):
            total = share.clone()
            dist.reduce(total, dist.get_global_rank(group, rank), group=group, **rest)
            if rank == dist.get_rank(group):
                output.copy_(total)
        return None

    _replace(
        dist,
        all_to_all_single=all_to_all_single,
        all_gather=all_gather,
        reduce_scatter=reduce_scatter,
    )


def _counts(split_sizes: Any) -> list[int] | None:
    """Megatron leaves them a tensor where there is no device to fetch it from."""
    return None if split_sizes is None else [int(size) for size in split_sizes]


def _are_alike(shares: list[Tensor]) -> bool:
    return all(share.shape == shares[0].shape for share in shares)
