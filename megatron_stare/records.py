"""What flows through one training step, in birth order:
Prompt -> Rollout -> Group -> TokenBatch -> MicroBatch.

Shape legend: T loss tokens of one rank's batch, N loss tokens of one micro-batch, B sequences of a
micro-batch, S its padded length.

A *loss token* is a token that the policy itself produced and that the loss may touch (`loss_mask`
1). Prompts, tool output and padding are none, and no flat tensor below holds them, so no mask is
carried past `pack`.

What grows with tokens is an array, 9 bytes a token of a rollout, 13 where its versions differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

Status = Literal["completed", "truncated", "aborted"]


# What an array of each kind may be made of, by numpy's letters: whole numbers never of fractions,
# and nothing of texts.
_MADE_OF = {"i": "iu", "f": "fiu", "b": "biu"}


def fixed_array(
    values: Sequence[Any] | numpy.ndarray, kind: type[numpy.generic], name: str
) -> numpy.ndarray:
    """`values` as a flat array of `kind` that no one can write to; one that is so already is not
    copied.

    ValueError: they are not such numbers, or would be others (2^40 as int32, 2 as bool). Only
    fractions are rounded, to float32.
    """
    given = numpy.asarray(values) if len(values) else numpy.zeros(0, kind)
    if given.ndim != 1 or given.dtype.kind not in _MADE_OF[numpy.dtype(kind).kind]:
        raise ValueError(f"{name}: {given.dtype} of shape {given.shape} cannot be {kind.__name__}")
    if given.dtype == kind and not given.flags.writeable:
        return given
    with numpy.errstate(over="ignore"):
        found = given.astype(kind)
    if kind is not numpy.float32 and (found != given).any():
        raise ValueError(f"{name}: {given[found != given][0]} is no {kind.__name__}")
    found.flags.writeable = False
    return found


def same_fields(one: Any, other: Any) -> bool:
    """Whether two dataclasses of one type hold the same values, arrays included."""
    return all(
        numpy.array_equal(ours, theirs) if isinstance(ours, numpy.ndarray) else ours == theirs
        for ours, theirs in (
            (getattr(one, each.name), getattr(other, each.name)) for each in dataclasses.fields(one)
        )
    )


@dataclass(frozen=True, eq=False)
class Prompt:
    """One problem. `index` is its draw number in the run's data stream:
    unique, and the seed of its rollouts.

    `token_ids` is int32, and may be given as any whole numbers. `messages` and `tools` (function
    schemas) are what the chat template made `text` of; none where a row was text.
    """

    index: int
    token_ids: numpy.ndarray
    label: str
    data_source: str = ""
    text: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", fixed_array(self.token_ids, numpy.int32, "token_ids"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prompt) and same_fields(self, other)


# The arrays of a rollout, and what they hold.
ROLLOUT_ARRAYS: dict[str, type[numpy.generic]] = {
    "response_ids": numpy.int32,
    "logprobs": numpy.float32,
    "loss_mask": numpy.bool_,
    "token_versions": numpy.int32,
}


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled response. `logprobs` are the engine's, at the sampling temperature,
    one per response token.

    `loss_mask` is 1 on tokens the policy sampled, 0 on tokens that others inserted (tool
    output). `weight_version` counts the training steps behind the weights that sampled it; where
    the weights changed in between, `token_versions` has one version per response token, else none,
    and `weight_version` is the last. `aborted` is a part that may be continued. `episode` counts
    what a multi-turn rollout did (turns, tool_calls, ...).

    The arrays (ROLLOUT_ARRAYS) may be given as sequences of numbers. ValueError: as other ones, or
    of other lengths.

    Judged: `reward` is the weighted sum of `reward_parts`, or None where the `verdict` is
    unverifiable, and then no token is a loss token. `verifier_kills` counts the verifier processes
    that judging it cost.
    """

    response_ids: numpy.ndarray
    logprobs: numpy.ndarray
    loss_mask: numpy.ndarray
    status: Status
    weight_version: int
    text: str = ""
    reward: float | None = None
    advantage: float | None = None
    token_versions: numpy.ndarray = ()  # type: ignore[assignment]
    episode: dict[str, float] = field(default_factory=dict)
    verdict: Literal["", "correct", "wrong", "unverifiable"] = ""
    reward_parts: dict[str, float] = field(default_factory=dict)
    verifier_kills: int = 0

    def __post_init__(self) -> None:
        for name, kind in ROLLOUT_ARRAYS.items():
            object.__setattr__(self, name, fixed_array(getattr(self, name), kind, name))
        if (self.token_versions == self.weight_version).all():
            object.__setattr__(self, "token_versions", _NO_VERSIONS)
        lengths = {len(self.response_ids), len(self.logprobs), len(self.loss_mask)}
        if len(lengths) != 1:
            raise ValueError(
                f"rollout: {len(self.response_ids)} response_ids, {len(self.logprobs)} logprobs "
                f"and {len(self.loss_mask)} loss_mask entries; the three must be equally long"
            )
        if len(self.token_versions) not in (0, len(self.response_ids)):
            raise ValueError(
                f"rollout: {len(self.token_versions)} token_versions of {len(self.response_ids)} "
                "tokens"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rollout) and same_fields(self, other)

    @classmethod
    def inserted(cls, ids: Sequence[int], status: Status, version: int) -> Rollout:
        """Tokens that no policy sampled: log-prob 0, no loss token. Without ids: nothing at all."""
        count = len(ids)
        return cls(
            fixed_array(ids, numpy.int32, "ids"),
            numpy.zeros(count, numpy.float32),
            numpy.zeros(count, numpy.bool_),
            status,
            version,
        )

    @property
    def versions(self) -> numpy.ndarray:
        """The weight version of every response token."""
        if len(self.token_versions):
            return self.token_versions
        return numpy.full(len(self.response_ids), self.weight_version, numpy.int32)

    @property
    def varied(self) -> bool:
        """Whether its tokens are of several versions."""
        return len(self.token_versions) > 0

    @property
    def oldest_version(self) -> int:
        """Of the weights that sampled the oldest token."""
        return int(self.token_versions.min(initial=self.weight_version))

    @property
    def version_sum(self) -> int:
        """Of every token's weights."""
        return int(self.versions.sum(dtype=numpy.int64))

    @property
    def length(self) -> int:
        """Its tokens."""
        return len(self.response_ids)

    @property
    def loss_tokens(self) -> int:
        """How many of its tokens are loss tokens."""
        return int(numpy.count_nonzero(self.loss_mask))

    def continued(self, later: Rollout) -> Rollout:
        """This part, and behind it what later weights added;
        the text is the caller's to make again.
        """
        versions = numpy.concatenate([self.versions, later.versions])
        return Rollout(
            response_ids=numpy.concatenate([self.response_ids, later.response_ids]),
            logprobs=numpy.concatenate([self.logprobs, later.logprobs]),
            loss_mask=numpy.concatenate([self.loss_mask, later.loss_mask]),
            status=later.status,
            weight_version=int(versions[-1]) if len(versions) else later.weight_version,
            token_versions=versions,
        )

    def without_loss(self, **changes: Any) -> Rollout:
        """The same with no loss token, and with these changes."""
        nothing = numpy.zeros(len(self.loss_mask), numpy.bool_)
        return dataclasses.replace(self, loss_mask=nothing, **changes)


