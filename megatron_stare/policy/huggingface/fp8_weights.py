"""Which matrices are in blocks of E4M3 (block_fp8.py): in the trainer, on servers and on disk.

*Rounded weights* (quantisation-aware training):

    W = decode(encode(bf16(M))),  M <- M - step(dL/dW)

M is the optimizer's fp32 copy, which bf16 training has anyway. The model holds, computes with,
saves and sends W; the gradient by W moves M as if nothing had been rounded (the straight-through
estimator, arXiv 1308.3432). After every optimizer step `RoundedWeights` rounds the weights in
place. A matrix's blocks are those of the whole Hugging Face matrix: q, k, v, gate and up have their
own, and ranks that split a matrix split it between blocks.

*FP8 servers and checkpoints* hold codes and scales of the same matrices. `EncodedWeights` makes
them of a stream of weights on its way. Encoding W gives W to the last bit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_stare.config import Config, PolicyConfig, UserError
from megatron_stare.policy.huggingface.block_fp8 import BLOCK, SCALE, decode, encode, rounded
from megatron_stare.policy.huggingface.families import (
    has_delta_nets,
    megatron_fields,
    sparse_layers,
)
from megatron_stare.policy.huggingface.names import ParameterMapping, name_table
from megatron_stare.policy.huggingface.weights import named_parameters
from megatron_stare.policy.topology import expert_tensor_size

EXPERTS_ONLY = "fp8_experts"  # the value of policy.weight_quantization


def _entries(hf: PretrainedConfig, experts_only: bool) -> Iterator[ParameterMapping]:
    """The linear layers' weights, or those of routed experts alone. Embedding, head and routers are
    not among them.
    """
    for entry in name_table(hf):
        if len(entry.shapes[0]) != 2 or entry.layout == "vocab" or ".router." in entry.megatron:
            continue
        if entry.expert is not None or not experts_only:
            yield entry


def block_matrices(hf: PretrainedConfig, *, experts_only: bool = False) -> frozenset[str]:
    """Hugging Face names of the linear layers' weights, or of the routed experts' alone."""
    return frozenset(name for entry in _entries(hf, experts_only) for name in entry.hf)


def quantization_config(hf: PretrainedConfig, encoded: Collection[str]) -> dict[str, Any]:
    """The entry of config.json where `encoded` are in blocks; inputs are rounded by the server, by
    scales of their own.
    """
    matrices = [name for entry in name_table(hf) if len(entry.shapes[0]) == 2 for name in entry.hf]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [
            name.removesuffix(".weight") for name in matrices if name not in encoded
        ],
    }


@dataclass
class EncodedWeights:
    """A stream of named weights, in which the scales of each matrix of `encoded` come before its
    codes. May be iterated as often as `weights`. `seconds`: spent on encoding so far; on a GPU on
    its launch.
    """

    weights: Iterable[tuple[str, Tensor]]
    encoded: Collection[str]
    seconds: float = 0.0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights:
            if name not in self.encoded:
                yield name, tensor
                continue
            begin = time.perf_counter()
            code, scale = encode(tensor.detach())
            self.seconds += time.perf_counter() - begin
            yield f"{name}{SCALE}", scale
            yield name, code


class DecodedWeights:
    """The other direction, tensor by tensor: what the holder of an encoded stream computes with."""

    def __init__(self) -> None:
        self._scales: dict[str, Tensor] = {}

    def decode_part(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The next part of the stream with matrices in bf16, each when its codes have come."""
        for name, tensor in named:
            if name.endswith(SCALE):
                self._scales[name.removesuffix(SCALE)] = tensor.clone()
            elif (scale := self._scales.pop(name, None)) is not None:
                yield name, decode(tensor, scale).bfloat16()
            else:
                yield name, tensor


class RoundedWeights:
    """The matrices of this rank that policy.weight_quantization rounds."""

    def __init__(
        self, chunks: Sequence[nn.Module], hf: PretrainedConfig, policy: PolicyConfig
    ) -> None:
        """UserError: there is nothing to round, or ranks would split blocks."""
        self.held: list[tuple[Tensor, ParameterMapping]] = []
        check_trainer(hf, policy)
        if policy.weight_quantization == "none":
            return
        parameters = named_parameters(list(chunks))
        for entry in _entries(hf, policy.weight_quantization == EXPERTS_ONLY):
            if entry.megatron in parameters:
                self.held.append((parameters[entry.megatron], entry))

    @torch.no_grad()
    def round(self) -> None:
        """Round them in place. Those that are rounded already keep every bit."""
        for parameter, entry in self.held:
            for part in _parts(parameter, entry):
                part.copy_(rounded(part.flatten(0, -2)).view(part.shape))


