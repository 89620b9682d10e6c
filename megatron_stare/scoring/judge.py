"""Judges finished rollouts: rewards and their parts, verdicts, and the loss mask.

REWARDS has an entry for every built-in verifier: the function that judges, its settings, and the
process that runs it. Any other name is a dotted path to a user's function in one of the forms of
verdict.py. It runs in processes under scoring.function_timeout or, marked with
`verdict.in_worker`, under the limits of the built-in verifiers.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_stare.config import (
    PER_SOURCE,
    ScoringConfig,
    UserError,
    callable_at,
    nearest,
    source_of,
)
from megatron_stare.records import Prompt, Rollout, RolloutMeta
from megatron_stare.scoring.remote import RemoteRewardModel
from megatron_stare.scoring.verdict import (
    EXPECTED,
    Called,
    Sample,
    Verdict,
    adapted,
    as_verdict,
    groups_of,
    printable,
    unverifiable,
)
from megatron_stare.scoring.verifier_pool import Spec, VerifierPool, load

MAX_PROCESSES = 16
OVERLONG = "overlong"
# Verifiers that look for an answer in the text.
EXTRACTING = ("math", "multiple_choice", "reasoning_gym")
# After this many responses without a single verdict the verifier or the labels are at fault.
MAX_WITHOUT_VERDICT = 64
MAX_KILLED = 8  # the same where each was ended by a deadline, which is a long wait
# Groups judged at the same time: enough to keep every backend busy. The backends' own settings
# bound how many samples run at a time.
_THREADS = 8
SHAPINGS = ("none", "signed", "retool")
_HIGHEST_WRONG = -0.6
_PER_ROUND = 0.1


class RewardBackend(Protocol):
    """Judges the samples of one reward. A reward that has nothing to end inherits `close`."""

    def judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One Verdict per sample, in order."""
        ...

    def close(self) -> None:
        """End what the reward has started."""
        return


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
            f"scoring.format_pattern={scoring.format_pattern!r} is not a regular expression: "
            f"{error}"
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
    "reasoning_gym": BuiltInVerifier(f"{_HERE}.gym_verifier.reasoning_gym", _extraction),
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
JUDGE = "judge"  # a higher layer builds it, because it may start servers


class EpisodeReward(RewardBackend):
    """The reward that an agent's episode returned; unverifiable where it returned none."""

    def judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        none = "the agent returned no reward"
        return [
            unverifiable(none) if one.outcome is None else as_verdict(one.outcome)
            for one in samples
        ]


class PerSourceReward(RewardBackend):
    """Judges each response by the reward of its row's data set (scoring.per_source). The part
    `per_source/<data set>` of a verdict is its value. The judge closes the rewards.
    """

    def __init__(self, scoring: ScoringConfig, backends: Mapping[str, RewardBackend]) -> None:
        self.rewards, self.backends = scoring.per_source, backends

    def judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        sources = [source_of(sample.metadata) for sample in samples]
        found = [unverifiable(f"scoring.per_source has no {source!r}") for source in sources]
        for source in dict.fromkeys(source for source in sources if source in self.rewards):
            places = [place for place, each in enumerate(sources) if each == source]
            backend = self.backends[self.rewards[source]]
            verdicts = backend.judge([samples[place] for place in places])
            for place, verdict in zip(places, verdicts, strict=True):
                parts = {} if verdict.value is None else {f"{PER_SOURCE}/{source}": verdict.value}
                found[place] = dataclasses.replace(verdict, parts=parts)
        return found


class LocalVerifier(RewardBackend):
    """A verifier that runs in this process, one call after the other, without a deadline.
    The samples of a call over which it raises are unverifiable.
    """

    def __init__(self, function: Called) -> None:
        self.function = function
        self._lock = threading.Lock()  # a user's function need not be thread-safe

    def judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        found: dict[int, Verdict] = {}
        with self._lock:
            for places in groups_of(samples, self.function.grouped):
                verdicts = self._judge([samples[place] for place in places])
                found |= zip(places, verdicts, strict=True)
        return [found[place] for place in range(len(samples))]

    def _judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        try:
            return [as_verdict(one) for one in self.function(samples)]
        except Exception as error:  # a user's function may raise anything
            return [unverifiable(printable(f"{type(error).__name__}: {error}"))] * len(samples)


