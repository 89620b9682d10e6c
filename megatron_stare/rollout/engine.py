"""The interface of every rollout engine: token ids in; token ids, log-probs, finish reason and
weight version out.

Text is never re-tokenised: the policy is trained on the ids that the engine returned.
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
    from transformers import PreTrainedTokenizerBase

# Rounding may raise the log-prob of a certain token a little above 0.
LARGEST_LOGPROB = 1e-3
# SGLang stops at these ends of a turn without any configuration, and calls the response complete.
_TURN_ENDS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
_ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: its multiples lie far apart


class FaultyAnswer(EngineError):
    """An engine's answer that contradicts its request or itself."""


class UnsoundAnswer(FaultyAnswer):
    """An answer with probabilities that are not finite numbers. The fault may be the model's: then
    every server gives the same answer.
    """


class State(enum.StrEnum):
    """The state of an engine, or of one server of a pool. STARTING and PAUSED are not DEAD."""

    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"
    DEAD = "dead"


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling. Log-probs are those of the full distribution at `temperature`, before
    top-p and top-k cut it.

    top_p < 1 keeps the smallest set of most likely tokens whose mass reaches it, top_k > 0 the k
    most likely tokens; the next token is sampled from those that both keep. Greedy sampling
    (temperature 0, or top_k 1) takes the likeliest token, with its log-prob at temperature 1.

    A response also ends, completed, with the token that makes its text contain one of `stop`.
    """

    temperature: float
    top_p: float
    max_new_tokens: int
    skip_special_tokens: bool = True
    stop: tuple[str, ...] = ()
    top_k: int = 0  # 0: off
    # the model's routers, if a rollout must have the experts of its tokens
    routing: RoutingShape | None = None

    @property
    def greedy(self) -> bool:
        """Whether all responses to a prompt are equal."""
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True, eq=False)
class Request:
    """One response to sample. `seed` names it: no two requests in flight have the same seed. Its
    last number counts the responses to one prompt.

    In the embedded engine, and in SGLang's deterministic mode, only `seed` and the position of a
    token decide its random number: a retry, a further turn and a continuation repeat it. `part` has
    the tokens sampled so far, under the same or older weights: the engine continues after them.
    """

    prompt_ids: numpy.ndarray
    seed: tuple[int, ...]
    part: Rollout | None = None
    # for an environment of the tool engine; other engines need only the ids
    prompt: Prompt | None = None
    # of an agent's call: the seed of its episode's request
    episode: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ids = fixed_array(self.prompt_ids, numpy.int32, "prompt_ids")
        object.__setattr__(self, "prompt_ids", ids)

    def routed(self, shape: RoutingShape) -> int:
        """The number of positions whose experts are known."""
        return shape.positions(self.part.routing_bytes) if self.part else 0

    @property
    def known_ids(self) -> numpy.ndarray:
        """The ids that the model reads before it samples the next one."""
        if self.part is None:
            return self.prompt_ids
        return numpy.concatenate([self.prompt_ids, self.part.response_ids])


def seed_number(seed: tuple[int, ...]) -> int:
    """A request's seed as one number below 2^63.

    Seeds that differ only in their last number, by less than 2^32, give different results, also in
    the lower 32 bits: the samples of a group never share a seed. Other seeds collide with a chance
    of 2^-63.
    """
    words = b"".join(word.to_bytes(16, "little", signed=True) for word in seed[:-1])
    first = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")
    return (first + seed[-1] * _ODD) % (1 << 63)


@dataclass(frozen=True)
class Limits:
    """The limits of a model and its server. `context_length`: prompt and response together;
    `prompt_length`: the longest prompt that the server takes.
    """

    vocab_size: int
    context_length: int
    prompt_length: int

    def check(self, request: Request, params: SamplingParams) -> None:
        """UserError for a prompt that is empty, too long, or holds an id outside the vocabulary."""
        prompt, known = request.prompt_ids, request.known_ids
        if len(prompt) + params.max_new_tokens > self.context_length:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and "
                f"rollout_max_response_len={params.max_new_tokens} exceed the "
                f"{self.context_length} tokens that the model (max_position_embeddings) or a "
                "server (--context-length, memory for its cache) takes; lower "
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


def stop_ids(hf_checkpoint: str, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a response: the tokenizer's, config.json's and generation_config.json's,
    those of the vocabulary's own turn ends, and the one with which the chat template ends a turn of
    the model: in Qwen's base models no file names it.
    """
    from transformers import AutoConfig, GenerationConfig  # takes seconds

    config = AutoConfig.from_pretrained(hf_checkpoint, local_files_only=True).get_text_config()
    try:
        generation = GenerationConfig.from_pretrained(hf_checkpoint, local_files_only=True)
    except OSError:
        generation = GenerationConfig()
    found: list[int] = []
    for value in (
        tokenizer.eos_token_id,
        getattr(config, "eos_token_id", None),
        generation.eos_token_id,
    ):
        found += value if isinstance(value, list) else [] if value is None else [value]
    if not found:
        raise UserError(
            f"{hf_checkpoint}: no eos_token_id in tokenizer, config.json or "
            "generation_config.json; set one"
        )
    added = tokenizer.get_added_vocab()
    found += [added[text] for text in _TURN_ENDS if text in added]
    return frozenset([*found, *_template_end(tokenizer)])