_NO_VERSIONS = fixed_array((), numpy.int32, "token_versions")


@dataclass(frozen=True)
class Outline:
    """What every rank knows of a rollout that another one holds: all but the tokens and the text.

    Its fields are those of the Rollout, and of its prompt the length.
    """

    prompt_length: int
    length: int
    loss_tokens: int
    oldest_version: int
    version_sum: int
    varied: bool  # its tokens are of several versions
    status: Status
    weight_version: int
    reward: float | None
    advantage: float | None
    episode: dict[str, float]
    verdict: Literal["", "correct", "wrong", "unverifiable"]
    reward_parts: dict[str, float]
    verifier_kills: int

    def without_loss(self, **changes: Any) -> Outline:
        """The same with no loss token, and with these changes."""
        return dataclasses.replace(self, loss_tokens=0, **changes)


EVERY_RANK = -1


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt: the unit over which advantages
    are normalised and signal is judged.

    Whole on the rank `holder`, or on every rank. On others the rollouts are Outlines, and the
    prompt has nothing but its index.
    """

    prompt: Prompt
    rollouts: tuple[Rollout | Outline, ...]
    holder: int = EVERY_RANK

    @property
    def prompt_length(self) -> int:
        """The prompt's tokens."""
        first = self.rollouts[0]
        return first.prompt_length if isinstance(first, Outline) else len(self.prompt.token_ids)

    @property
    def oldest_version(self) -> int:
        """Of the weights that sampled the group's oldest token."""
        return min(rollout.oldest_version for rollout in self.rollouts)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass sees: right-padded,
    or packed end to end (B = 1) with `cumulative_lengths` [B + 1].

    `row_N` indexes the flattened [S * B] positions (Megatron's order) whose hidden state predicts a
    loss token; `target_N` is that token; `sequence_N` the place of its sequence among the
    micro-batch's `num_sequences`, the same on all context ranks; `rows` is where these N tokens lie
    in the TokenBatch's flat tensors.
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


@dataclass(frozen=True)
class TokenBatch:
    """One rank's share of a step: micro-batches,
    and one flat value per loss token in micro-batch order.

    `sequence_T` is the global number of the token's sequence, `sequence_tokens_T` how many loss
    tokens that has on all ranks, `token_index_T` a global order of all loss tokens that does not
    depend on the layout (ties in any selection are broken by it), `group_T` the number of the
    token's group. `fresh_T` marks tokens sampled by the current weights. `surprisal_T`, `entropy_T`
    [nats] and, where asked for, the entropy `sensitivity_T` and `proxy_mass_T`, the log of the mass
    of tokens with p >= kappa max p (Lp-Reg; inf where the token itself is not one of them), are the
    scoring pass's: current policy, sampling temperature, detached; None before scoring.
    `old_surprisal_T` and `old_entropy_T` are pi_old's, None where that is the current policy;
    `reference_surprisal_T` the reference model's, where a KL term wants it.
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
    group_T: Tensor | None = None
    surprisal_T: Tensor | None = None
    entropy_T: Tensor | None = None
    sensitivity_T: Tensor | None = None
    proxy_mass_T: Tensor | None = None
    old_surprisal_T: Tensor | None = None
    old_entropy_T: Tensor | None = None
    reference_surprisal_T: Tensor | None = None


@dataclass(frozen=True)
class Signals:
    """What `plan` hands to the loss: plain tensors and numbers, computed once per optimizer step.

    `coefficient_T` carries the reduction and its global denominator: the batch loss is sum over all
    ranks of coefficient * token loss. `weight_T` multiplies the finished token loss (STARE's omega;
    1 elsewhere). `correction_T` does too, whatever the loss: it corrects for another rollout
    policy; None: 1 everywhere. `state` is what the next plan needs (adaptive W and M); numbers
    only, so that a checkpoint can carry it. Tokens outside of `kept_T` have coefficient 0; None:
    all are kept. `values` (one per token) and `numbers` are what the loss asked its plan for.
    """

    coefficient_T: Tensor
    weight_T: Tensor
    metrics: dict[str, float]
    state: dict[str, float]
    correction_T: Tensor | None = None
    kept_T: Tensor | None = None
    values: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)


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
    values over all of them, differentiable (numerics/sequence_sum.py);
    `sequence_scan(scan, value, every_position=False)` what a scan along the whole sequence makes of
    it, a constant (numerics/sequence_scan.py). Both talk to other ranks: never call them under a
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
        return torch.clamp(self.old_surprisal - self.surprisal, -20.0, 20.0)

    @property
    def ratio(self) -> Tensor:
        """pi / pi_old of each token, within e^-20 .. e^20."""
        return torch.exp(self.log_ratio)

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
