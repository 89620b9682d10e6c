"""`@policy_loss`: the function's name is its config name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_stare.config import LossConfig, UserError, nearest
from megatron_stare.losses.aggregation import coefficients
from megatron_stare.losses.kl import kl_penalty
from megatron_stare.numerics.selection import Across
from megatron_stare.records import BoundLoss, LossTokens, Signals, TokenBatch


class Loss(Protocol):
    """A pure function: N tokens in, N losses out, no reduction. A token's loss depends on its own
    values alone or, with `per_token` false, also on its sequence's (LossTokens.sequence_sum).
    """

    __name__: str

    def __call__(self, tokens: LossTokens, config: LossConfig) -> Tensor: ...


class Plan(Protocol):
    """The batch-wide work of one optimizer step.
    `state` is what the previous plan left ({} at the start).
    """

    def __call__(
        self, batch: TokenBatch, config: LossConfig, across: Across, state: dict[str, float], /
    ) -> Signals: ...


@dataclass(frozen=True)
class Objective:
    """A loss, the plan that prepares it, and what the head must know of it (records.BoundLoss)."""

    name: str
    loss: Loss
    plan: Plan
    per_token: bool = True
    entropy_gradient: bool = False

    def bind(self, config: LossConfig) -> BoundLoss:
        """The loss with its settings filled in, as the actor takes it:
        corrected for the rollout policy, plus KL.
        """

        def whole(tokens: LossTokens) -> Tensor:
            loss = self.loss(tokens, config)
            if tokens.correction is not None:
                loss = loss * tokens.correction
            return (
                loss + config.kl_loss_coef * kl_penalty(tokens, config.kl_loss_type)
                if config.kl_loss_coef
                else loss
            )

        return BoundLoss(whole, self.per_token, self.entropy_gradient)

    @property
    def needs_scores(self) -> bool:
        """Whether the plan reads surprisal or entropy,
        so that a scoring pass must come before it.
        """
        return self.plan is not plain_plan


_objectives: dict[str, Objective] = {}


def plain_plan(
    batch: TokenBatch, config: LossConfig, across: Across, state: dict[str, float]
) -> Signals:
    """The plan of a loss that needs no batch-wide work but the reduction: every token weighs 1."""
    coefficient_T = coefficients(batch, config.aggregation, across)
    return Signals(
        coefficient_T, coefficient_T.new_ones(coefficient_T.shape), metrics={}, state=state
    )


def policy_loss(
    plan: Plan = plain_plan, *, per_token: bool = True, entropy_gradient: bool = False
) -> Callable[[Loss], Loss]:
    """Register a loss under its function's name. ValueError where the name is taken."""

    def register(loss: Loss) -> Loss:
        if loss.__name__ in _objectives:
            raise ValueError(f"two losses are named {loss.__name__!r}")
        _objectives[loss.__name__] = Objective(
            loss.__name__, loss, plan, per_token, entropy_gradient
        )
        return loss

    return register


def find_objective(name: str) -> Objective:
    """The objective of that name; UserError lists the valid ones and the nearest."""
    if name not in _objectives:
        raise UserError(f"loss.name={name!r} is unknown{nearest(name, _objectives)}")
    return _objectives[name]
