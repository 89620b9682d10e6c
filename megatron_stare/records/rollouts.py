"""Prompt, Rollout and Group, and RolloutMeta: a rollout without its tokens.

A *loss token* is a token that the policy itself produced and that the loss may touch (`loss_mask`
1). Prompts, tool output and padding have none. Values per token are arrays: 9 bytes per token of a
rollout, 13 where versions differ, plus the routing where it is kept.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy

from megatron_stare.system import digest

Status = Literal["completed", "truncated", "aborted"]


# Kinds of numbers (numpy's letters) that an array of each kind accepts: integers are never made
# from fractions, and numbers never from text.
_ACCEPTED = {"i": "iu", "u": "iu", "f": "fiu", "b": "biu"}


def fixed_array(
    values: Sequence[Any] | numpy.ndarray, kind: type[numpy.generic], name: str
) -> numpy.ndarray:
    """`values` as a flat read-only array of `kind`; not copied if it is one already.

    ValueError: a value is not such a number, or would change (2^40 as int32, 2 as bool). Only
    fractions are rounded, to float32.
    """
    given = numpy.asarray(values) if len(values) else numpy.zeros(0, kind)
    if given.dtype == kind and given.ndim == 1:
        if given.flags.writeable:
            given = given.copy()
            given.flags.writeable = False
        return given
    if given.ndim != 1 or given.dtype.kind not in _ACCEPTED[numpy.dtype(kind).kind]:
        raise ValueError(f"{name}: {given.dtype} of shape {given.shape} cannot be {kind.__name__}")
    with numpy.errstate(over="ignore"):
        found = given.astype(kind)
    if kind is not numpy.float32 and (found != given).any():
        raise ValueError(f"{name}: {given[found != given][0]} is not of type {kind.__name__}")
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
    """One problem."""

    index: int  # draw number in the run's data stream: unique, and the seed of its rollouts
    token_ids: numpy.ndarray  # int32; accepts any sequence of integers
    label: str
    text: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    # The messages that the chat template rendered as `text`; empty for a row of plain text.
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()  # function schemas

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


class SequenceMeta(NamedTuple):
    """One sequence of an episode, without its tokens."""

    length: int  # tokens, the first included, which no position predicts
    loss_tokens: int
    varied: bool  # tokens after the first are of several versions, or not of the rollout's
    turns: int  # of the policy


@dataclass(frozen=True, kw_only=True)
class RolloutMeta:
    """A rollout without its tokens and text: what every rank knows of all rollouts of a step."""

    length: int  # response tokens
    loss_tokens: int
    oldest_version: int  # version of the weights that sampled the oldest token
    version_sum: int  # sum of all tokens' versions
    varied: bool  # tokens are of several versions
    routing_bytes: int
    status: Status  # "aborted": a part that may be continued
    # Training steps before the weights that sampled it; the last version where they changed.
    weight_version: int
    # Weighted sum of `reward_parts`; None: not judged, or unverifiable.
    reward: float | None = None
    advantage: float | None = None
    # Counts of a multi-turn rollout: turns, tool_calls, ...
    episode: dict[str, float] = field(default_factory=dict)
    verdict: Literal["", "correct", "wrong", "unverifiable"] = ""
    reward_parts: dict[str, float] = field(default_factory=dict)
    verifier_kills: int = 0  # verifier processes that were killed while judging it
    answered: bool = True  # false: the verifier found no answer to judge
    # Reward of a greedy response to the same prompt, for advantages that need one.
    baseline: float | None = None
    # Sampling temperature where it differs from the policy's: `logprobs` are then of another
    # distribution than the trained one.
    temperature: float | None = None
    # Digest of the settings of sampling and tools that it was sampled under.
    sampling: str = ""
    # `logprobs` are not the engine's but the trainer's pi_old of the rollout's first training.
    scored: bool = False
    # The server that sampled it, by its place in the pool; -1: several, or unknown.
    server: int = -1
    # Of an agent's episode: its training sequences, which begin with tokens of their own instead of
    # the group's prompt. Empty: one sequence, the prompt and the response.
    sequences: tuple[SequenceMeta, ...] = ()
    # Reward that an agent or its environment returned; None: nothing.
    outcome: float | None = None

    def __post_init__(self) -> None:
        found = tuple(SequenceMeta(*each) for each in self.sequences)  # JSON gives lists
        object.__setattr__(self, "sequences", found)

    def without_loss(self, **changes: Any) -> RolloutMeta:
        """A copy without loss tokens, with these changes."""
        found = tuple(each._replace(loss_tokens=0) for each in self.sequences)
        return dataclasses.replace(self, loss_tokens=0, sequences=found, **changes)

    def part(self, number: int) -> RolloutMeta:
        """Sequence `number` after its first token."""
        its = self.sequences[number]
        return dataclasses.replace(
            self,
            length=its.length - 1,
            loss_tokens=its.loss_tokens,
            varied=its.varied,
            sequences=(),
        )


@dataclass(frozen=True, eq=False)
class Rollout(RolloutMeta):
    """One sampled response: its meta and its tokens.

    An agent's episode has one or several sequences, `lengths` tokens each: their arrays are
    concatenated. A token that the policy sampled may be in several of them, and is a loss token in
    one.

    The arrays (ROLLOUT_ARRAYS) may be given as sequences of numbers. ValueError: they hold other
    values, or their lengths differ. A rollout with verdict "unverifiable" has no loss token.
    """

    response_ids: numpy.ndarray
    logprobs: numpy.ndarray  # the engine's, at the sampling temperature; one per response token
    loss_mask: numpy.ndarray  # 1: sampled by the policy; 0: inserted, e.g. tool output
    text: str = ""
    # One version per response token where they differ, else empty.
    token_versions: numpy.ndarray = ()  # type: ignore[assignment]
    # Experts chosen for the first positions, prompt included, as RoutingShape encodes them; empty
    # where they were not asked for.
    routing: numpy.ndarray = ()  # type: ignore[assignment]
    lengths: tuple[int, ...] = ()  # of an agent's episode: tokens of each of its sequences

    # Counted from the arrays.
    length: int = field(init=False)
    loss_tokens: int = field(init=False)
    oldest_version: int = field(init=False)
    version_sum: int = field(init=False)
    varied: bool = field(init=False)
    routing_bytes: int = field(init=False)
    sequences: tuple[SequenceMeta, ...] = field(init=False)

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
        for name, value in self._counts().items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "sequences", self._sequences())

    def _sequences(self) -> tuple[SequenceMeta, ...]:
        if not self.lengths:
            return ()
        if sum(self.lengths) != self.length or min(self.lengths) < 1 or len(self.routing):
            raise ValueError(
                f"rollout: lengths={self.lengths} of {self.length} tokens and {len(self.routing)} "
                "bytes of routing; lengths must be positive and add up, without routing"
            )
        found = []
        for begin, end in self.stretches:
            mask, versions = self.loss_mask[begin:end], self.token_versions[begin + 1 : end]
            if mask[0]:
                raise ValueError(f"rollout: token {begin} begins a sequence; it cannot be trained")
            varied = bool((versions != self.weight_version).any())
            turns = int(turns_of(mask)[-1]) + 1
            found.append(SequenceMeta(len(mask), int(numpy.count_nonzero(mask)), varied, turns))
        return tuple(found)

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """The beginning and the end of every sequence of an episode, in the arrays."""
        ends = list(itertools.accumulate(self.lengths, initial=0))
        return list(itertools.pairwise(ends))

    def part(self, number: int) -> Rollout:
        begin, end = self.stretches[number]
        its = slice(begin + 1, end)
        arrays = {name: getattr(self, name)[its] for name in ROLLOUT_ARRAYS if name != "routing"}
        return dataclasses.replace(self, **arrays, lengths=(), text="")

    def _counts(self) -> dict[str, int]:
        length, varied = len(self.response_ids), len(self.token_versions) > 0
        versions_sum = (
            int(self.token_versions.sum(dtype=numpy.int64))
            if varied
            else length * self.weight_version
        )
        return {
            "length": length,
            "loss_tokens": int(numpy.count_nonzero(self.loss_mask)),
            "oldest_version": int(self.token_versions.min(initial=self.weight_version)),
            "version_sum": versions_sum,
            "varied": varied,
            "routing_bytes": len(self.routing),
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rollout) and same_fields(self, other)

    @classmethod
    def inserted(cls, ids: Sequence[int], status: Status, version: int) -> Rollout:
        """Tokens that no policy sampled: log-prob 0, no loss token. `ids` may be empty."""
        count = len(ids)
        return cls(
            fixed_array(ids, numpy.int32, "ids"),
            numpy.zeros(count, numpy.float32),
            numpy.zeros(count, numpy.bool_),
            status=status,
            weight_version=version,
        )

    @property
    def versions(self) -> numpy.ndarray:
        """The weight version of every response token."""
        if len(self.token_versions):
            return self.token_versions
        return numpy.full(len(self.response_ids), self.weight_version, numpy.int32)

    def continued(self, later: Rollout) -> Rollout:
        """This part followed by the tokens that later weights added, without text: the caller
        decodes it. `later.routing` covers the positions after those of this part's routing.
        """
        versions = numpy.concatenate([self.versions, later.versions])
        return Rollout(
            response_ids=numpy.concatenate([self.response_ids, later.response_ids]),
            logprobs=numpy.concatenate([self.logprobs, later.logprobs]),
            loss_mask=numpy.concatenate([self.loss_mask, later.loss_mask]),
            status=later.status,
            server=self.server if self.server == later.server else -1,
            weight_version=int(versions[-1]) if len(versions) else later.weight_version,
            token_versions=versions,
            routing=numpy.concatenate([self.routing, later.routing]),
        )

    def without_loss(self, **changes: Any) -> Rollout:
        """A copy without loss tokens, with these changes."""
        nothing = numpy.zeros(len(self.loss_mask), numpy.bool_)
        return dataclasses.replace(self, loss_mask=nothing, **changes)


_NO_VERSIONS = fixed_array((), numpy.int32, "token_versions")


def turns_of(loss_mask: numpy.ndarray) -> numpy.ndarray:
    """int32 [tokens]: the number, from 0, of the policy's turn that a token is in or follows; -1
    before the first. A turn is a stretch of loss tokens; tool output ends it.
    """
    if loss_mask.all():  # one turn: no tools were used
        return numpy.zeros(len(loss_mask), numpy.int32)
    begins = loss_mask.astype(numpy.int32)
    begins[1:] *= ~loss_mask[:-1]
    return numpy.cumsum(begins, dtype=numpy.int32) - 1


@dataclass(frozen=True)
class RoutingShape:
    """The experts that a rollout's tokens were sent to, as bytes: `layers` are the numbers of those
    with experts, of `experts` of which each token gets `top_k`.

    Of every position that the model has read, from the first one on, a rollout has the numbers of
    the chosen experts: for each layer with experts `top_k` of them, one byte each, or two
    (little-endian) where there are more than 256. Qwen3-30B-A3B: 48 x 8 = 384 bytes a token.
    """

    layers: tuple[int, ...]
    top_k: int
    experts: int

    @property
    def kind(self) -> numpy.dtype:
        """The dtype of an expert's number."""
        return numpy.dtype(numpy.uint8 if self.experts <= 256 else "<u2")

    @property
    def width(self) -> int:
        """Bytes of one position."""
        return len(self.layers) * self.top_k * self.kind.itemsize

    def encoded(self, choices_PLK: numpy.ndarray) -> numpy.ndarray:
        """Choices of P positions, as a rollout's `routing`.

        ValueError: they are not of this shape, or name an unknown expert, or one expert twice for a
        token. A server that has not kept its choices gives such an answer.
        """
        wanted = (len(choices_PLK), len(self.layers), self.top_k)
        if choices_PLK.shape != wanted:
            raise ValueError(f"expert choices of shape {choices_PLK.shape}, not {wanted}")
        if choices_PLK.size and not 0 <= choices_PLK.min() <= choices_PLK.max() < self.experts:
            raise ValueError(
                f"expert choices {choices_PLK.min()} to {choices_PLK.max()} of {self.experts}"
            )
        found = numpy.ascontiguousarray(choices_PLK, self.kind)
        ordered = numpy.sort(found, axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise ValueError("expert choices that send a token to one expert twice")
        return found.reshape(-1).view(numpy.uint8)

    def decoded(self, routing: numpy.ndarray) -> numpy.ndarray:
        """[P, L, K] of a rollout's `routing`. ValueError: it is of another model."""
        if len(routing) % self.width:
            raise ValueError(
                f"{len(routing)} bytes of expert choices are no multiple of the {self.width} of "
                f"one position ({len(self.layers)} layers, {self.top_k} of {self.experts} experts)"
            )
        return routing.view(self.kind).reshape(-1, len(self.layers), self.top_k)

    def positions(self, size: int) -> int:
        """The number of positions that `size` bytes hold."""
        return size // self.width


EVERY_RANK = -1


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt: the unit over which advantages are normalised and signal judged.

    On a rank that does not hold the group, `rollouts` are RolloutMeta without tokens, and `prompt`
    has only its index; the length and the key of the prompt are fields of the group.
    """

    prompt: Prompt
    rollouts: tuple[RolloutMeta, ...]
    holder: int = EVERY_RANK  # the rank that has the tokens; EVERY_RANK: all ranks
    remote_prompt_length: int = 0  # tokens of the prompt, where this rank does not hold it
    remote_prompt_key: str = ""  # its prompt_key, likewise

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt.token_ids) or self.remote_prompt_length

    @property
    def prompt_key(self) -> str:
        """Hash of the prompt's tokens and label: the same in every epoch, and on every rank."""
        label = self.prompt.label.encode("utf-8", "replace")
        return self.remote_prompt_key or digest(self.prompt.token_ids.tobytes() + label, 32)

    @property
    def oldest_version(self) -> int:
        """Version of the weights that sampled the group's oldest token."""
        return min(rollout.oldest_version for rollout in self.rollouts)


class TrainedSequence(NamedTuple):
    """A sequence to train on, as the only one of a group, and what its rollout adds."""

    number: int  # of its rollout among all of the groups
    group: Group
    rollout: RolloutMeta
    loss_tokens: int  # of the whole rollout
    offset: int = 0  # of its response in the rollout's arrays
    turns_before: int = 0  # in the rollout's earlier sequences


def trained_sequences(groups: Sequence[Group]) -> list[TrainedSequence]:
    """Every sequence of the groups, in order. One of an agent's episode has its first token as its
    prompt.
    """
    found: list[TrainedSequence] = []
    every = [(group, rollout) for group in groups for rollout in group.rollouts]
    for number, (group, rollout) in enumerate(every):
        if not rollout.sequences:
            found.append(TrainedSequence(number, group, rollout, rollout.loss_tokens))
        begin = turns = 0
        for place, its in enumerate(rollout.sequences):
            ids = rollout.response_ids[begin : begin + 1] if isinstance(rollout, Rollout) else ()
            prompt = Prompt(group.prompt.index, ids, label="")  # type: ignore[arg-type]
            alone = Group(prompt, (), group.holder, remote_prompt_length=1)
            part = rollout.part(place)
            total = rollout.loss_tokens
            found.append(TrainedSequence(number, alone, part, total, begin + 1, turns))
            begin, turns = begin + its.length, turns + its.turns
    return found


def readable(prompt: Prompt, rollout: Rollout) -> dict[str, Any]:
    """A rollout as a row of text."""
    return {
        "prompt": prompt.text,
        "label": prompt.label,
        "response": rollout.text,
        "response_length": rollout.length,  # tokens
        "status": rollout.status,
    }
