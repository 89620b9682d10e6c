"""Low-rank adapters of a loaded model: its weights are frozen, and forward hooks of Megatron-Core's
linear layers add the adapters.

    y = x W^T + s (x A^T) B^T,   s = alpha / rank

Megatron-Core fuses q, k, v and gate, up into one layer each; every projection keeps an A and a B of
its own, as PEFT names them. Shapes: S positions on this rank, B sequences, I inputs, O outputs, R
rank. Over T tensor-parallel ranks:

    column layer (q k v, gate up)   A [R, I] whole on every rank, B [O / T, R]
    row layer (o, down)             A [R, I / T], B [O, R] whole on every rank
    replicated (to latent vectors)  A and B whole on every rank
    routed expert                   A and B whole; its tokens come to the rank that holds it

Only products of width R travel between ranks. With sequence parallelism a rank sees a part of the
positions, so that the gradients of what is whole on every rank are parts, which Megatron-Core adds
up (`sequence_parallel` on the parameter). So are those of an adapter that all experts share, on
ranks that hold different experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm
from transformers import PretrainedConfig

from megatron_stare.config import AdaptersConfig, PolicyConfig, UserError
from megatron_stare.policy.huggingface.families import has_delta_nets, megatron_fields
from megatron_stare.policy.huggingface.names import ParameterMapping
from megatron_stare.policy.huggingface.peft_files import (
    SIDES,
    PeftDirectory,
    Projection,
    adapter_table,
    check_apart,
    projections,
)
from megatron_stare.policy.huggingface.weights import HFWeights, whole_tensors
from megatron_stare.policy.topology import Topology, expert_tensor_size
from megatron_stare.system import digest

Start = Callable[[str], tuple[Tensor, Tensor]]
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
        return _first_a(seed, weight, first), torch.zeros(second)

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


class LowRank(nn.Module):
    """Adapters of the projections `leaves` (q_proj, ...) of the layer that `entry` describes.

    `weight`: the layer's weight on this rank. `start(weight)` gives the whole A [R, I] and B [O, R]
    that the projection with this HF name starts with. Experts that share adapters share this
    module, made with the entry of one.
    """

    def __init__(
        self,
        entry: ParameterMapping,
        leaves: set[str],
        weight: Tensor,
        topology: Topology,
        settings: AdaptersConfig,
        *,
        sequence_parallel: bool,
        start: Start,
    ) -> None:
        super().__init__()
        self.scale, self.enabled = settings.alpha / settings.rank, True
        self.groups = entry.groups // topology.tensor_size if entry.layout == "qkv" else 1
        is_expert = entry.expert is not None
        self.is_column = entry.layout in ("qkv", "rows") and not is_expert
        self.is_row = entry.layout == "columns" and not is_expert
        self.of_one_expert = is_expert and settings.experts == "each"
        self.sequence_parallel = sequence_parallel and not self.of_one_expert
        self.group = topology.expert_tensor if self.of_one_expert else topology.tensor
        self.replicas = topology.groups.expt_dp if self.of_one_expert else topology.data
        same = topology.groups.expt_dp if is_expert else topology.data
        is_split = is_expert or self.is_column or self.is_row
        # Ranks that hold this rank's part of the layer's weight.
        self.copies = dist.get_world_size(same) * (1 if is_split else topology.tensor_size)
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        self.widths: dict[str, int] = {}
        self.tally: list[Tensor] = []
        size, place = dist.get_world_size(self.group), dist.get_rank(self.group)
        for name, (outputs, _) in entry.tensors:
            leaf = name.split(".")[-2]
            self.widths[leaf] = outputs // size if self.is_column else outputs
            if leaf not in leaves:
                continue
            first, second = start(name)
            if self.is_column:
                second = second.chunk(size, dim=0)[place]
            elif self.is_row:
                first = first.chunk(size, dim=1)[place]
            self.lora_A[leaf], self.lora_B[leaf] = (
                nn.Parameter(each.to(weight, copy=True).contiguous()) for each in (first, second)
            )
            self._mark(self.lora_A[leaf], 1 if self.is_row else None, weight)
            self._mark(self.lora_B[leaf], 0 if self.is_column else None, weight)

    def _mark(self, parameter: Any, split: int | None, weight: Any) -> None:
        """Mark a parameter for Megatron-Core: split along a dimension, or whole; and whether its
        gradient is added up over the ranks with the same expert alone.
        """
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        parameter.allreduce = weight.allreduce if self.of_one_expert else True
        if split is None:
            parameter.sequence_parallel = self.sequence_parallel
        else:
            set_tensor_model_parallel_attributes(parameter, True, split, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I on this rank] -> [..., O on this rank], what is added to the layer's output. The
        leading dimensions are [S, B], or the tokens of an expert.
        """
        from megatron.core import tensor_parallel as megatron

        names = list(self.lora_A)
        h = linear(x, torch.cat([self.lora_A[name] for name in names]))
        if self.is_column and self.sequence_parallel:
            h = megatron.gather_from_sequence_parallel_region(
                h, tensor_parallel_output_grad=True, group=self.group
            )
        elif self.is_column:
            h = megatron.copy_to_tensor_model_parallel_region(h, group=self.group)
        elif self.is_row and self.sequence_parallel:
            h = megatron.reduce_scatter_to_sequence_parallel_region(h, group=self.group)
        elif self.is_row:
            h = megatron.reduce_from_tensor_model_parallel_region(h, group=self.group)
        parts = zip(names, h.chunk(len(names), dim=-1), strict=True)
        return self.scale * self._fused(
            {name: linear(part, self.lora_B[name]) for name, part in parts}
        )

    def add_to(self, module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        """A forward hook of the layer. TransformerEngine's fused layer normalises its input inside,
        so that the hook does it again.
        """
        if not self.enabled:
            return None
        (x, *_), (y, bias) = inputs, output
        norm = getattr(module, "layer_norm_weight", None)
        if norm is not None:
            x = rms_norm(x, x.shape[-1:], norm, module.eps)
        return y + self(x), bias

    @staticmethod
    def add_to_each(
        experts: Sequence[LowRank], module: Any, inputs: tuple[Any, ...], output: Any
    ) -> Any:
        """A forward hook of TransformerEngine's layer of many experts, whose input holds the tokens
        of one after the other: `inputs` are (tokens [T, I], the number of each expert's).
        """
        if not experts[0].enabled:
            return None
        (x, counts, *_), (y, bias) = inputs, output
        parts = zip(experts, x.split(counts), strict=True)
        return y + torch.cat([one(part) for one, part in parts]), bias

    def merged(self, weight: Tensor) -> Tensor:
        """W + s B A of this rank's shard in the dtype of W, from one rounding of a wider sum. What
        the rounding does is added to `tally`: [entries moved, entries, |lost|^2, |s B A|^2].
        """
        with torch.no_grad():
            wide = sum_dtype(weight.dtype)
            products = {
                name: product(a, self.lora_B[name], wide) for name, a in self.lora_A.items()
            }
            change = self.scale * self._fused(products).T
            merged = (weight.to(wide) + change).to(weight.dtype)
            lost = merged.to(wide) - weight.to(wide) - change
            counts = ((merged != weight).sum(), torch.tensor(weight.numel(), device=weight.device))
            norms = (lost.double().square().sum(), change.double().square().sum())
            self.tally.append(torch.stack([each.double() for each in (*counts, *norms)]))
        return merged

    def _fused(self, parts: dict[str, Tensor]) -> Tensor:
        """Outputs [..., O] of the projections in the order of Megatron-Core's fused layer: by query
        group for qkv, else one after the other; zeros for projections without an adapter.
        """
        like = next(iter(parts.values()))
        every = [
            parts[name] if name in parts else like.new_zeros(*like.shape[:-1], width)
            for name, width in self.widths.items()
        ]
        grouped = [part.unflatten(-1, (self.groups, -1)) for part in every]
        return torch.cat(grouped, dim=-1).flatten(-2)


class Adapters(nn.ModuleDict):
    """The adapters of a model chunk: by layer, numbered from 0 over the whole model, and by their
    place in it (`Projection.place`).
    """

    def put(self, path: str, adapter: LowRank) -> None:
        """Add the adapters of one linear layer at a path of names with dots."""
        *folders, last = path.split(".")
        place: nn.ModuleDict = self
        for name in folders:
            if name not in place:
                place[name] = nn.ModuleDict()
            place = cast(nn.ModuleDict, place[name])
        place[last] = adapter

    def each(self) -> Iterator[LowRank]:
        """Every layer's adapters."""
        yield from (module for module in self.modules() if isinstance(module, LowRank))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Megatron-Core's description of the adapters for a distributed checkpoint."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        found: dict[str, Any] = {}
        for name, module in self.named_modules():
            if isinstance(module, LowRank):
                state = module.state_dict(prefix="", keep_vars=True)
                split = {
                    key: value.partition_dim
                    for key, value in state.items()
                    if getattr(value, "tensor_model_parallel", False)
                }
                place, groups = f"{prefix}{name}.", (module.group, module.replicas)
                found |= make_sharded_tensors_for_checkpoint(
                    *(state, place, split, sharded_offsets), "_extra_state", *groups
                )
        return found


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of W + s B A before it is rounded to that of W. It is wider also where W is fp32:
    the rounded sum is then the same under every layout.
    """
    return torch.float32 if dtype.itemsize < 4 else torch.float64


def product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """(B A)^T [I, O] in the dtype `wide`."""
    return a.to(wide).T @ b.to(wide).T


def _first_a(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """A [R, I] at the start: uniform within 1 / sqrt(I), as in PEFT, drawn from `seed` and the
    weight's name alone, so that it is the same under every layout.
    """
    generator = torch.Generator().manual_seed(int(digest(f"{seed} {name}")[:15], 16))
    return torch.empty(shape).uniform_(-1, 1, generator=generator) / shape[1] ** 0.5