def _parts(shard: Tensor, entry: ParameterMapping) -> Sequence[Tensor]:
    """Views of what the shard holds of each Hugging Face matrix: [rows, I], or [groups, rows, I]
    of queries, keys and values, which lie interleaved by group.
    """
    if entry.layout == "rows":
        return shard.chunk(len(entry.hf))
    if entry.layout != "qkv":
        return [shard]
    widths = [shape[0] // entry.groups for shape in entry.shapes]
    return shard.unflatten(0, (-1, sum(widths))).split(widths, dim=1)


def _part_shape(entry: ParameterMapping, number: int, ways: int) -> tuple[int, int]:
    """Rows and columns of matrix `number` on one of `ways` ranks. More ranks than groups of queries
    hold copies of keys and values, on servers.
    """
    rows, columns = entry.shapes[number]
    if entry.layout == "columns":
        return rows, columns // ways
    if entry.layout == "replicated":
        return rows, columns
    return rows // (min(ways, entry.groups) if entry.layout == "qkv" and number else ways), columns


def encoded_matrices(config: Config, hf: PretrainedConfig) -> frozenset[str]:
    """Names of the weights that servers of this run hold in blocks of E4M3. UserError: the servers
    that the run starts would split them inside a block.
    """
    servers = config.sglang
    if servers.weights == "policy":
        return frozenset()
    experts_only = config.policy.weight_quantization == EXPERTS_ONLY
    encoded = block_matrices(hf, experts_only=experts_only)
    if not servers.urls and not servers.router_url:
        gpus, arguments = servers.gpus_per_server, servers.server_args
        spread = re.search(r"--(?:ep|ep-size|expert-parallel-size)[ =](\d+)", arguments)
        experts = gpus // int(spread[1]) if spread else gpus
        check_server(hf, encoded, gpus, experts, f"sglang.weights={servers.weights}")
    return encoded


def check_trainer(hf: PretrainedConfig, policy: PolicyConfig) -> None:
    """UserError, of policy.weight_quantization: ranks would split a matrix inside a block. What no
    rank splits may end inside one.
    """
    if policy.weight_quantization == "none":
        return
    asked = f"policy.weight_quantization={policy.weight_quantization}"
    experts_only = policy.weight_quantization == EXPERTS_ONLY
    if experts_only and not any(sparse_layers(hf)):
        raise UserError(f"{asked} needs experts; {hf.model_type} has none: set it to fp8 or none")
    check_family(hf, asked)
    dense, experts = policy.tensor_model_parallel_size, expert_tensor_size(policy)
    for entry in _entries(hf, experts_only):
        ways = dense if entry.expert is None else experts
        for number, name in enumerate(entry.hf):
            part = _part_shape(entry, number, ways)
            if part != entry.shapes[number] and part[entry.layout == "columns"] % BLOCK:
                field = "tensor_model" if entry.expert is None else "expert_tensor"
                raise UserError(
                    f"{asked} has blocks of {BLOCK}, and policy.{field}_parallel_size={ways} "
                    f"splits {name} {list(entry.shapes[number])} inside them; set it to 1, or so "
                    "that it leaves whole blocks"
                )


def check_family(hf: PretrainedConfig, asked: str) -> None:
    """UserError, of the setting `asked`: weights of this family are never quantised."""
    if has_delta_nets(hf):
        raise UserError(
            f"{asked} does not cover the gated delta nets of {hf.model_type} yet; leave it out"
        )


def check_server(
    hf: PretrainedConfig, encoded: Collection[str], ways: int, expert_ways: int, asked: str
) -> None:
    """UserError, of the setting `asked`: a server that splits the model over `ways` GPUs, and an
    expert over `expert_ways`, would not hold whole blocks of every matrix, as its kernels and
    checksums need.
    """
    check_family(hf, asked)
    if megatron_fields(hf).get("multi_latent_attention"):
        raise UserError(
            f"{asked} does not cover the latent attention of {hf.model_type} yet; leave it out"
        )
    for entry in _entries(hf, experts_only=False):
        split = ways if entry.expert is None else expert_ways
        for number, name in enumerate(entry.hf):
            part = _part_shape(entry, number, split)
            if name in encoded and any(size % BLOCK for size in part):
                raise UserError(
                    f"{asked} has blocks of {BLOCK} x {BLOCK}, and a server of {ways} GPUs would "
                    f"hold {list(part)} of {name} {list(entry.shapes[number])} on each; choose "
                    "another number of GPUs, or another format"
                )
