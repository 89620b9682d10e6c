"""Layers with experts: routing replay and load balance.

*Routing.* Megatron's router asks its `router_replay` for the experts of all its tokens, and
`Routers` answers for every router of a rank: choices are recorded, or given by the rollout. The
weights of the chosen experts are always the trainer's own, softmax(logits[chosen]),
softmax(logits)[chosen], or the normalised sigmoid(logits)[chosen], so that gradients reach the
router (routing replay: arXiv 2510.11370).
Megatron's own RouterReplay steers all routers of a process by one list and one switch; `Routers`
knows the micro-batch of each call, leaves single tokens free (padding, tokens without a recorded
choice), counts, and holds no model alive.

Every schedule brings the micro-batches to a layer in order, in the forward pass and, where a layer
is computed again, in the backward pass. The two differ in whether gradients are on: a
forward pass that will be repeated has them off, and any other is the only one.

*Load balance.* Per layer, with F_e the tokens that went to expert e, T tokens, K experts a token,
p_te the router's softmax over all E experts:

    balance = E sum_e (F_e / (K T)) (sum_t p_te / T)        1 where all experts get equally many

(Switch Transformers, arXiv 2101.03961, eq. 4, over K choices.) Megatron-Core takes F of one
micro-batch on one group of ranks, so that its loss depends on the layout. Here F and T are those of
the whole batch over all ranks, which the scoring pass has counted; F is a constant, as there. The
rest is a sum over tokens, the same under every layout:

    loss = coefficient sum_layers sum_t sum_e pull_e p_te,  pull_e = E F_e / (K T^2)

Shape legend: R positions that a router sees, L this rank's layers with experts, E experts, K of
them a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_stare.policy import runtime
from megatron_stare.policy.huggingface.families import megatron_fields, sparse_layers
from megatron_stare.policy.topology import Topology
from megatron_stare.records import MicroBatch, RoutingShape, TokenBatch


def routing_shape(hf: PretrainedConfig) -> RoutingShape | None:
    """The shape of the routing of a model with experts; None of a dense one."""
    sparse = sparse_layers(hf)
    if not any(sparse):
        return None
    layers = tuple(layer for layer, is_sparse in enumerate(sparse) if is_sparse)
    fields = megatron_fields(hf)
    return RoutingShape(layers, fields["moe_router_topk"], fields["num_moe_experts"])


def release_routes(chunks: Sequence[Any]) -> None:
    """Drop what Megatron's dispatchers keep of their last micro-batch until the next one: of each
    layer, with E experts and K of them a token, at least 5 E + 8 K bytes a token, and an autograd
    graph, which keeps the model alive.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer

    layers = (layer.mlp for chunk in chunks for layer in chunk.decoder.layers)
    for dispatcher in (mlp.token_dispatcher for mlp in layers if isinstance(mlp, MoELayer)):
        dispatcher.probs = dispatcher.routing_map = None
        dispatcher.reversed_local_input_permutation_mapping = None


