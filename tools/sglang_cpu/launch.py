"""sglang.launch_server with its processes forked off one that has imported everything,
instead of three that import.

Importing is nearly all of a small server's start: this makes it three times cheaper. Forking is
safe here because there is no CUDA context to inherit; everything else about the server is as it
comes.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import block_fp8
import delta_nets
import deterministic

if deterministic.FLAG in sys.argv:  # before SGLang is imported: there is no compiler to count on
    os.environ["TORCHDYNAMO_DISABLE"] = "1"

# What the two processes after the HTTP server run.
import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler  # noqa: F401
import torch

EXPERTS = "--enable-return-routed-experts"
ADAPTERS = "--enable-lora"


def plain_memory(
    dims: tuple[int, ...], dtype: torch.dtype, device: str, **unused: object
) -> torch.Tensor:
    """Stands in a table, by device, of what allocates host memory: CUDA's would count it."""
    return torch.empty(dims, dtype=dtype, device=device)


def ordinary_memory() -> None:
    """Pinned memory needs a driver, and SGLang's adapters ask for it on every device."""
    torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[method-assign,assignment]
    for name in ("arange", "empty", "tensor", "zeros"):
        setattr(torch, name, functools.partial(unpinned, getattr(torch, name)))


def unpinned(make: Callable[..., torch.Tensor], *sizes: Any, **options: Any) -> torch.Tensor:
    """make(*sizes, **options) without `pin_memory`."""
    return make(*sizes, **{name: each for name, each in options.items() if name != "pin_memory"})


def model_config(arguments: list[str]) -> str:
    """The text of the configuration of the model that the server starts with; empty without one,
    as for --help.
    """
    model = dict(itertools.pairwise(arguments)).get("--model-path", "")
    file = Path(model) / "config.json"
    return file.read_text() if file.is_file() else ""


def keep_fork(method: str | None, force: bool = False) -> None:
    """Stands in for multiprocessing.set_start_method, with which the server asks for spawn."""


def absorb() -> None:
    """Latent attention always over the cached latent vectors. For a prompt SGLang would expand keys
    and values, and its attention in torch reads them from the cache, which has none.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        _dispatch_mla_subtype,
    )

    AttentionBackendRegistry.register("torch_native", _dispatch_mla_subtype)


if __name__ == "__main__":
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = keep_fork  # type: ignore[assignment]
    if deterministic.FLAG in sys.argv:
        deterministic.install()
    config = model_config(sys.argv)
    if "weight_block_size" in config:  # its weights are in FP8 blocks
        block_fp8.install()
    if EXPERTS in sys.argv:
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        ALLOC_MEMORY_FUNCS["cpu"] = plain_memory
    if ADAPTERS in sys.argv:
        ordinary_memory()
    if '"linear_attention"' in config:  # some layers are gated delta nets
        delta_nets.install()
        sys.argv += ["--disable-radix-cache"]  # it would copy states by kernels of a GPU
    if '"kv_lora_rank"' in config:  # its attention keeps latent vectors
        absorb()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
