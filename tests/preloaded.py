"""The slow imports of ranks and commands, done once by the process that they are forked from."""

import contextlib
import gc
import importlib
import os

import torch

from megatron_stare.policy import runtime

count = getattr(torch._C, "_cuda_getDeviceCount", None)
if os.environ.get("NULLCUDA_LIBRARY"):  # after this question to CUDA a process must not fork
    torch._C._cuda_getDeviceCount = lambda: 8
runtime.prepare()  # before any import of megatron.core
for name in (
    "transformers",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel",
    "megatron_stare.__main__",
    "megatron_stare.compare.compare",
    "megatron_stare.loop.trainer",
    "hypothesis",
    "pytest",
    "tests.small_run",
):
    with contextlib.suppress(Exception):  # a test will report the error
        importlib.import_module(name)
if count is not None:
    torch._C._cuda_getDeviceCount = count
gc.collect()
gc.freeze()  # else a collection in each process would visit, and so copy, the memory of all imports