def _template_end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special token that follows a turn of the model in the chat template; none where another
    text or nothing does.
    """
    turn = "%turn%"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": turn}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # without a template, or of one that refuses such messages
        return []
    after = text.rpartition(turn)[2] if turn in text else ""
    ids = tokenizer.encode(after.lstrip(), add_special_tokens=False)
    token = tokenizer.added_tokens_decoder.get(ids[0]) if ids else None
    return ids[:1] if token is not None and token.special else []


def ends_with_stop(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | numpy.ndarray, stops: Sequence[str]
) -> bool:
    """Whether the last token completes one of the strings. A token has at least one byte, so that a
    short window is enough.
    """
    window = ids[-max(len(stop.encode()) for stop in stops) - 1 :]
    text, before = (
        tokenizer.decode(part, skip_special_tokens=False) for part in (window, window[:-1])
    )
    return any(text.count(stop) > before.count(stop) for stop in stops)


def ids_of(values: Sequence[Any] | numpy.ndarray) -> numpy.ndarray:
    """An engine's ids, int32. FaultyAnswer: one is not an integer, or larger than any id."""
    _require(values, {int}, FaultyAnswer, "id {} at place {} is not a whole number")
    try:
        return _array(values, numpy.int32, "ids")
    except (ValueError, OverflowError) as error:
        raise FaultyAnswer(str(error)) from None


def logprobs_of(values: Sequence[Any] | numpy.ndarray) -> numpy.ndarray:
    """An engine's log-probs, float32. UnsoundAnswer: one is not a number."""
    _require(values, {int, float}, UnsoundAnswer, "log-prob {} at place {} is not a finite number")
    try:
        return _array(values, numpy.float32, "log-probs")
    except (ValueError, OverflowError) as error:
        raise UnsoundAnswer(str(error)) from None


def _array(
    values: Sequence[Any] | numpy.ndarray, kind: type[numpy.generic], name: str
) -> numpy.ndarray:
    """`fixed_array`, faster for a list: its numbers, of the right types, are converted once."""
    if not isinstance(values, numpy.ndarray):
        with numpy.errstate(over="ignore"):
            values = numpy.array(values, kind)
        values.flags.writeable = False
    return fixed_array(values, kind, name)


def _require(
    values: Sequence[Any] | numpy.ndarray, types: set[type], error: type[FaultyAnswer], message: str
) -> None:
    """Raise `error` unless every value of a list has exactly one of these types."""
    if isinstance(values, numpy.ndarray) or set(map(type, values)) <= types:
        return
    place = next(place for place, value in enumerate(values) if type(value) not in types)
    raise error(message.format(repr(values[place]), place))


def check_answer(
    ids: numpy.ndarray, logprobs: numpy.ndarray, status: Status, new_tokens: int, limits: Limits
) -> None:
    """FaultyAnswer: lengths disagree, an id is outside the vocabulary, or a log-prob is above 0.
    UnsoundAnswer: a log-prob is not finite.
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
        raise UnsoundAnswer(f"log-prob {logprobs[place]} at place {place} is not a finite number")
    if len(ids) and logprobs.max() > LARGEST_LOGPROB:
        place = int(logprobs.argmax())
        raise FaultyAnswer(f"log-prob {logprobs[place]} at place {place} is above 0")


class Engine(Protocol):
    """An inference engine holding a copy of the policy. `wait`, `load_weights` and `close` are
    called on all ranks together. The others concern only the calling rank, and any thread may call
    them.
    """

    @property
    def version(self) -> int:
        """The version of the weights in the engine; -1 before the first."""
        ...

    @property
    def sources(self) -> int:
        """The number of ranks, from rank 0, on which requests may be submitted."""
        ...

    @property
    def limits(self) -> Limits:
        """The limits of requests, on a rank that may submit them. Waits for servers that start."""
        ...

    def submit(self, requests: Sequence[Request], params: SamplingParams) -> list[Future[Rollout]]:
        """Start to sample; one future per request, of a rollout without reward or advantage.

        New weights do not end requests in flight: each rollout continues under them, with its cache
        computed again; `token_versions` has the version of each token. UserError, before anything
        is sent, for a request that cannot be served.
        """
        ...

    def wait(self, futures: Sequence[Future[Any]]) -> None:
        """Wait until this rank's futures are done, and do the engine's collective work meanwhile.
        Raises the first failure.

        Collective: ranks without futures return when the engine no longer needs them.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the weights by (HF name, tensor) pairs; later tokens carry `version`.

        `weights` can be iterated again: a server that restarts needs them once more.
        """
        ...

    def release_memory(self) -> None:
        """Give shared memory back to the trainer: nothing is generated until the next
        `load_weights`.
        """
        ...

    def abort(self, requests: Sequence[Request] | None = None) -> None:
        """End these requests, or all: their rollouts come back `aborted`, with the tokens so
        far.
        """
        ...

    def counts(self) -> dict[str, float]:
        """Faults that were recovered from since the start of the run: metrics by name."""
        ...

    def close(self) -> None:
        """End the engine's threads and servers."""
        ...


def still_open(futures: Sequence[Future[Any]]) -> list[Future[Any]]:
    """The futures that are not done. Raises the failure of the first failed one."""
    open_ = []
    for future in futures:
        if future.done():
            future.result()
        else:
            open_.append(future)
    return open_


def generate(engine: Engine, requests: Sequence[Request], params: SamplingParams) -> list[Rollout]:
    """One rollout per request of this rank, in order. Collective."""
    futures = engine.submit(requests, params) if requests else []
    engine.wait(futures)
    return [future.result() for future in futures]
