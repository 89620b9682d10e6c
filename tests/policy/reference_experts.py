"""A model with experts in float64, through transformers, with given experts for every token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_stare.records import Group, Rollout, RoutingShape


class Scored(NamedTuple):
    """Surprisals by the tokens' global order, and the advantage times the response's log-prob."""

    surprisal: dict[int, float]
    gain: Tensor


class ForcedExperts:
    """One sequence at a time. After a call, for every layer with experts: `chosen` [S, K], and the
    router's `probability` [S, E], which carries gradients: of a sigmoid router its scores over
    their sum.
    """

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float64, attn_implementation="eager"
        )
        self.model.set_experts_implementation("eager")
        self.given: Tensor | None = None
        self.chosen: list[Tensor] = []
        self.probability: list[Tensor] = []
        for layer in self.model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.forward = self._router(layer.mlp.gate)

    def logprobs(self, ids: list[int], given_PLK: Any = ()) -> Tensor:
        """ln pi of every token but the first. The first P positions go to the given experts, the
        others where the routers send them.
        """
        self.given = torch.tensor(given_PLK.tolist()) if len(given_PLK) else None
        self.chosen, self.probability = [], []
        logits = self.model(torch.tensor([ids[:-1]])).logits[0]
        return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]

    def scored(self, groups: Sequence[Group], shape: RoutingShape) -> Iterator[Scored]:
        """The first rollout of every group, by the experts that it names."""
        for number, group in enumerate(groups):
            rollout, prompt = group.rollouts[0], group.prompt.token_ids.tolist()
            assert isinstance(rollout, Rollout)
            ids = [*prompt, *rollout.response_ids.tolist()]
            logprobs = self.logprobs(ids, shape.decoded(rollout.routing))[len(prompt) - 1 :]
            places = [(number << 32) + place for place in range(rollout.length)]
            surprisal = dict(zip(places, (-logprobs).tolist(), strict=True))
            yield Scored(surprisal, rollout.advantage * logprobs.sum())

    def _router(self, gate: Any) -> Any:
        own, sigmoid = gate.forward, hasattr(gate, "e_score_correction_bias")

        def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden_states.reshape(-1, gate.hidden_dim) @ gate.weight.t()
            score = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, -1)
            chosen = own(hidden_states)[2].clone()
            if self.given is not None:
                place = len(self.chosen)
                chosen[: len(self.given)] = self.given[:, place]
            weight = score.gather(-1, chosen)
            if gate.norm_topk_prob:
                weight = weight / weight.sum(-1, keepdim=True)
            self.chosen.append(chosen)
            self.probability.append(score / score.sum(-1, keepdim=True))
            return logits, weight * getattr(gate, "routed_scaling_factor", 1.0), chosen

        return forward
