"""Adapters onto a loaded model: its weights are frozen, and forward hooks add the adapters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_stare.config import AdaptersConfig, PolicyConfig, UserError
from megatron_stare.policy.adapters.low_rank import Adapters, LowRank, Start, first_a
from megatron_stare.policy.adapters.peft_files import (
    SIDES,
    PeftDirectory,
    Projection,
    adapter_table,
    check_apart,
    projections,
)
from megatron_stare.policy.huggingface.families import has_delta_nets, megatron_fields
from megatron_stare.policy.huggingface.names import ParameterMapping
from megatron_stare.policy.huggingface.weights import HFWeights, whole_tensors
from megatron_stare.policy.topology import Topology, expert_tensor_size

# A resumed run must not change these settings: they define the adapters.
STORED_SETTINGS = ("rank", "alpha", "targets", "experts")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc\d)")


def check(hf: PretrainedConfig, settings: AdaptersConfig, policy: PolicyConfig) -> None:
    """UserError: this model cannot have these adapters."""
    if not settings.rank:
        return
    if has_delta_nets(hf):
        raise UserError(
            f"adapters.rank={settings.rank} is not supported for {hf.model_type}, whose gated "
            "delta nets have no adapters; set it to 0"
        )
    names = settings.target_names
    if megatron_fields(hf).get("multi_latent_attention") and len(names & {"k", "v"}) == 1:
        raise UserError(
            f"adapters.targets={settings.targets}: the latent attention of {hf.model_type} makes "
            "k and v by the same projections; name both or neither"
        )
    every, split = projections(hf, settings), expert_tensor_size(policy)
    if not every:
        raise UserError(
            f"adapters.targets={settings.targets} and adapters.experts={settings.experts}: no "
            f"layer of this {hf.model_type} has an adapter; set adapters.experts=each or shared"
        )
    if split > 1 and any(each.entry.expert is not None for each in every):
        raise UserError(
            f"policy.expert_tensor_parallel_size={split} (0: tensor_model_parallel_size) splits "
            "experts, whose adapters need them whole; set policy.expert_tensor_parallel_size=1, or "
            "adapters.experts=none"
        )
    if settings.apart:
        check_apart(hf, settings)
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
    check(hf, settings, policy)
    every = projections(hf, settings)
    by_layer = {number: list(own) for number, own in groupby(every, lambda each: each.layer)}
    start = _start(every, settings, seed)

    def made_for(entry: ParameterMapping, leaves: set[str], weight: Tensor) -> LowRank:
        return LowRank(
            *(entry, leaves, weight, topology, settings),
            sequence_parallel=policy.sequence_parallel,
            start=start,
        )

    for chunk in chunks:
        chunk.requires_grad_(False)
        chunk.adapters = Adapters()
        for layer in chunk.decoder.layers:
            _adapt(layer, by_layer.get(layer.layer_number - 1, []), chunk.adapters, made_for)
        if policy.recompute_granularity != "none" and chunk.pre_process:
            chunk.embedding.register_forward_hook(_with_gradient)


def _adapt(
    layer: Any,
    found: Sequence[Projection],
    adapters: Adapters,
    made_for: Callable[[ParameterMapping, set[str], Tensor], LowRank],
) -> None:
    """Make the adapters of a layer's projections, and hook them into the layer."""
    leaves, made = {each.leaf for each in found}, dict[str, LowRank]()
    # Experts that share an adapter start with that of the first one.
    entries = {each.place: each.entry for each in reversed(found)}
    hooks: dict[nn.Module, list[LowRank]] = {}
    for each in {each.fused: each for each in found}.values():
        here = _on_this_rank(layer, each.fused)
        if here is None:
            continue
        fused, weight = here
        if each.place not in made:
            made[each.place] = made_for(entries[each.place], leaves, weight)
            adapters.put(f"{each.layer}.{each.place}", made[each.place])
        weight.adapter = made[each.place]  # what exports the weight merges it
        if made[each.place] not in hooks.setdefault(fused, []):
            hooks[fused].append(made[each.place])
    for fused, own in hooks.items():
        add = own[0].add_to if len(own) == 1 else partial(LowRank.add_to_each, own)
        fused.register_forward_hook(add)


def _on_this_rank(layer: Any, name: str) -> tuple[nn.Module, Any] | None:
    """The linear layer with this name and its weight; None if another rank holds the expert.
    TransformerEngine computes all experts of a rank by one layer with many weights.
    """
    found = _EXPERT.fullmatch(name)
    if not found:
        module = layer.get_submodule(name)
        return module, module.weight
    held, experts = list(layer.mlp.local_expert_indices), layer.mlp.experts
    if int(found[1]) not in held:
        return None
    local = held.index(int(found[1]))
    if hasattr(experts, "local_experts"):
        module = getattr(experts.local_experts[local], found[2])
        return module, module.weight
    module = getattr(experts, found[2])
    return module, getattr(module, f"weight{local}")


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
    """The adapters of every layer of the chunks; none of a model without adapters."""
    return [each for c in chunks if hasattr(c, "adapters") for each in c.adapters.each()]


@contextmanager
def without_adapters(chunks: list[Any]) -> Iterator[None]:
    """A context in which the model is its base."""
    every = adapters_of(chunks)
    for each in every:
        each.enabled = False
    try:
        yield
    finally:
        for each in every:
            each.enabled = True


@dataclass(frozen=True)
class AdaptedWeights:
    """(name, whole tensor) of the base by HF names, and then of the adapters by PEFT's, on every
    rank; of a model without experts' adapters. Collective: all ranks iterate together.
    """

    base: HFWeights
    settings: AdaptersConfig

    def adapters(self) -> list[tuple[str, Tensor]]:
        """The adapters alone. Collective."""
        base = self.base
        shards = {
            f"adapters.{name}": parameter.detach
            for chunk in base.chunks
            for name, parameter in chunk.adapters.named_parameters()  # type: ignore[union-attr]
        }
        table, like = adapter_table(base.hf, self.settings), next(base.chunks[0].parameters())
        return list(whole_tensors(table, shards, like, base.topology))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.base
        yield from self.adapters()


def merge_metrics(chunks: list[Any], topology: Topology) -> dict[str, float]:
    """The effect of rounding merged weights in the last export: adapters/moved_entries, the
    share of the adapted weights' entries that differ from the base, and adapters/merge_error, the
    norm of what rounding changes relative to the norm of the adapters' update. Each entry counts
    once, however many ranks hold it. Collective.
    """
    every = adapters_of(chunks)
    counts = torch.zeros(4, dtype=torch.float64)
    for each in every:
        counts += sum((tally.cpu() for tally in each.tally), torch.zeros_like(counts)) / each.copies
        each.tally.clear()
    moved, entries, lost, change = map(sum, zip(*topology.gather(counts.tolist()), strict=True))
    if not entries:
        return {}
    error = (lost / change) ** 0.5 if change else 0.0
    return {"adapters/moved_entries": moved / entries, "adapters/merge_error": error}
