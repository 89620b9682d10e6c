"""The batch-wide work of one optimizer step: how token losses become one number, and the input of
a planner.

The batch loss is sum_t coefficient_t * loss_t over all ranks and micro-batches; no other file knows
a reduction or a denominator. Denominators are those of the GLOBAL batch, so the gradient does not
depend on micro-batching or data parallelism.

A value that needs more than one token (a quantile, a sum, a rank) is computed once per step,
exactly, over all ranks, and reaches the loss as plain tensors and numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stare.config import UserError
from megatron_stare.numerics.selection import Across
from megatron_stare.records import LossPlan, TokenBatch


def coefficients(
    batch: TokenBatch,
    aggregation: str,
    across: Across,
    kept_T: Tensor | None = None,
    padded_length: int | None = None,
) -> Tensor:
    """coefficient_T of one aggregation; N loss tokens, n of the token's sequence, and G sequences
    with at least one, all global.

    token-mean: 1 / N. seq-mean-token-mean: 1 / (G n). seq-mean-token-sum: 1 / G.
    seq-mean-token-sum-norm: 1 / `padded_length` (Dr.GRPO, arXiv 2503.20783). row-mean: as
    seq-mean-token-mean, but G counts sequences without a loss token too. A batch without a loss
    token gives an empty tensor on every rank, never a division by zero.

    Where `kept_T` is false a token has coefficient 0 and does not count.
    """
    if kept_T is None:
        own_T = batch.sequence_tokens_T
        return _all(batch, own_T, batch.advantage_T, aggregation, across, padded_length)
    own_T = across.sum_by(kept_T.double(), batch.sequence_T, batch.num_sequences)[kept_T]
    found_T, template_T = torch.zeros_like(batch.advantage_T), batch.advantage_T[kept_T]
    found_T[kept_T] = _all(batch, own_T, template_T, aggregation, across, padded_length)
    return found_T


def _all(
    batch: TokenBatch,
    sequence_tokens_T: Tensor,
    template_T: Tensor,
    aggregation: str,
    across: Across,
    padded_length: int | None,
) -> Tensor:
    if aggregation == "token-mean":
        return torch.full_like(template_T, 1.0 / max(1, across.count(template_T.numel())))
    if aggregation == "seq-mean-token-sum-norm":
        if padded_length is None:
            raise UserError(
                "loss.aggregation=seq-mean-token-sum-norm divides by loss.padded_length; set it"
            )
        return torch.full_like(template_T, 1.0 / padded_length)
    # of its sequence: a sequence's shares add up to 1
    share_T = 1.0 / sequence_tokens_T.double()
    if aggregation == "row-mean":
        return (share_T / max(1, batch.num_sequences)).to(template_T.dtype)
    sequences = max(1, sequences_of(sequence_tokens_T, across))
    if aggregation == "seq-mean-token-sum":
        return torch.full_like(template_T, 1.0 / sequences)
    if aggregation == "seq-mean-token-mean":
        return (share_T / sequences).to(template_T.dtype)
    raise ValueError(f"aggregation {aggregation!r} is unknown")


def sequences_of(sequence_tokens_T: Tensor, across: Across) -> int:
    """The number of sequences that the loss tokens of all ranks belong to; `sequence_tokens_T` has
    the number of loss tokens in each token's own sequence.
    """
    return round(across.sum(1.0 / sequence_tokens_T.double()))


def batch_mean(value_T: Tensor, coefficient_T: Tensor, across: Across) -> float:
    """A per-token value averaged as the loss is."""
    return across.sum(value_T.double() * coefficient_T.double())


def _needed(value: Tensor | None, name: str) -> Tensor:
    assert value is not None, f"this plan needs a batch that was scored with {name}"
    return value


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
        return _needed(self.batch.surprisal_T, "surprisal_T")

    @property
    def entropy_T(self) -> Tensor:
        return _needed(self.batch.entropy_T, "entropy_T")

    @property
    def sensitivity_T(self) -> Tensor:
        """g = p (s - H) - c: a step on the token's logit changes entropy by A g."""
        return _needed(self.batch.sensitivity_T, "sensitivity_T")

    @property
    def nucleus_entropy_T(self) -> Tensor:
        """Entropy [nats] of the nucleus of the token's distribution."""
        return _needed(self.batch.nucleus_entropy_T, "nucleus_entropy_T")

    @property
    def tempered_T(self) -> Tensor:
        """ln(pi^T(a) / pi(a)) of the policy that was scored before the first update."""
        return _needed(self.batch.tempered_T, "tempered_T")

    @property
    def reward_Q(self) -> Tensor:
        """Reward of every sequence of the batch, the same on all ranks; NaN where it has none."""
        return _needed(self.batch.reward_Q, "reward_Q")

    @property
    def turn_T(self) -> Tensor:
        """The policy's turn that the token is in, from 0."""
        return _needed(self.batch.turn_T, "turn_T").long()

    @property
    def proxy_surprisal_T(self) -> Tensor:
        """-ln of pi_old without its improbable tokens, renormalised; inf for those tokens."""
        return self.old_surprisal_T + _needed(self.batch.proxy_mass_T, "proxy_mass_T")

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
