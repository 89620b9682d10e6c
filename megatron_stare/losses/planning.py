"""The batch-wide work of one optimizer step: the input of a planner, and its type.

A value that needs more than one token (a quantile, a sum, a rank) is computed once per step,
exactly, over all ranks, and reaches the loss as plain tensors and numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stare.losses.aggregation import batch_mean, sequences_of
from megatron_stare.numerics.selection import Across
from megatron_stare.records import LossPlan, TokenBatch


@dataclass(frozen=True)
class Step:
    """A scored batch, the other ranks, the state of the last plan, and the loss's reduction.

    All tensors have one value per loss token of this rank, and none has a gradient.
    """

    batch: TokenBatch
    across: Across
    state: Mapping[str, float]
    coefficient_T: Tensor

    @property
    def advantage_T(self) -> Tensor:
        return self.batch.advantage_T

    @property
    def surprisal_T(self) -> Tensor:
        assert self.batch.surprisal_T is not None, "a plan works on a scored batch"
        return self.batch.surprisal_T

    @property
    def entropy_T(self) -> Tensor:
        assert self.batch.entropy_T is not None, "a plan works on a scored batch"
        return self.batch.entropy_T

    @property
    def sensitivity_T(self) -> Tensor:
        """g = p (s - H) - c: a step on the token's logit changes entropy by A g."""
        assert self.batch.sensitivity_T is not None, "this plan needs the scored sensitivity"
        return self.batch.sensitivity_T

    @property
    def nucleus_entropy_T(self) -> Tensor:
        """Entropy [nats] of the nucleus of the token's distribution."""
        nucleus_T = self.batch.nucleus_entropy_T
        assert nucleus_T is not None, "this plan needs the scored nucleus"
        return nucleus_T

    @property
    def tempered_T(self) -> Tensor:
        """ln(pi^T(a) / pi(a)) of the policy that was scored before the first update."""
        assert self.batch.tempered_T is not None, "this plan needs the scored tempered policy"
        return self.batch.tempered_T

    @property
    def reward_Q(self) -> Tensor:
        """Reward of every sequence of the batch, the same on all ranks; NaN where it has none."""
        assert self.batch.reward_Q is not None, "this plan needs the rewards"
        return self.batch.reward_Q

    @property
    def turn_T(self) -> Tensor:
        """The policy's turn that the token is in, from 0."""
        assert self.batch.turn_T is not None, "this plan needs the turns"
        return self.batch.turn_T.long()

    @property
    def proxy_surprisal_T(self) -> Tensor:
        """-ln of pi_old without its improbable tokens, renormalised; inf for those tokens."""
        mass_T = self.batch.proxy_mass_T
        assert mass_T is not None, "this plan needs the scored proxy"
        return self.old_surprisal_T + mass_T

    @property
    def probability_T(self) -> Tensor:
        """pi(a) of the current policy."""
        return torch.exp(-self.surprisal_T)

    @property
    def old_surprisal_T(self) -> Tensor:
        """pi_old's value; the current policy's where the batch has no other."""
        old_T = self.batch.old_surprisal_T
        return self.surprisal_T if old_T is None else old_T

    @property
    def old_entropy_T(self) -> Tensor:
        """pi_old's value; the current policy's where the batch has no other."""
        old_T = self.batch.old_entropy_T
        return self.entropy_T if old_T is None else old_T

    @property
    def log_ratio_T(self) -> Tensor:
        """ln(pi / pi_old), clamped to [-20, 20]."""
        return torch.clamp(self.old_surprisal_T - self.surprisal_T, -20.0, 20.0)

    @functools.cached_property
    def tokens(self) -> int:
        """Loss tokens on all ranks."""
        return self.across.count(self.advantage_T.numel())

    @functools.cached_property
    def entropy(self) -> float:
        """Hbar [nats]: the batch's entropy under the current policy, averaged as the loss is."""
        return batch_mean(self.entropy_T, self.coefficient_T, self.across)

    def share(self, mask_T: Tensor) -> float:
        """The share of tokens in the mask, over all ranks."""
        return self.across.count(mask_T) / max(1, self.tokens)

    @functools.cached_property
    def sequences(self) -> int:
        """Sequences with a loss token, on all ranks."""
        return sequences_of(self.batch.sequence_tokens_T, self.across)

    def top(self, value_T: Tensor, among_T: Tensor, k: int) -> Tensor:
        """Mask of the k largest values among the tokens in a mask; ties to the earlier token."""
        chosen_T = torch.zeros_like(among_T)
        index_T = self.batch.token_index_T
        chosen_T[among_T] = self.across.top_k(value_T[among_T], index_T[among_T], k)
        return chosen_T


# A Step in, a LossPlan out; settings are its keyword-only arguments (losses/settings.py).
Planner = Callable[..., LossPlan]


def nothing(step: Step, /) -> LossPlan:
    """The plan of a loss that needs no batch-wide work but the reduction."""
    return LossPlan()
