"""This rank's routers under our hand: what they chose is kept, what they shall choose is given.

Megatron's router asks its `router_replay` for the experts of all its tokens. Megatron's own
RouterReplay steers all routers of a process by one list and one switch; this one knows which
micro-batch a router is at, leaves single tokens free (padding, tokens whose choices nobody has),
counts, and holds no model alive. The weights of the chosen experts are always the trainer's own,
softmax(logits[chosen]) or softmax(logits)[chosen], so that gradients reach the router. (Routing
replay: arXiv 2510.11370.)

Which micro-batch it is: every schedule brings the micro-batches to a layer in order, in the forward
pass and, where a layer is computed again, in the backward pass. The two are told apart by whether
gradients are on: a forward pass that will be repeated has them off, and one that will not be is the
only one.

Shape legend: R positions that a router sees, L this rank's layers with experts, E experts, K of
them a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_stare.policy import runtime
from megatron_stare.policy.experts.load import Load, balance_pull, with_gradient_of
from megatron_stare.policy.huggingface.names import sparse_layers
from megatron_stare.policy.topology import Topology
from megatron_stare.records import MicroBatch, RoutingShape, TokenBatch


def routing_shape(hf: PretrainedConfig) -> RoutingShape | None:
    """Of a model with experts; None of a dense one."""
    sparse = sparse_layers(hf)
    if not any(sparse):
        return None
    layers = tuple(layer for layer, is_sparse in enumerate(sparse) if is_sparse)
    return RoutingShape(layers, hf.num_experts_per_tok, hf.num_experts)


class Routers:
    """The routers of a rank's chunks, in the order of their layers within the chunks."""

    def __init__(
        self, chunks: Sequence[nn.Module], hf: PretrainedConfig, topology: Topology
    ) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        shape = routing_shape(hf)
        assert shape is not None, "a model with experts"
        self.shape, self.topology = shape, topology
        found = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
        # Megatron counts layers from 1, over all stages.
        self.places = [shape.layers.index(router.layer_number - 1) for router in found]
        self.layers = [_Router(shape, bool(hf.norm_topk_prob)) for _ in found]
        for router, ours in zip(found, self.layers, strict=True):
            router.router_replay = ours

    def own(self, batch: TokenBatch) -> TokenBatch:
        """A packed batch with what concerns this rank's routers alone: of its layers, and of the
        positions that sequence parallelism leaves to it.
        """
        rank, size = 0, self.topology.tensor_size
        if size > 1:  # experts then have sequence parallelism
            rank = dist.get_rank(self.topology.tensor)

        def cut(micro: MicroBatch) -> MicroBatch:
            assert micro.real_R is not None, "it was packed for a model with experts"
            chosen = micro.routing_RLK
            if chosen is not None:
                chosen = chosen.chunk(size)[rank][:, self.places].contiguous()
            return dataclasses.replace(
                micro, real_R=micro.real_R.chunk(size)[rank], routing_RLK=chosen
            )

        return dataclasses.replace(batch, microbatches=tuple(map(cut, batch.microbatches)))

    @contextmanager
    def at(
        self, batch: TokenBatch, *, record: bool = False, coefficient: float = 0.0
    ) -> Iterator[None]:
        """While one schedule goes over the batch. `record`: keep what is chosen, for `recorded`.
        `coefficient`: of the load-balancing loss, whose gradient joins (load.py); the batch has its
        `expert_tokens_LE`.
        """
        for place, layer in enumerate(self.layers):
            pull_E = None
            if coefficient:
                assert batch.expert_tokens_LE is not None, "a scored batch"
                pull_E = balance_pull(batch.expert_tokens_LE[place], self.shape.top_k, coefficient)
            layer.begin(batch.microbatches, place, record, pull_E)
        yield
        for layer in self.layers:
            layer.end()

    def recorded(self, batch: TokenBatch) -> TokenBatch:
        """The batch, its micro-batches with what the routers chose at the last `at`."""
        if not self.layers:
            return batch
        kept = zip(*(layer.recorded for layer in self.layers), strict=True)
        microbatches = tuple(
            dataclasses.replace(micro, routing_RLK=torch.stack(chosen, dim=1))
            for micro, chosen in zip(batch.microbatches, kept, strict=True)
        )
        return dataclasses.replace(batch, microbatches=microbatches)

    def load(self) -> Load:
        """What the routers dealt out at the last `at`, of all layers and ranks. Collective."""
        layers, experts = len(self.shape.layers), self.shape.experts
        device = runtime.device()
        dealt = torch.zeros((2, layers, experts), dtype=torch.float64, device=device)
        agreement = torch.zeros(2, dtype=torch.float64, device=device)
        for place, layer in zip(self.places, self.layers, strict=True):
            dealt[0, place], dealt[1, place] = layer.tokens_E, layer.mass_E
            agreement += layer.agreement
        everything = torch.cat([dealt.flatten(), agreement])
        dist.all_reduce(everything)  # every position of every layer lies on one rank
        tokens, mass = everything[:-2].view(2, layers, experts)
        return Load(tokens, mass, self.shape.top_k, *everything[-2:].tolist())

    def with_tokens(self, batch: TokenBatch) -> TokenBatch:
        """The batch with the tokens that each expert of this rank's layers got at the last `at`,
        from all ranks. Collective.
        """
        return dataclasses.replace(batch, expert_tokens_LE=self.load().tokens_LE[self.places])


