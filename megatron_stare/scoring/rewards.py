"""The rewards by name: the function that judges, its settings, and the process that runs it.

REWARDS has an entry for every built-in verifier. Any other name is a dotted path to a user's
function in one of the forms of signatures.py. It runs in processes under scoring.function_timeout
or, marked with `verdict.in_worker`, under the limits of the built-in verifiers.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_stare.config import ScoringConfig, UserError, callable_at, nearest
from megatron_stare.scoring.reward_model import RemoteRewardModel
from megatron_stare.scoring.signatures import Called, adapted
from megatron_stare.scoring.verdict import Sample, Verdict, as_verdict, printable, unverifiable
from megatron_stare.scoring.verifier_pool import Spec, VerifierPool
from megatron_stare.scoring.verifier_process import load

MAX_PROCESSES = 16


class RewardBackend(Protocol):
    """Judges the samples of one reward."""

    def judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One Verdict per sample, in order."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class BuiltInVerifier:
    """A verifier of this package."""

    path: str  # dotted
    settings: Callable[[ScoringConfig], dict[str, Any]] = lambda scoring: {}
    in_worker: bool = True  # whether it needs a process of the pool


def _format_settings(scoring: ScoringConfig) -> dict[str, Any]:
    try:
        re.compile(scoring.format_pattern)
    except re.error as error:
        raise UserError(
            f"scoring.format_pattern={scoring.format_pattern!r} is no regular expression: {error}"
        ) from None
    if not scoring.format_pattern:
        raise UserError(
            "scoring.format_pattern is empty; the reward `format` needs it, e.g. "
            "'^<think>.*</think>'"
        )
    return {"pattern": scoring.format_pattern}


def _extraction(scoring: ScoringConfig) -> dict[str, Any]:
    return {"extraction": scoring.extraction, "tag": scoring.answer_tag}


_HERE = "megatron_stare.scoring"
REWARDS: dict[str, BuiltInVerifier] = {
    "math": BuiltInVerifier(
        f"{_HERE}.mathematics.answers.math",
        lambda scoring: (
            _extraction(scoring)
            | {
                "tolerance": scoring.numeric_tolerance,
                "require_evaluated": scoring.require_evaluated,
            }
        ),
    ),
    "multiple_choice": BuiltInVerifier(
        f"{_HERE}.verifiers.multiple_choice", _extraction, in_worker=False
    ),
    "reasoning_gym": BuiltInVerifier(f"{_HERE}.verifiers.reasoning_gym", _extraction),
    "format": BuiltInVerifier(
        f"{_HERE}.verifiers.response_format", _format_settings
    ),  # a pattern may backtrack forever
    "language": BuiltInVerifier(
        f"{_HERE}.verifiers.language", lambda s: {"script": s.language}, in_worker=False
    ),
    "mirror_grid": BuiltInVerifier(f"{_HERE}.mirror_grid.mirror_grid_reward", in_worker=False),
}
REMOTE = "remote"
EPISODE = "episode"


class EpisodeReward:
    """The reward that an agent's episode returned; unverifiable where it returned none."""

    def judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        none = "the agent returned no reward"
        return [
            unverifiable(none) if one.outcome is None else as_verdict(one.outcome)
            for one in samples
        ]

    def close(self) -> None:
        """There is nothing to end."""


class LocalVerifier:
    """A verifier that runs in this process, one sample after the other, without a deadline.
    A sample over which it raises is unverifiable.
    """

    def __init__(self, function: Called) -> None:
        self.function = function
        self._lock = threading.Lock()  # a user's function need not be thread-safe

    def judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        with self._lock:
            return [self._judge(sample) for sample in samples]

    def close(self) -> None:
        """There is nothing to end."""

    def _judge(self, sample: Sample) -> Verdict:
        try:
            return as_verdict(self.function(*sample.judged))
        except Exception as error:  # a user's function may raise anything
            return unverifiable(printable(f"{type(error).__name__}: {error}"))


class PooledVerifier:
    """One of the verifiers of a pool."""

    def __init__(self, pool: VerifierPool, name: str) -> None:
        self.pool, self.name = pool, name

    def judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        return self.pool.judge(self.name, samples)

    def close(self) -> None:
        self.pool.close()


def build_backends(
    names: Collection[str],
    scoring: ScoringConfig,
    others: Mapping[str, RewardBackend] | None = None,
) -> dict[str, RewardBackend]:
    """A backend per reward name. `others` are rewards that a higher layer provides.

    UserError: an unknown name, an unimportable dotted path, or settings that the verifier cannot
    work with.
    """
    found: dict[str, RewardBackend] = {
        name: others[name] for name in names if others and name in others
    }
    specs: dict[str, Spec] = {}
    own: dict[str, Spec] = {}  # functions of the user's, without a limit of memory
    for name in names:
        if name in found:
            continue
        if name == REMOTE:
            found[name] = RemoteRewardModel(scoring)
        elif name == EPISODE:
            found[name] = EpisodeReward()
        elif name in REWARDS:
            entry = REWARDS[name]
            specs[name] = (entry.path, entry.settings(scoring))
            if not entry.in_worker:
                found[name] = LocalVerifier(load(*specs.pop(name)))
        else:
            function = _imported(name, others or {})
            try:
                called = adapted(function)
            except ValueError as error:
                raise UserError(f"scoring.reward={name} cannot be called: {error}") from None
            if getattr(function, "in_worker", False):
                specs[name] = (name, {})
            elif scoring.function_timeout and not name.startswith("__main__."):
                own[name] = (name, {})
            else:  # no other process can import a program's __main__
                found[name] = LocalVerifier(called)
    for chosen, timeout, memory in (
        (specs, "scoring.verifier_timeout", scoring.verifier_memory_mib),
        (own, "scoring.function_timeout", 0),
    ):
        if chosen:
            deadline = getattr(scoring, timeout.rpartition(".")[2])
            pool = VerifierPool(chosen, _processes(scoring), deadline, memory, timeout)
            found |= {name: PooledVerifier(pool, name) for name in chosen}
    return found


def _processes(scoring: ScoringConfig) -> int:
    """scoring.verifier_processes; 0: the machine's cores divided by its ranks, at most 16."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return scoring.verifier_processes or max(1, min(MAX_PROCESSES, cores // ranks))


def _imported(name: str, others: Collection[str]) -> Callable[..., Any]:
    """A user's function. UserError: there is none at this dotted path."""
    if "." not in name:
        known = {*REWARDS, REMOTE, EPISODE, *others}
        raise UserError(
            f"scoring.reward={name!r} is unknown{nearest(name, known)}, or give "
            "package.module.function"
        )
    return callable_at(name, "scoring.reward", "a function f(response, label, metadata)")
