"""What any rollout engine does: token ids in; token ids, log-probs, finish reason and weight version out.

Text is never re-tokenised: what the policy is trained on are the ids the engine returned.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_stare.config import UserError
from megatron_stare.records import Rollout, Status

# Rounding may lift the log-prob of a certain token a little above 0.
LARGEST_LOGPROB = 1e-3


class EngineError(RuntimeError):
    """An engine failed, and trying again did not help."""


class FaultyAnswer(EngineError):
    """An engine's answer that cannot be what it was asked for."""


class State(enum.StrEnum):
    """How an engine (of a pool: one server) is. A cold or a paused engine is not a dead one."""

    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"
    DEAD = "dead"


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. Log-probs are those of the full distribution at `temperature`, before top-p cuts it."""

    temperature: float
    top_p: float
    max_new_tokens: int
    skip_special_tokens: bool = True


@dataclass(frozen=True)
class Request:
    """One response to sample. `seed` names it: no two requests in flight share one.

    Where an engine can (the embedded one does), `seed` alone decides its random numbers.
    """

    prompt_ids: tuple[int, ...]
    seed: tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """What a model can be asked for. `prompt_length` is the longest prompt its server takes."""

    vocab_size: int
    context_length: int
    prompt_length: int

    def check(self, request: Request, params: SamplingParams) -> None:
        """UserError for a prompt that is empty, too long, or holds an id outside the vocabulary."""
        prompt = request.prompt_ids
        if len(prompt) + params.max_new_tokens > self.context_length:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and rollout_max_response_len={params.max_new_tokens} "
                f"exceed the model's max_position_embeddings={self.context_length}; lower "
                "rollout.rollout_max_response_len or data.rollout_max_prompt_len"
            )
        if len(prompt) > self.prompt_length:
            raise UserError(
                f"a prompt of {len(prompt)} tokens exceeds the {self.prompt_length} that the servers take; lower "
                "data.rollout_max_prompt_len or start them with a longer --context-length"
            )
        if not prompt or not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise UserError(
                f"prompt ids must be non-empty and lie in [0, {self.vocab_size}); got {prompt[:8]}...; "
                "the tokenizer does not belong to this model"
            )


def check_answer(
    ids: Sequence[int], logprobs: Sequence[float], status: Status, params: SamplingParams, limits: Limits
) -> None:
    """FaultyAnswer where lengths disagree, an id is foreign, or a log-prob is no finite number up to 0."""
    if len(ids) != len(logprobs):
        raise FaultyAnswer(f"{len(ids)} ids came with {len(logprobs)} log-probs")
    if len(ids) > params.max_new_tokens:
        raise FaultyAnswer(f"{len(ids)} ids came where {params.max_new_tokens} were asked for")
    if status == "truncated" and len(ids) < params.max_new_tokens:
        raise FaultyAnswer(f"cut off after {len(ids)} of {params.max_new_tokens} ids")
    if status == "completed" and not ids:
        raise FaultyAnswer("completed without a single id")
    for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < limits.vocab_size:
            raise FaultyAnswer(f"id {token!r} at place {place} is outside [0, {limits.vocab_size})")
        if isinstance(logprob, bool) or not isinstance(logprob, int | float) or not math.isfinite(logprob):
            raise FaultyAnswer(f"log-prob {logprob!r} at place {place} is no finite number")
        if logprob > LARGEST_LOGPROB:
            raise FaultyAnswer(f"log-prob {logprob!r} at place {place} is above 0")


class Engine(Protocol):
    """An inference engine holding a copy of the policy. On several ranks every method is called on all together,
    but for `pause`, `resume` and `abort`, which other threads may call while `generate` runs."""

    @property
    def version(self) -> int:
        """Of the weights in the engine; -1 before the first."""
        ...

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Rollout]:
        """One rollout per request, in order, without reward or advantage."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the weights by (HF name, tensor) pairs; later rollouts carry `version`.

        `weights` can be iterated again: an engine that has to start anew asks once more.
        """
        ...

    def pause(self) -> None:
        """Stop decoding where it is; what is in flight waits for `resume`."""
        ...

    def resume(self) -> None:
        """Go on after `pause`."""
        ...

    def abort(self, requests: Sequence[Request] | None = None) -> None:
        """End these requests, or all: their rollouts come back `aborted`, with the tokens they had."""
        ...

    def health(self) -> dict[str, State]:
        """The state of every part, by name."""
        ...

    def counts(self) -> dict[str, float]:
        """What went wrong and was put right, since the start of the run: metrics by name."""
        ...

    def close(self) -> None:
        """End what the engine started."""
        ...
