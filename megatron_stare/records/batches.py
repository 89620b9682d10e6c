"""TokenBatch and its MicroBatches, and what a loss reads of them.

Flat tensors hold only loss tokens, so that no mask is needed after `pack`. Shape legend:
T loss tokens of one rank's batch, N loss tokens of one micro-batch, B sequences of a micro-batch, S
its padded length, R positions that this rank's routers see, L its layers with experts, E experts, K
of them a token, Q sequences of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # processes that judge responses import this without torch
    from torch import Tensor


class Nucleus(NamedTuple):
    """The leading tokens of a distribution: those whose cumulative probability is below `p`."""

    p: float
    with_crossing: bool  # and the token that reaches `p`


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass's input: right-padded, or packed end to end (B = 1)."""

    token_BS: Tensor
    position_BS: Tensor
    row_N: Tensor  # into the flattened [S * B] (Megatron's order): positions that predict a token
    target_N: Tensor  # the loss token that the position predicts
    sequence_N: Tensor  # its sequence's place in the micro-batch, the same on all context ranks
    num_sequences: int
    rows: slice  # place of these N tokens in the TokenBatch's flat tensors
    loss_tokens_B: Tensor  # of each sequence, on all ranks
    offset_B: Tensor  # of each sequence's response in its rollout's arrays
    cumulative_lengths: Tensor | None = None  # [B + 1], in host memory; of packed sequences
    # First row and number of the rows that hold each sequence's first positions in its place
    # (policy.shared_prompts); empty: every sequence holds all of its own.
    prefixes: tuple[tuple[int, int], ...] = ()
    longest: int = 0
    # With experts: whether a position that this rank's routers see belongs to a sequence (else it
    # is padding); None: all do.
    real_R: Tensor | None = None
    # The experts that each position is sent to, in this rank's layers; -1: the router decides.
    routing_RLK: Tensor | None = None


@dataclass(frozen=True)
class TokenBatch:
    """One rank's part of a step: its micro-batches, and one flat value per loss token in
    micro-batch order. Values of the scoring pass are detached, and None before it.
    """

    microbatches: tuple[MicroBatch, ...]
    advantage_T: Tensor
    rollout_logprob_T: Tensor
    # A sequence here is a rollout: all training sequences of an agent's episode.
    sequence_T: Tensor  # global number of the token's sequence
    sequence_tokens_T: Tensor  # loss tokens of that sequence on all ranks
    # Global order of all loss tokens, the same in every layout; it breaks ties in selections.
    token_index_T: Tensor
    microbatch_T: Tensor
    fresh_T: Tensor  # sampled by the current weights
    num_sequences: int
    # On every rank: each sequence's group, and its reward [fp64], NaN where it has none.
    group_Q: Tensor | None = None
    server_Q: Tensor | None = None  # each sequence's server (RolloutMeta.server)
    turn_T: Tensor | None = None  # number of the policy's turn that the token is in, from 0
    reward_Q: Tensor | None = None
    # Sampled at another temperature than the policy's; None: no token was.
    off_temperature_T: Tensor | None = None
    # `rollout_logprob_T` is that of the pi_old of the token's first training; None: nowhere.
    scored_T: Tensor | None = None
    # Of the scoring pass: the current policy at its temperature [nats].
    surprisal_T: Tensor | None = None
    entropy_T: Tensor | None = None
    variance_T: Tensor | None = None  # of the surprisal, under the policy [nats^2]
    sensitivity_T: Tensor | None = None  # of the entropy to the token's logit
    # Lp-Reg: log of the mass of tokens with p >= kappa max p; inf where the token is not one.
    proxy_mass_T: Tensor | None = None
    nucleus_entropy_T: Tensor | None = None  # SIREN: entropy of the leading tokens alone
    # Distribution-centric DCPO: ln(pi^T(a) / pi(a)), pi^T with logits divided by T once more.
    tempered_T: Tensor | None = None
    # pi_old's; None where that is the current policy.
    old_surprisal_T: Tensor | None = None
    old_entropy_T: Tensor | None = None
    reference_surprisal_T: Tensor | None = None  # the reference model's, for a KL term
    # Of exact distillation: the policy's K likeliest ids [int32] at each token's place, and its and
    # the teacher's log-probs of them.
    top_ids_TK: Tensor | None = None
    top_logprob_TK: Tensor | None = None
    teacher_top_TK: Tensor | None = None
    # Tokens of the whole batch by expert, in this rank's layers, where a loss balances them.
    expert_tokens_LE: Tensor | None = None

    @property
    def sampled_T(self) -> Tensor:
        """Sampled by the current weights at the policy's own temperature."""
        other_T = self.off_temperature_T
        return self.fresh_T if other_T is None else self.fresh_T & ~other_T

    @property
    def comparable_T(self) -> Tensor:
        """`rollout_logprob_T` is an engine's, at the policy's own temperature."""
        found_T = self.fresh_T.new_ones(self.fresh_T.shape)
        for other_T in (self.off_temperature_T, self.scored_T):
            found_T = found_T if other_T is None else found_T & ~other_T
        return found_T