class PooledVerifier(RewardBackend):
    """One of the verifiers of a pool."""

    def __init__(self, pool: VerifierPool, name: str, grouped: bool = False) -> None:
        self.pool, self.name, self.grouped = pool, name, grouped

    def judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        return self.pool.judge(self.name, samples, self.grouped)

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
    grouped = set[str]()
    for name in names:
        if name in found:
            continue
        if name == PER_SOURCE:
            found[name] = PerSourceReward(scoring, found)
        elif name == REMOTE:
            found[name] = RemoteRewardModel(scoring)
        elif name == EPISODE:
            found[name] = EpisodeReward()
        elif name in REWARDS:
            entry = REWARDS[name]
            spec = (entry.path, entry.settings(scoring))
            if entry.in_worker:
                specs[name] = spec
            else:
                found[name] = LocalVerifier(load(*spec))
        else:
            function = _imported(name, others or {})
            try:
                called = adapted(function)
            except ValueError as error:
                raise UserError(f"scoring.reward={name} cannot be called: {error}") from None
            if called.grouped:
                grouped.add(name)
            if getattr(function, "in_worker", False):
                specs[name] = (name, {})
            elif scoring.function_timeout and not name.startswith("__main__."):
                own[name] = (name, {})
            else:  # no other process can import a program's __main__
                found[name] = LocalVerifier(called)
    for chosen, timeout, memory in (
        (specs, "verifier_timeout", scoring.verifier_memory_mib),
        (own, "function_timeout", 0),
    ):
        if chosen:
            limits = getattr(scoring, timeout), memory, f"scoring.{timeout}"
            pool = VerifierPool(chosen, _processes(scoring), *limits)
            found |= {name: PooledVerifier(pool, name, name in grouped) for name in chosen}
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
        known = {*REWARDS, REMOTE, EPISODE, JUDGE, PER_SOURCE, *others}
        raise UserError(
            f"scoring.reward={name!r} is unknown{nearest(name, known)}, or give "
            "package.module.function"
        )
    return callable_at(name, "scoring.reward", "a function f(response, label, metadata)")


