"""What is trained on: TokenBatch and its MicroBatches, and what a loss is given of them.

No flat tensor holds anything but loss tokens, so that no mask is carried past `pack`. Shape legend:
T loss tokens of one rank's batch, N loss tokens of one micro-batch, B sequences of a micro-batch, S
its padded length, R positions that this rank's routers see, L its layers with experts, E experts, K
of them a token, Q sequences of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # what judges a response has no need of torch
    from torch import Tensor


class Nucleus(NamedTuple):
    """The leading tokens of a distribution: those whose cumulative probability is under `p`, and
    the one that reaches it or not.
    """

    p: float
    with_crossing: bool


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass sees: right-padded,
    or packed end to end (B = 1) with `cumulative_lengths` [B + 1], in host memory.

    `row_N` indexes the flattened [S * B] positions (Megatron's order) whose hidden state predicts a
    loss token; `target_N` is that token; `sequence_N` the place of its sequence among the
    micro-batch's `num_sequences`, the same on all context ranks; `rows` is where these N tokens lie
    in the TokenBatch's flat tensors.

    Of a model with experts: `real_R`, whether each of the R positions that this rank's routers see
    is one of a sequence, or padding; and `routing_RLK`, the experts that it is sent to in this
    rank's L layers, -1 where the router is free; None: it is everywhere.
    """

    token_BS: Tensor
    position_BS: Tensor
    row_N: Tensor
    target_N: Tensor
    sequence_N: Tensor
    num_sequences: int
    rows: slice
    cumulative_lengths: Tensor | None = None
    longest: int = 0
    real_R: Tensor | None = None
    routing_RLK: Tensor | None = None


@dataclass(frozen=True)
class TokenBatch:
    """One rank's share of a step: micro-batches,
    and one flat value per loss token in micro-batch order.

    `sequence_T` is the global number of the token's sequence, `sequence_tokens_T` how many loss
    tokens that has on all ranks, `token_index_T` a global order of all loss tokens that does not
    depend on the layout (ties in any selection are broken by it), `turn_T` the number of the
    policy's turn that it is in, from 0. `fresh_T` marks tokens sampled by the current weights,
    `off_temperature_T` those sampled at another temperature than the policy's (None: none was),
    `scored_T` those whose `rollout_logprob_T` is that of the pi_old which they were first trained
    with (None: none's is). On every rank `group_Q` is the number of each sequence's group and
    `reward_Q` [fp64] its reward, NaN where it has none. `surprisal_T`, `entropy_T` [nats] and,
    where asked for, the entropy `sensitivity_T`, `proxy_mass_T`, the log of the mass of tokens with
    p >= kappa max p (Lp-Reg; inf where the token itself is not one of them), `nucleus_entropy_T`,
    that of the leading tokens alone (SIREN), and `tempered_T`, ln(pi^T(a) / pi(a)), pi^T the policy
    with its logits divided by T once more (distribution-centric DCPO), are the scoring pass's:
    current policy, its temperature, detached; None before scoring. `old_surprisal_T` and
    `old_entropy_T` are pi_old's, None where that is the current policy; `reference_surprisal_T` the
    reference model's, where a KL term wants it. `expert_tokens_LE`: the whole batch's tokens by
    expert, in this rank's layers with experts, where a loss is to balance them.
    """

    microbatches: tuple[MicroBatch, ...]
    advantage_T: Tensor
    rollout_logprob_T: Tensor
    sequence_T: Tensor
    sequence_tokens_T: Tensor
    token_index_T: Tensor
    microbatch_T: Tensor
    fresh_T: Tensor
    num_sequences: int
    group_Q: Tensor | None = None
    turn_T: Tensor | None = None
    reward_Q: Tensor | None = None
    off_temperature_T: Tensor | None = None
    scored_T: Tensor | None = None
    surprisal_T: Tensor | None = None
    entropy_T: Tensor | None = None
    sensitivity_T: Tensor | None = None
    proxy_mass_T: Tensor | None = None
    nucleus_entropy_T: Tensor | None = None
    tempered_T: Tensor | None = None
    old_surprisal_T: Tensor | None = None
    old_entropy_T: Tensor | None = None
    reference_surprisal_T: Tensor | None = None
    expert_tokens_LE: Tensor | None = None

    @property
    def comparable_T(self) -> Tensor:
        """Whether `rollout_logprob_T` is an engine's, and of the policy's own temperature."""
        found_T = self.fresh_T.new_ones(self.fresh_T.shape)
        for other_T in (self.off_temperature_T, self.scored_T):
            found_T = found_T if other_T is None else found_T & ~other_T
        return found_T


