"""The low-rank adapters of one linear layer of Megatron-Core.

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

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from megatron_stare.config import AdaptersConfig
from megatron_stare.policy.huggingface.names import ParameterMapping
from megatron_stare.policy.topology import Topology
from megatron_stare.system import digest

Start = Callable[[str], tuple[Tensor, Tensor]]


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


def first_a(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """A [R, I] at the start: uniform within 1 / sqrt(I), as in PEFT, drawn from `seed` and the
    weight's name alone, so that it is the same under every layout.
    """
    generator = torch.Generator().manual_seed(int(digest(f"{seed} {name}")[:15], 16))
    return torch.empty(shape).uniform_(-1, 1, generator=generator) / shape[1] ** 0.5