class Judge:
    """The rewards of scoring.reward and scoring.rewards. Safe to use from many threads;
    close it at the end.

    reward = sum over scoring.rewards of weight * value, plus the overlong penalty. The verdict is
    that of scoring.reward, whose value scoring.shaping may replace. If one of the verifiers has no
    value, the sample is unverifiable: reward None, advantage 0, loss mask 0.
    """

    def __init__(
        self,
        scoring: ScoringConfig,
        max_response_length: int = 0,
        others: Mapping[str, RewardBackend] | None = None,
    ) -> None:
        """`others`: rewards by name that a higher layer built.
        UserError: a name or setting that cannot work.
        """
        self.scoring = scoring
        self.max_response_length = max_response_length
        self.weights = dict(scoring.rewards) or {scoring.reward: 1.0}
        if scoring.reward not in self.weights:
            raise UserError(
                f"scoring.reward={scoring.reward!r}, which decides right or wrong, is not in "
                f"scoring.rewards ({', '.join(self.weights)}); add it there, with weight 0 if need "
                "be, or name one of those"
            )
        if scoring.overlong_buffer_len > max_response_length > 0:
            raise UserError(
                f"scoring.overlong_buffer_len={scoring.overlong_buffer_len} exceeds "
                f"rollout.rollout_max_response_len={max_response_length}; lower it"
            )
        self.backends = build_backends(scoring.names, scoring, others)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="judge")
        self._without_verdict = self._killed = 0
        self._warned = False

    def judge(self, pairs: Sequence[tuple[Prompt, Rollout]]) -> list[Rollout]:
        """The rollouts, in order, with reward, verdict and parts.

        UserError: none of the first responses could be judged.
        """
        samples = [sample_of(prompt, rollout) for prompt, rollout in pairs]
        verdicts = self.verdicts(samples)
        self._check_verdicts(samples, verdicts)
        return [
            self._judged(prompt, rollout, verdict)
            for (prompt, rollout), verdict in zip(pairs, verdicts, strict=True)
        ]

    def start(self, pairs: Sequence[tuple[Prompt, Rollout]]) -> Future[list[Rollout]]:
        """`judge` in another thread: a slow verifier delays neither sampling nor other groups."""
        return self._threads.submit(self.judge, pairs)

    def verdicts(self, samples: Sequence[Sample]) -> list[Verdict]:
        """The weighted verdict of each sample, without anything that needs token counts."""
        whole = [sample for sample in samples if not sample.void]
        columns = {name: self.backends[name].judge(whole) for name in self.weights}
        rows = zip(*columns.values(), strict=True)
        return [
            unverifiable(sample.void)
            if sample.void
            else self._weighed(dict(zip(columns, next(rows), strict=True)))
            for sample in samples
        ]

    def close(self) -> None:
        """End the verifiers, also in the middle of a sample."""
        for backend in self.backends.values():
            backend.close()
        self._threads.shutdown(cancel_futures=True)

    def _weighed(self, found: dict[str, Verdict]) -> Verdict:
        decisive = found[self.scoring.reward]
        kills = sum(verdict.kills for verdict in found.values())
        counts = {k: n for verdict in found.values() for k, n in verdict.counts.items()}
        values = {
            name: verdict.value for name, verdict in found.items() if verdict.value is not None
        }
        for name, verdict in found.items():
            if verdict.value is None:
                missing = unverifiable(f"{name}: {verdict.reason}", decisive.extracted, kills)
                return dataclasses.replace(missing, parts=values, counts=counts)
        total = sum(self.weights[name] * value for name, value in values.items())
        if PER_SOURCE in found:
            values |= found[PER_SOURCE].parts
        return dataclasses.replace(decisive, value=total, parts=values, kills=kills, counts=counts)

    def _judged(self, prompt: Prompt, rollout: Rollout, verdict: Verdict) -> Rollout:
        parts, reward = dict(verdict.parts), verdict.value
        if self.scoring.shaping != "none" and reward is not None:
            name, correct = self.scoring.reward, verdict.verdict == "correct"
            own = shaped_reward(self.scoring.shaping, correct, rollout)
            reward += self.weights[name] * (own - parts[name])
            parts[name] = own
        if self.scoring.overlong_buffer_len:
            parts[OVERLONG] = soft_overlong_penalty(
                len(rollout.response_ids),
                self.max_response_length,
                self.scoring.overlong_buffer_len,
                self.scoring.overlong_penalty_factor,
            )
            reward = None if reward is None else reward + parts[OVERLONG]
        decisive = self.scoring.deciding(prompt.metadata)
        judged = dataclasses.replace(
            rollout,
            reward=reward,
            verdict=verdict.verdict,
            reward_parts=parts,
            verifier_kills=verdict.kills,
            episode=rollout.episode | verdict.counts,
            answered=verdict.extracted is not None or decisive not in EXTRACTING,
        )
        if reward is None:
            return judged.without_loss(advantage=0.0)
        if self.scoring.overlong_filter and rollout.status == "truncated":
            return judged.without_loss()
        return judged

    def _check_verdicts(self, samples: Sequence[Sample], verdicts: Sequence[Verdict]) -> None:
        """Warn once about missing verdicts. UserError: no response has had a verdict so far."""
        missing = [verdict for verdict in verdicts if verdict.value is None]
        void = missing and all(sample.void for sample in samples)
        if missing and not self._warned:
            self._warned = True
            print(
                f"warning: {len(missing)} of {len(verdicts)} responses could not be judged; they "
                "are masked out of the loss and counted as `unverifiable` (the first: "
                f"{missing[0].reason})",
                file=sys.stderr,
                flush=True,
            )
        if self._without_verdict < 0:  # there has been a verdict
            return
        if len(missing) < len(verdicts):
            self._without_verdict = -1
            return
        self._without_verdict += len(missing)
        self._killed += sum(verdict.kills > 0 for verdict in missing)
        if self._without_verdict >= MAX_WITHOUT_VERDICT or self._killed >= MAX_KILLED:
            remedy = "check the verifier, its settings and the labels"
            if void:
                remedy = "they failed before they were scored: check the agent or the environment"
            elif "." in self.scoring.reward:
                remedy = f"correct it, or the labels; {EXPECTED}; it returns a number"
            raise UserError(
                f"scoring.reward={self.scoring.reward!r} could judge none of the first "
                f"{self._without_verdict} responses (the first: {missing[0].reason}); {remedy}"
            )