class Routers:
    """The routers of a rank's chunks, in the order of their layers within the chunks."""

    def __init__(
        self, chunks: Sequence[nn.Module], hf: PretrainedConfig, topology: Topology
    ) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        shape = routing_shape(hf)
        assert shape is not None, "a model with experts"
        self.shape, self.topology = shape, topology
        fields = megatron_fields(hf)
        found = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
        # Megatron counts layers from 1, over all stages.
        self.places = [shape.layers.index(router.layer_number - 1) for router in found]
        self.layers = [_Router(shape, _probabilities(fields, router)) for router in found]
        for router, ours in zip(found, self.layers, strict=True):
            router.router_replay = ours

    def own(self, batch: TokenBatch) -> TokenBatch:
        """A packed batch with what concerns this rank's routers alone: of its layers, and of the
        positions that sequence parallelism leaves to it.
        """
        # Experts over several tensor-parallel ranks have sequence parallelism.
        rank, size = dist.get_rank(self.topology.tensor), self.topology.tensor_size

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
        """A context for one schedule over the batch. `record`: keep the chosen experts for
        `recorded`. `coefficient`: of the load-balancing loss, whose gradient joins; the batch then
        has its `expert_tokens_LE`.
        """
        for place, layer in enumerate(self.layers):
            pull_E = None
            if coefficient:
                assert batch.expert_tokens_LE is not None, "a scored batch"
                pull_E = balance_pull(batch.expert_tokens_LE[place], self.shape.top_k, coefficient)
            layer.start(batch.microbatches, place, record, pull_E)
        yield
        for layer in self.layers:
            layer.stop()

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

    def _load(self) -> tuple[Tensor, Tensor, list[float]]:
        """Over all ranks, as the routers chose at the last `at`: tokens and summed probability
        [L, E] of the experts of all layers; and how many of the given choices the routers would
        have made themselves, and were given. Collective.
        """
        layers, experts = len(self.shape.layers), self.shape.experts
        device = runtime.device()
        counts = torch.zeros((2, layers, experts), dtype=torch.float64, device=device)
        agreement = torch.zeros(2, dtype=torch.float64, device=device)
        for place, layer in zip(self.places, self.layers, strict=True):
            counts[0, place], counts[1, place] = layer.tokens_E, layer.mass_E
            agreement += layer.agreement
        everything = torch.cat([counts.flatten(), agreement])
        dist.all_reduce(everything)  # every position of every layer lies on one rank
        tokens_LE, mass_LE = everything[:-2].view(2, layers, experts)
        return tokens_LE, mass_LE, everything[-2:].tolist()

    def load_metrics(self) -> dict[str, float]:
        """Metrics of the last `at`. expert_load_max: tokens of the busiest expert of any layer over
        the mean of its layer; expert_load_unused: share of experts without a token; expert_balance:
        mean over layers, without a coefficient; routing_agreement: share of the replayed choices
        that the routers would have made themselves. Collective.
        """
        tokens_LE, mass_LE, (alike, given) = self._load()
        experts, top_k = self.shape.experts, self.shape.top_k
        count_L = tokens_LE.sum(1).clamp(min=1) / top_k
        mean_L1 = (count_L * top_k / experts)[:, None]
        share_LE = tokens_LE / (top_k * count_L[:, None])
        balance_L = experts * (share_LE * mass_LE / count_L[:, None]).sum(1)
        unused = (tokens_LE == 0).double().mean()
        found = torch.stack([(tokens_LE / mean_L1).max(), unused, balance_L.mean()]).tolist()
        names = ("expert_load_max", "expert_load_unused", "expert_balance")
        metrics = dict(zip(names, found, strict=True))
        if given:
            metrics["routing_agreement"] = alike / given
        return metrics

    def with_tokens(self, batch: TokenBatch) -> TokenBatch:
        """The batch with the tokens that each expert of this rank's layers got at the last `at`,
        from all ranks. Collective.
        """
        tokens_LE, _, _ = self._load()
        return dataclasses.replace(batch, expert_tokens_LE=tokens_LE[self.places])


def _probabilities(fields: dict[str, Any], router: Any) -> Callable[[Tensor], Tensor]:
    """A function from a router's scores (probabilities, logits, or sigmoid(logits) + bias) to the
    weights of experts. Of the last kind Megatron-Core itself takes the weights without the bias.
    """
    if fields.get("moe_router_score_function") == "sigmoid":
        bias_E = router.expert_bias

        def shares(scores_RE: Tensor) -> Tensor:
            sigmoid_RE = scores_RE - bias_E
            return sigmoid_RE / sigmoid_RE.sum(-1, keepdim=True)

        return shares
    if fields["moe_router_pre_softmax"]:
        return lambda scores_RE: scores_RE
    return lambda scores_RE: torch.softmax(scores_RE.float(), dim=-1)


class _Router:
    """What Megatron asks for the choices of one router (its `router_replay`). `probabilities`: of
    all experts, from the scores that Megatron hands over.
    """

    def __init__(self, shape: RoutingShape, probabilities: Callable[[Tensor], Tensor]) -> None:
        self.layer_number: int | None = None  # Megatron writes it
        self.shape, self.probabilities = shape, probabilities
        self.start((), 0, False, None)

    def start(
        self,
        microbatches: Sequence[MicroBatch],
        place: int,
        record: bool,
        pull_E: Tensor | None,
    ) -> None:
        """Announce the next micro-batches in order; `place` is the layer's in `routing_RLK`."""
        self._microbatches, self._place, self._record = microbatches, place, record
        self._pull_E = pull_E
        self._seen = {False: 0, True: 0}  # micro-batches so far, by whether gradients were on
        self.recorded: list[Tensor] = []
        zeros = torch.zeros(self.shape.experts, dtype=torch.float64, device=runtime.device())
        self.tokens_E, self.mass_E, self.agreement = zeros, zeros.clone(), zeros.new_zeros(2)

    def stop(self) -> None:
        """Check that every micro-batch came once, or twice if computed again; forget them."""
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
        probability_RE = self.probabilities(scores_RE)
        assert micro.real_R is not None, "it was packed for a model with experts"
        probability_RE = probability_RE * micro.real_R[:, None]
        if not again:
            self._count(micro.real_R, own_RK, chosen_RK, given_RK, probability_RE.detach())
        if self._record:
            self.recorded.append(chosen_RK.to(torch.int16))
        if graded and self._pull_E is not None:
            from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

            # The same values, whose backward pass also brings the gradient of the loss.
            loss = (probability_RE * self._pull_E).sum()
            value_RK = MoEAuxLossAutoScaler.apply(value_RK, loss)
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


def balance_pull(tokens_E: Tensor, top_k: int, coefficient: float) -> Tensor:
    """[E]: what one token adds to the loss per probability of each expert."""
    count = (tokens_E.sum() / top_k).clamp(min=1)
    return (coefficient * len(tokens_E) / top_k * tokens_E / count.square()).float()
