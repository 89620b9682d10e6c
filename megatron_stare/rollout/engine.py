"""What any rollout engine does: token ids in;
token ids, log-probs, finish reason and weight version out.

Text is never re-tokenised: what the policy is trained on are the ids the engine returned.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from megatron_stare.config import EngineError, UserError
from megatron_stare.records import Prompt, Rollout, RoutingShape, Status, fixed_array

if TYPE_CHECKING:
    from torch import Tensor

# Rounding may lift the log-prob of a certain token a little above 0.
LARGEST_LOGPROB = 1e-3
_ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: its multiples lie far apart


class FaultyAnswer(EngineError):
    """An engine's answer that cannot be what it was asked for."""


class UnsoundAnswer(FaultyAnswer):
    """One whose probabilities are no numbers. The fault may be the model's and not the engine's: it
    can come again from whoever is asked.
    """


class State(enum.StrEnum):
    """How an engine (of a pool: one server) is. A cold or a paused engine is not a dead one."""

    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"
    DEAD = "dead"


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. Log-probs are those of the full distribution at `temperature`,
    before top-p and top-k cut it.

    top_p < 1 keeps the smallest set of most likely tokens whose mass reaches it, top_k > 0 this
    many of the most likely; what both keep is sampled from. Greedy sampling (temperature 0, or
    top_k 1) takes the likeliest token, with its log-prob at temperature 1.

    A response also ends, completed, with the token that makes its text contain one of `stop`.
    """

    temperature: float
    top_p: float
    max_new_tokens: int
    skip_special_tokens: bool = True
    stop: tuple[str, ...] = ()
    top_k: int = 0  # 0: off
    # of the model, where a rollout is to say which experts its tokens went to
    routing: RoutingShape | None = None

    @property
    def greedy(self) -> bool:
        """Whether every response to a prompt is the same one."""
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True, eq=False)
class Request:
    """One response to sample. `seed` names it: no two requests in flight share one. Its last word
    numbers the responses to one prompt.

    Where an engine can (the embedded one does, and SGLang in its deterministic mode), `seed` and
    the place of a token alone decide its random numbers: those of a retry, of a further turn and of
    what follows a part are what they would have been without it. `part` is what has been sampled of
    the response already, under the same or under older weights: the engine goes on behind it.
    """

    prompt_ids: numpy.ndarray
    seed: tuple[int, ...]
    part: Rollout | None = None
    # what an environment is made from; plain engines need only its ids
    prompt: Prompt | None = None

    def __post_init__(self) -> None:
        ids = fixed_array(self.prompt_ids, numpy.int32, "prompt_ids")
        object.__setattr__(self, "prompt_ids", ids)

    def routed(self, shape: RoutingShape) -> int:
        """Of how many positions the experts are known."""
        return shape.positions(self.part.routing_bytes) if self.part else 0

    @property
    def known_ids(self) -> numpy.ndarray:
        """What the model has to read before it can go on."""
        if self.part is None:
            return self.prompt_ids
        return numpy.concatenate([self.prompt_ids, self.part.response_ids])


def seed_number(seed: tuple[int, ...]) -> int:
    """A request's seed as one number below 2^63.

    Seeds that differ in their last word alone, by less than 2^32, have other numbers, and the lower
    halves of these differ too: the samples of a group never share one, whatever the hash of the
    rest is. Others share one with a chance of 2^-63.
    """
    words = b"".join(word.to_bytes(16, "little", signed=True) for word in seed[:-1])
    first = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")
    return (first + seed[-1] * _ODD) % (1 << 63)


@dataclass(frozen=True)
class Limits:
    """What a model can be asked for. `prompt_length` is the longest prompt its server takes."""

    vocab_size: int
    context_length: int
    prompt_length: int

    def check(self, request: Request, params: SamplingParams) -> None:
        """UserError for a prompt that is empty, too long, or holds an id outside the vocabulary."""
        prompt, known = request.prompt_ids, request.known_ids
        if len(prompt) + params.max_new_tokens > self.context_length:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and "
                f"rollout_max_response_len={params.max_new_tokens} exceed the model's "
                f"max_position_embeddings={self.context_length}; lower "
                "rollout.rollout_max_response_len or data.rollout_max_prompt_len"
            )
        if len(known) > self.prompt_length:
            raise UserError(
                f"a prompt of {len(known)} tokens exceeds the {self.prompt_length} that the "
                "servers take; lower data.rollout_max_prompt_len or start them with a longer "
                "--context-length"
            )
        if not len(prompt) or not 0 <= known.min() <= known.max() < self.vocab_size:
            raise UserError(
                f"prompt ids must be non-empty and lie in [0, {self.vocab_size}); got "
                f"{prompt[:8].tolist()}...; the tokenizer does not belong to this model"
            )


def ids_of(values: Sequence[Any] | numpy.ndarray) -> numpy.ndarray:
    """An engine's ids, int32. FaultyAnswer: one is no whole number, or larger than any id."""
    _require(values, {int}, FaultyAnswer, "id {} at place {} is no whole number")
    try:
        return _array(values, numpy.int32, "ids")
    except (ValueError, OverflowError) as error:
        raise FaultyAnswer(str(error)) from None