class _Router:
    """Stands in one router's `router_replay`. `logits`: what it is asked about are logits, else
    probabilities of all experts.
    """

    def __init__(self, shape: RoutingShape, logits: bool) -> None:
        self.layer_number: int | None = None  # Megatron writes it
        self.shape, self.logits = shape, logits
        self.begin((), 0, False, None)

    def begin(
        self,
        microbatches: Sequence[MicroBatch],
        place: int,
        record: bool,
        pull_E: Tensor | None,
    ) -> None:
        """What comes next is these, in their order; `place` is the layer's in `routing_RLK`."""
        self._microbatches, self._place, self._record = microbatches, place, record
        self._pull_E = pull_E
        self._seen = {False: 0, True: 0}  # micro-batches so far, by whether gradients were on
        self.recorded: list[Tensor] = []
        zeros = torch.zeros(self.shape.experts, dtype=torch.float64, device=runtime.device())
        self.tokens_E, self.mass_E, self.agreement = zeros, zeros.clone(), zeros.new_zeros(2)

    def end(self) -> None:
        """All of them have come: once, or once more where the layer is computed again."""
        for seen in self._seen.values():
            assert seen in (0, len(self._microbatches)), f"{seen} of {len(self._microbatches)}"
        self._microbatches = ()

    def get_replay_topk(
        self,
        scores_RE: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers [R, K] of the experts that each token goes to."""
        value_RK, own_RK = default_compute_topk(
            scores_RE, topk, num_groups=num_groups, group_topk=group_topk
        )
        if not self._microbatches:  # a forward pass that is none of a schedule's
            return value_RK, own_RK
        graded = torch.is_grad_enabled()
        number = self._seen[graded]
        self._seen[graded] += 1
        micro, again = self._microbatches[number], graded and self._seen[False] > number
        chosen_RK, given_RK = own_RK, None
        if micro.routing_RLK is not None:
            given_RK = micro.routing_RLK[:, self._place].long()
            chosen_RK = torch.where(given_RK >= 0, given_RK, own_RK)
            value_RK = scores_RE.gather(1, chosen_RK)
        probability_RE = scores_RE if not self.logits else torch.softmax(scores_RE.float(), dim=-1)
        assert micro.real_R is not None, "it was packed for a model with experts"
        probability_RE = probability_RE * micro.real_R[:, None]
        if not again:
            self._count(micro.real_R, own_RK, chosen_RK, given_RK, probability_RE.detach())
        if self._record:
            self.recorded.append(chosen_RK.to(torch.int16))
        if graded and self._pull_E is not None:
            value_RK = with_gradient_of(value_RK, (probability_RE * self._pull_E).sum())
        return value_RK, chosen_RK

    def _count(
        self,
        real_R: Tensor,
        own_RK: Tensor,
        chosen_RK: Tensor,
        given_RK: Tensor | None,
        probability_RE: Tensor,
    ) -> None:
        one_RK = real_R[:, None].expand_as(chosen_RK).double()
        self.tokens_E.index_add_(0, chosen_RK.flatten(), one_RK.flatten())
        self.mass_E += probability_RE.sum(0, dtype=torch.float64)
        if given_RK is not None:
            known_RK = one_RK * (given_RK >= 0)
            alike_RK = (given_RK[:, :, None] == own_RK[:, None, :]).any(-1)
            self.agreement += torch.stack([(known_RK * alike_RK).sum(), known_RK.sum()])
