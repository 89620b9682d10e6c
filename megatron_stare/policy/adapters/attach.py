"""Adapters onto a loaded model: its weights are frozen, and forward hooks add the adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_stare.config import AdaptersConfig, PolicyConfig, UserError
from megatron_stare.policy.adapters.low_rank import Adapters, LowRank, Start, first_a
from megatron_stare.policy.adapters.peft_files import (
    SIDES,
    PeftDirectory,
    Projection,
    projections,
)
from megatron_stare.policy.huggingface.families import megatron_fields, sparse_layers
from megatron_stare.policy.topology import Topology

# What a resumed run must not change: the settings that define what the adapters are.
STORED_SETTINGS = ("rank", "alpha", "targets")


def check(hf: PretrainedConfig, settings: AdaptersConfig) -> None:
    """UserError: this model cannot have these adapters."""
    if not settings.rank:
        return
    names = settings.target_names
    if megatron_fields(hf).get("multi_latent_attention") and len(names & {"k", "v"}) == 1:
        raise UserError(
            f"adapters.targets={settings.targets}: the latent attention of {hf.model_type} makes "
            "k and v by the same projections; name both or neither"
        )
    if any(sparse_layers(hf)) and names & {"gate", "up", "down"}:
        raise UserError(
            f"adapters.targets={settings.targets}: adapters of experts ({hf.model_type}) are not "
            "supported; set adapters.targets=q,k,v,o"
        )
    if settings.start:
        PeftDirectory(Path(settings.start)).check(hf, settings)


def attach(
    chunks: list[Any],
    hf: PretrainedConfig,
    policy: PolicyConfig,
    topology: Topology,
    settings: AdaptersConfig,
    seed: int,
) -> None:
    """Freeze the chunks' weights and add an `adapters` module to each. Call it before Megatron's
    DistributedDataParallel, whose buffers then hold gradients of the adapters alone.
    """
    check(hf, settings)
    every = projections(hf, settings)
    start = _start(every, settings, seed)
    groups = hf.num_key_value_heads // dist.get_world_size(topology.tensor)
    for chunk in chunks:
        chunk.requires_grad_(False)
        adapters = Adapters()
        for layer in chunk.decoder.layers:
            number, own = layer.layer_number - 1, nn.ModuleDict()
            mine = [each for each in every if each.layer == number]
            for place, entry in {each.fused: each.entry for each in mine}.items():
                fused: Any = layer.get_submodule(place)
                low_rank = LowRank(
                    entry,
                    {each.leaf for each in mine},
                    fused.weight,
                    topology,
                    rank=settings.rank,
                    alpha=settings.alpha,
                    groups=groups if entry.layout == "qkv" else 1,
                    sequence_parallel=policy.sequence_parallel,
                    start=start,
                )
                fused.register_forward_hook(low_rank.add_to)
                fused.weight.adapter = low_rank  # what exports the weight merges it
                own[place.rpartition(".")[2]] = low_rank
            adapters[str(number)] = own
        chunk.adapters = adapters
        if policy.recompute_granularity != "none" and chunk.pre_process:
            chunk.embedding.register_forward_hook(_with_gradient)


def _start(every: Sequence[Projection], settings: AdaptersConfig, seed: int) -> Start:
    """A random and B zero, so that the model starts as its base; or those of adapters.start."""
    by_weight = {each.weight: each for each in every}
    found = PeftDirectory(Path(settings.start)) if settings.start else None

    def start(weight: str) -> tuple[Tensor, Tensor]:
        each = by_weight[weight]
        if found is not None:
            return found.read(each.name("A")), found.read(each.name("B"))
        first, second = (each.shape_of(side, settings.rank) for side in SIDES)
        return first_a(seed, weight, first), torch.zeros(second)

    return start


def _with_gradient(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Recomputation runs backward only where an input asks for a gradient, and the output of a
    frozen embedding does not.
    """
    return output.requires_grad_() if torch.is_grad_enabled() else output


def adapters_of(chunks: list[Any]) -> list[LowRank]:
    """Those of every layer of the chunks; none of a model without adapters."""
    return [each for c in chunks if hasattr(c, "adapters") for each in c.adapters.each()]


@contextmanager
def without_adapters(chunks: list[Any]) -> Iterator[None]:
    """Meanwhile the model is its base."""
    every = adapters_of(chunks)
    for each in every:
        each.enabled = False
    try:
        yield
    finally:
        for each in every:
            each.enabled = True


def merge_metrics(chunks: list[Any], topology: Topology) -> dict[str, float]:
    """What the rounding of merged weights did in the last export: adapters/moved_entries, the
    share of the adapted weights' entries that differ from the base, and adapters/merge_error, the
    norm of what rounding changes relative to the norm of the adapters' update. Collective.
    """
    every = adapters_of(chunks)
    counts = torch.zeros(4, dtype=torch.float64)
    for each in every:
        counts += sum((tally.cpu() for tally in each.tally), torch.zeros_like(counts))
        each.tally.clear()
    moved, entries, lost, change = map(sum, zip(*topology.gather(counts.tolist()), strict=True))
    if not entries:
        return {}
    error = (lost / change) ** 0.5 if change else 0.0
    return {"adapters/moved_entries": moved / entries, "adapters/merge_error": error}