def logprobs_of(values: Sequence[Any] | numpy.ndarray) -> numpy.ndarray:
    """An engine's log-probs, float32. UnsoundAnswer: one is no number."""
    _require(values, {int, float}, UnsoundAnswer, "log-prob {} at place {} is no finite number")
    try:
        return _array(values, numpy.float32, "log-probs")
    except (ValueError, OverflowError) as error:
        raise UnsoundAnswer(str(error)) from None


def _array(
    values: Sequence[Any] | numpy.ndarray, kind: type[numpy.generic], name: str
) -> numpy.ndarray:
    """`fixed_array`; numbers of the right types in a list need no array of another kind first."""
    if not isinstance(values, numpy.ndarray):
        with numpy.errstate(over="ignore"):
            values = numpy.array(values, kind)
        values.flags.writeable = False
    return fixed_array(values, kind, name)


def _require(
    values: Sequence[Any] | numpy.ndarray, types: set[type], error: type[FaultyAnswer], message: str
) -> None:
    """Every value of one of these very types; an array has been looked at."""
    if isinstance(values, numpy.ndarray) or set(map(type, values)) <= types:
        return
    place = next(place for place, value in enumerate(values) if type(value) not in types)
    raise error(message.format(repr(values[place]), place))


def check_answer(
    ids: numpy.ndarray, logprobs: numpy.ndarray, status: Status, new_tokens: int, limits: Limits
) -> None:
    """FaultyAnswer where lengths disagree, an id is foreign, or a log-prob is above 0;
    UnsoundAnswer where one is not finite.
    """
    if len(ids) != len(logprobs):
        raise FaultyAnswer(f"{len(ids)} ids came with {len(logprobs)} log-probs")
    if len(ids) > new_tokens:
        raise FaultyAnswer(f"{len(ids)} ids came where {new_tokens} were asked for")
    if status == "truncated" and len(ids) < new_tokens:
        raise FaultyAnswer(f"cut off after {len(ids)} of {new_tokens} ids")
    if status == "completed" and not len(ids):
        raise FaultyAnswer("completed without a single id")
    foreign = (ids < 0) | (ids >= limits.vocab_size)
    if foreign.any():
        place = int(foreign.argmax())
        raise FaultyAnswer(f"id {ids[place]} at place {place} is outside [0, {limits.vocab_size})")
    unsound = ~numpy.isfinite(logprobs)
    if unsound.any():
        place = int(unsound.argmax())
        raise UnsoundAnswer(f"log-prob {logprobs[place]} at place {place} is no finite number")
    if len(ids) and logprobs.max() > LARGEST_LOGPROB:
        place = int(logprobs.argmax())
        raise FaultyAnswer(f"log-prob {logprobs[place]} at place {place} is above 0")


class Engine(Protocol):
    """An inference engine holding a copy of the policy. `wait`, `load_weights` and `close` are
    called on all ranks together. The others are this rank's own affair, and any thread may call
    them.
    """

    @property
    def version(self) -> int:
        """Of the weights in the engine; -1 before the first."""
        ...

    @property
    def sources(self) -> int:
        """On how many ranks, from rank 0 on, requests may be submitted."""
        ...

    def submit(self, requests: Sequence[Request], params: SamplingParams) -> list[Future[Rollout]]:
        """Begin to sample; one future per request, of a rollout without reward or advantage.

        New weights do not end what is in flight: each rollout goes on under them, on a cache
        computed again, and its `token_versions` say where. UserError, before anything is sent, for
        a request that cannot be served.
        """
        ...

    def wait(self, futures: Sequence[Future[Any]]) -> None:
        """Until this rank's futures are done, doing what an engine has to do meanwhile.
        Raises the first failure.

        Collective: ranks that wait for nothing return when the engine has no more need of them.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the weights by (HF name, tensor) pairs;
        what is sampled from then on carries `version`.

        `weights` can be iterated again: an engine that has to start again asks once more.
        """
        ...

    def release_memory(self) -> None:
        """Nothing is generated until the next `load_weights`:
        give the memory to the trainer, if it is shared.
        """
        ...

    def abort(self, requests: Sequence[Request] | None = None) -> None:
        """End these requests, or all:
        their rollouts come back `aborted`, with the tokens they had.
        """
        ...

    def counts(self) -> dict[str, float]:
        """What went wrong and was fixed, since the start of the run: metrics by name."""
        ...

    def close(self) -> None:
        """End what the engine started."""
        ...


def still_open(futures: Sequence[Future[Any]]) -> list[Future[Any]]:
    """Those that are not done. Raises what the first failed one did."""
    for future in futures:
        if future.done():
            future.result()
    return [future for future in futures if not future.done()]


def generate(engine: Engine, requests: Sequence[Request], params: SamplingParams) -> list[Rollout]:
    """One rollout per request of this rank, in order. Collective."""
    futures = engine.submit(requests, params) if requests else []
    engine.wait(futures)
    return [future.result() for future in futures]