@dataclass(frozen=True)
class Signals:
    """What `plan` hands to the loss: plain tensors and numbers, computed once per optimizer step.

    `coefficient_T` carries the reduction and its global denominator: the batch loss is sum over all
    ranks of coefficient * token loss. `weight_T` multiplies the finished token loss (STARE's omega;
    1 elsewhere). `correction_T` does too, whatever the loss: it corrects for another rollout
    policy; None: 1 everywhere. `state` is what the next plan needs (adaptive W and M); numbers
    only, so that a checkpoint can carry it. Tokens outside of `kept_T` have coefficient 0; None:
    all are kept. `values` (one per token) and `numbers` are what the loss asked its plan for.
    `chosen_T` [int8] is 1 in L+, -1 in L- and 0 elsewhere; None: the loss chooses no tokens.
    """

    coefficient_T: Tensor
    weight_T: Tensor
    metrics: dict[str, float]
    state: dict[str, float]
    correction_T: Tensor | None = None
    kept_T: Tensor | None = None
    values: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    chosen_T: Tensor | None = None


def _no_sequences(*_: Any, **unused: Any) -> Tensor:
    raise ValueError(
        'this loss sees single tokens: register it with @policy_loss(head="recompute") to let it '
        "sum over sequences"
    )


@dataclass(frozen=True)
class LossTokens:
    """Everything a loss may know about N tokens. `surprisal` and `entropy` are live;
    the rest is constant.

    A loss over whole sequences (BoundLoss.per_token false) has all tokens of a micro-batch that
    this rank holds, perhaps none; other ranks may hold more of the same sequences. `sequence`
    numbers each token's within the micro-batch, `sequence_tokens` is how many loss tokens that has
    on all ranks, `position` its place in the response. `sequence_sum` gives each token the sum of N
    values over all of them, differentiable (numerics/sequences.py);
    `sequence_scan(scan, value, every_position=False)` what a scan along the whole sequence makes of
    it, a constant (numerics/sequences.py). Both talk to other ranks: never call them under a
    condition that depends on the tokens.

    `values` and `numbers` come from the loss's own plan. `logits` [N, V] are live, divided by the
    sampling temperature, and there for a loss that asked for them (BoundLoss.logits).
    """

    surprisal: Tensor
    entropy: Tensor
    old_surprisal: Tensor
    advantage: Tensor
    weight: Tensor
    reference_surprisal: Tensor | None = None
    correction: Tensor | None = None
    old_entropy: Tensor | None = None
    rollout_surprisal: Tensor | None = None
    values: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    logits: Tensor | None = None
    sequence: Tensor | None = None
    sequence_tokens: Tensor | None = None
    position: Tensor | None = None
    sequence_sum: Callable[[Tensor], Tensor] = _no_sequences
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
        """For each token the mean of N values over all loss tokens of its sequence;
        differentiable. ValueError in a loss that is registered as per_token.
        """
        total = self.sequence_sum(value)
        assert self.sequence_tokens is not None, "whoever gives the sums gives the counts"
        return total / self.sequence_tokens


@dataclass(frozen=True)
class BoundLoss:
    """A loss bound to its settings, and what the head must know to run it.

    per_token: each token's loss depends on its own values alone, so the fused head may run it chunk
    by chunk; a loss over whole sequences (GSPO) says False and gets the recompute head.
    entropy_gradient: `entropy` must carry one. logits: it reads the whole distribution of every
    token, for which their logits are kept.
    """

    function: Callable[[LossTokens], Tensor]
    per_token: bool = True
    entropy_gradient: bool = False
    logits: bool = False
