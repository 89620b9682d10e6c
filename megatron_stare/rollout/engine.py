"""What any rollout engine does: token ids in; token ids, log-probs, finish reason and weight version out.

Text is never re-tokenised: what the policy is trained on are the ids the engine returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_stare.records import Rollout


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. Log-probs are those of the full distribution at `temperature`, before top-p cuts it."""

    temperature: float
    top_p: float
    max_new_tokens: int
    skip_special_tokens: bool = True


@dataclass(frozen=True)
class Request:
    """One response to sample. `seed` alone decides its random numbers, whatever is decoded beside it."""

    prompt_ids: tuple[int, ...]
    seed: tuple[int, ...]


class Engine(Protocol):
    """An inference engine holding a copy of the policy."""

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Rollout]:
        """One rollout per request, in order, without reward or advantage."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the weights by (HF name, tensor) pairs; later rollouts carry `version`."""
        ...