@dataclass(frozen=True)
class LossPlan:
    """The result of a loss's planner for the whole batch, once per optimizer step."""

    weight_T: Tensor | None = None  # multiplies the finished token loss; None: 1
    # Tokens outside of it have coefficient 0 and leave the denominator; None: all are kept.
    kept_T: Tensor | None = None
    # Tensors (one value per token) and numbers that reach the loss under their names.
    values: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    # The state that the next step's plan starts from: numbers only, for the checkpoint.
    # None: unchanged.
    state: dict[str, float] | None = None
    # int8, for diagnostics: 1 in L+, -1 in L-, 0 elsewhere; None: the loss chooses no tokens.
    chosen_T: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Signals(LossPlan):
    """A plan with its reduction filled in: plain tensors and numbers that the loss reads."""

    # Carries the reduction and its global denominator: the batch loss is the sum over all ranks of
    # coefficient * token loss.
    coefficient_T: Tensor
    weight_T: Tensor
    state: dict[str, float]
    # Multiplies the finished token loss, as correction for another rollout policy; None: 1.
    correction_T: Tensor | None = None


def _no_sequences(*_: Any, **unused: Any) -> Tensor:
    raise ValueError(
        'this loss sees single tokens: register it with @policy_loss(head="recompute") to let it '
        "sum over sequences"
    )


@dataclass(frozen=True)
class LossTokens:
    """Everything a loss may know about N tokens. `surprisal`, `entropy` and `logits` are live; the
    rest is constant.

    A loss over whole sequences (BoundLoss.per_token false) gets all tokens of a micro-batch that
    this rank holds, perhaps none; other ranks may hold more of the same sequences.
    """

    surprisal: Tensor
    entropy: Tensor
    old_surprisal: Tensor
    advantage: Tensor
    weight: Tensor
    reference_surprisal: Tensor | None = None
    top_ids: Tensor | None = None  # [N, K], and the teacher's log-probs of them
    teacher_top: Tensor | None = None
    correction: Tensor | None = None
    old_entropy: Tensor | None = None
    rollout_surprisal: Tensor | None = None
    # Of the loss's own plan.
    values: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    # [N, V], divided by the sampling temperature; for a loss that asks for them (BoundLoss.logits).
    logits: Tensor | None = None
    sequence: Tensor | None = None  # number of the token's sequence within the micro-batch
    sequence_tokens: Tensor | None = None  # loss tokens of that sequence on all ranks
    position: Tensor | None = None  # place in the response
    # Both communicate with other ranks: never call them under a condition on the tokens.
    # The sum of N values over each token's sequence, differentiable (numerics/sequences.py).
    sequence_sum: Callable[[Tensor], Tensor] = _no_sequences
    # sequence_scan(scan, value, every_position=False): the result of a scan along the sequence, a
    # constant (numerics/sequences.py).
    sequence_scan: Callable[..., Tensor] = _no_sequences

    @property
    def log_ratio(self) -> Tensor:
        """ln(pi / pi_old) of each token, clamped to [-20, 20] so that its exponential is finite."""
        return (self.old_surprisal - self.surprisal).clamp(-20.0, 20.0)

    @property
    def ratio(self) -> Tensor:
        """pi / pi_old of each token, within e^-20 .. e^20."""
        return self.log_ratio.exp()

    @property
    def log_prob(self) -> Tensor:
        """ln pi(a) of each token."""
        return -self.surprisal

    def sequence_mean(self, value: Tensor) -> Tensor:
        """The mean of N values over all loss tokens of each token's sequence; differentiable.
        ValueError in a loss that is registered as per_token.
        """
        total = self.sequence_sum(value)
        assert self.sequence_tokens is not None, "sums come with counts"
        return total / self.sequence_tokens


@dataclass(frozen=True)
class BoundLoss:
    """A loss bound to its settings, and what the head must know to run it."""

    function: Callable[[LossTokens], Tensor]
    # A token's loss depends on its own values alone, so the fused head may run it chunk by chunk; a
    # loss over whole sequences (GSPO) says False and gets the recompute head.
    per_token: bool = True
    entropy_gradient: bool = False  # `entropy` must carry a gradient
    logits: bool = False  # it reads the logits of every token, which are then kept
