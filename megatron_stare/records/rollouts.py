"""What is sampled: Prompt, Rollout, Group; and what other ranks know of a rollout, its Outline.

A *loss token* is a token that the policy itself produced and that the loss may touch (`loss_mask`
1). Prompts, tool output and padding are none. What grows with tokens is an array, 9 bytes a token
of a rollout, 13 where its versions differ, and those of its routing where that is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy

Status = Literal["completed", "truncated", "aborted"]


# What an array of each kind may be made of, by numpy's letters: whole numbers never of fractions,
# and nothing of texts.
_MADE_OF = {"i": "iu", "u": "iu", "f": "fiu", "b": "biu"}


def fixed_array(
    values: Sequence[Any] | numpy.ndarray, kind: type[numpy.generic], name: str
) -> numpy.ndarray:
    """`values` as a flat array of `kind` that no one can write to; one that is so already is not
    copied.

    ValueError: they are not such numbers, or would be others (2^40 as int32, 2 as bool). Only
    fractions are rounded, to float32.
    """
    given = numpy.asarray(values) if len(values) else numpy.zeros(0, kind)
    if given.dtype == kind and given.ndim == 1:
        if given.flags.writeable:
            given = given.copy()
            given.flags.writeable = False
        return given
    if given.ndim != 1 or given.dtype.kind not in _MADE_OF[numpy.dtype(kind).kind]:
        raise ValueError(f"{name}: {given.dtype} of shape {given.shape} cannot be {kind.__name__}")
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
    "routing": numpy.uint8,
}


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled response. `logprobs` are the engine's, at the sampling temperature,
    one per response token.

    `loss_mask` is 1 on tokens the policy sampled, 0 on tokens that others inserted (tool
    output). `weight_version` counts the training steps behind the weights that sampled it; where
    the weights changed in between, `token_versions` has one version per response token, else none,
    and `weight_version` is the last. `aborted` is a part that may be continued. `episode` counts
    what a multi-turn rollout did (turns, tool_calls, ...). `routing` has the experts chosen for its
    first positions, prompt included, as RoutingShape writes them; nothing where nobody asked.

    The arrays (ROLLOUT_ARRAYS) may be given as sequences of numbers. ValueError: as other ones, or
    of other lengths.

    Judged: `reward` is the weighted sum of `reward_parts`, or None where the `verdict` is
    unverifiable, and then no token is a loss token. `verifier_kills` counts the verifier processes
    that judging it cost. `answered` is false where its verifier found no answer to judge.
    `baseline` is the reward of a greedy response to its prompt, where the advantages want one.
    `temperature` is the one it was sampled at, where that is not the policy's: then its `logprobs`
    are of another distribution than the one that is trained. `scored`: its `logprobs` are not an
    engine's but pi_old's, of the trainer when it trained the rollout for the first time.
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
    routing: numpy.ndarray = ()  # type: ignore[assignment]
    episode: dict[str, float] = field(default_factory=dict)
    verdict: Literal["", "correct", "wrong", "unverifiable"] = ""
    reward_parts: dict[str, float] = field(default_factory=dict)
    verifier_kills: int = 0
    answered: bool = True
    baseline: float | None = None
    temperature: float | None = None
    scored: bool = False

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
    def routing_bytes(self) -> int:
        """Of the experts chosen for its first positions."""
        return len(self.routing)

    @property
    def loss_tokens(self) -> int:
        """How many of its tokens are loss tokens."""
        return int(numpy.count_nonzero(self.loss_mask))

    def continued(self, later: Rollout) -> Rollout:
        """This part, and behind it what later weights added; the text is the caller's to make
        again. `later` has the routing of the positions behind this part's.
        """
        versions = numpy.concatenate([self.versions, later.versions])
        return Rollout(
            response_ids=numpy.concatenate([self.response_ids, later.response_ids]),
            logprobs=numpy.concatenate([self.logprobs, later.logprobs]),
            loss_mask=numpy.concatenate([self.loss_mask, later.loss_mask]),
            status=later.status,
            weight_version=int(versions[-1]) if len(versions) else later.weight_version,
            token_versions=versions,
            routing=numpy.concatenate([self.routing, later.routing]),
        )

    def without_loss(self, **changes: Any) -> Rollout:
        """The same with no loss token, and with these changes."""
        nothing = numpy.zeros(len(self.loss_mask), numpy.bool_)
        return dataclasses.replace(self, loss_mask=nothing, **changes)


_NO_VERSIONS = fixed_array((), numpy.int32, "token_versions")


def turns_of(loss_mask: numpy.ndarray) -> numpy.ndarray:
    """int32 of every response token: the turn of the policy that it is in or behind, from 0; -1
    before the first. A turn is a stretch of loss tokens; what a tool inserts ends it.
    """
    if loss_mask.all():  # one turn, as it is without tools
        return numpy.zeros(len(loss_mask), numpy.int32)
    begins = loss_mask.astype(numpy.int32)
    begins[1:] *= ~loss_mask[:-1]
    return numpy.cumsum(begins, dtype=numpy.int32) - 1


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
    routing_bytes: int
    status: Status
    weight_version: int
    reward: float | None
    advantage: float | None
    episode: dict[str, float]
    verdict: Literal["", "correct", "wrong", "unverifiable"]
    reward_parts: dict[str, float]
    verifier_kills: int
    answered: bool
    baseline: float | None
    temperature: float | None
    scored: bool

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