def sample_of(prompt: Prompt, rollout: Rollout) -> Sample:
    """The rollout as a verifier's input; void if its engine or its episode failed."""
    void = "the engine could not finish the rollout" if rollout.verdict == "unverifiable" else ""
    if rollout.episode.get("errors"):
        failed = [name for name in rollout.episode if name.startswith("failed/")]
        void = f"its episode ended in an error {failed[0] if failed else ''}".strip()
    asked = (prompt.label, prompt.metadata, prompt.text)
    return Sample(rollout.text, *asked, void, rollout.outcome, prompt.messages)


def judgement_metrics(rollouts: Sequence[RolloutMeta]) -> dict[str, float]:
    """The metrics of judged rollouts.

    reward: mean over verified rollouts; accuracy: correct share of them; both absent if there are
    none. baseline_reward: mean of the baselines, if there are any. no_answer_fraction: share of
    all rollouts. reward/<name>: mean of each part. unverifiable, verifier_kills: counts.
    """
    verified = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    metrics = {"reward": sum(verified) / len(verified)} if verified else {}
    if verified:
        right = sum(rollout.verdict == "correct" for rollout in rollouts)
        metrics["accuracy"] = right / len(verified)
    baselines = [rollout.baseline for rollout in rollouts if rollout.baseline is not None]
    if baselines:
        metrics["baseline_reward"] = sum(baselines) / len(baselines)
    for name in sorted({name for rollout in rollouts for name in rollout.reward_parts}):
        values = [
            rollout.reward_parts[name] for rollout in rollouts if name in rollout.reward_parts
        ]
        metrics[f"reward/{name}"] = sum(values) / len(values)
    silent = sum(not rollout.answered for rollout in rollouts)
    metrics["no_answer_fraction"] = silent / max(1, len(rollouts))
    metrics["unverifiable"] = float(sum(rollout.verdict == "unverifiable" for rollout in rollouts))
    metrics["verifier_kills"] = float(sum(rollout.verifier_kills for rollout in rollouts))
    return metrics


def shaped_reward(shaping: str, correct: bool, rollout: Rollout) -> float:
    """The decisive reward of a judged rollout. ValueError: an unknown shaping.

        signed    1 if the verdict is correct, else -1
        retool    1 if it is correct, else min(-0.6, -1 + 0.1 (m - 2) / 2)      arXiv 2504.11536

    m counts the messages of an episode as verl does: the prompt, the model's turns, and the tool's
    answers between them. With n turns of the model, m = 2 n; without tools n is 1. Each tool call
    adds 0.1 to a wrong answer's reward, up to -0.6.
    """
    if shaping not in SHAPINGS[1:]:
        raise ValueError(f"shaping={shaping!r} is unknown; use {' or '.join(SHAPINGS[1:])}")
    if correct:
        return 1.0
    if shaping == "signed":
        return -1.0
    messages = 2 * rollout.episode.get("turns", 1.0)
    return min(_HIGHEST_WRONG, -1.0 + _PER_ROUND * (messages - 2) / 2)


def soft_overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft overlong penalty (arXiv 2503.14476, section 3.4), lengths in tokens:
    min(0, -(length - (max_length - buffer)) / buffer * factor), in [-factor, 0].

    max_length 20480, buffer 4096, factor 1: 16384 -> 0, 18432 -> -0.5, 20480 -> -1.
    ValueError: buffer < 1.
    """
    if buffer < 1:
        raise ValueError(f"buffer={buffer}: the penalty needs at least one token to rise over")
    over = min(length, max_length) - (max_length - buffer)
    return min(0.0, -over / buffer * factor)
