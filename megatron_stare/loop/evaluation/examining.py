"""A part of an evaluation's problems: sampled, kept, judged; in the trainer's process or in a
worker's.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_stare.collect.journal import Journal, Key
from megatron_stare.config import Config, EngineError, ScoringConfig
from megatron_stare.loop.evaluation.sets import EvaluationSet
from megatron_stare.records import Rollout, readable
from megatron_stare.reporting.problem_scores import Problem, Response, count_reflections
from megatron_stare.rollout.engine import Engine
from megatron_stare.scoring.judge import Judge, RewardBackend, sample_of
from megatron_stare.scoring.verdict import Sample, Verdict
from megatron_stare.system import BestEffort, atomic_file, json_line

# A journal's directory is named after the weights that sampled its rollouts, so that no version in
# it is too old, whichever attempt of whichever run it comes from.
_ATTEMPTS, _OLDEST = {"evaluation": 0}, -(1 << 31)


class Destinations(NamedTuple):
    """The directories in which an evaluation of a set keeps what it sampled."""

    journal: Path | None  # finished rollouts, which are not sampled again; None: not kept
    responses: Path  # .jsonl files, for reading


@dataclass(frozen=True)
class Examiner:
    """Samples on an engine; `wait` returns when all of these futures are done."""

    config: Config
    engine: Engine
    judge: Judge
    wait: Callable[[Sequence[Future[Any]]], None]

    def problems(
        self, one: EvaluationSet, places: Sequence[int], kept: Destinations, folder: str
    ) -> list[Problem]:
        """The set's problems at these places. `folder` of the journal's directory gets the finished
        rollouts; what any folder of it has is not sampled again.
        """
        mine = set(places)
        journal = (
            Journal(kept.journal, folder, lambda key: key[0] in mine, _ATTEMPTS)
            if kept.journal and places
            else None
        )
        with contextlib.closing(journal) if journal else contextlib.nullcontext():
            rollouts = self._sampled(one, places, journal)
        samples = [
            sample_of(one.prompts[places[number // one.samples]], rollout)
            for number, rollout in enumerate(rollouts)
        ]
        verdicts = self.judge.verdicts(samples)
        if places and self.config.run.record != "none":
            file = kept.responses / f"{folder}.jsonl"
            keep = BestEffort("the responses of this evaluation cannot be read later")
            keep(lambda: _write_responses(file, one, places, rollouts, verdicts))
        return self._scored(one, places, rollouts, verdicts)

    def _sampled(
        self, one: EvaluationSet, places: Sequence[int], journal: Journal | None
    ) -> list[Rollout]:
        """`samples` rollouts of each of these prompts, in order;
        those in the journal are not sampled again.
        """
        keys = [(place, number) for place in places for number in range(one.samples)]
        found: dict[Key, Rollout] = {}
        if journal is not None:
            journal.open(0)
            found = {
                key: rollout for key in keys if (rollout := journal.pop(key, _OLDEST)) is not None
            }
        missing = [key for key in keys if key not in found]
        requests = [one.request(place, number) for place, number in missing]
        futures = dict(
            zip(missing, self.engine.submit(requests, one.params) if requests else [], strict=True)
        )
        if journal is not None:
            written, lock = set[Key](), threading.Lock()
            notes = {key: functools.partial(_note, journal, written, lock, key) for key in futures}
            for key, future in futures.items():
                future.add_done_callback(notes[key])
        self.wait(list(futures.values()))
        if journal is not None:
            for key, future in futures.items():  # a future is done a moment before it calls back
                notes[key](future)
        rollouts = [found[key] if key in found else futures[key].result() for key in keys]
        if any(rollout.status == "aborted" for rollout in rollouts):
            raise EngineError("the engine aborted a rollout that was not to be aborted")
        return rollouts

    def _scored(
        self,
        one: EvaluationSet,
        places: Sequence[int],
        rollouts: Sequence[Rollout],
        verdicts: Sequence[Verdict],
    ) -> list[Problem]:
        n, words = one.samples, self.config.evaluation.reflection_words
        by_problem = [verdicts[start : start + n] for start in range(0, len(verdicts), n)]
        scoring = self.config.scoring
        rewards = [scoring.deciding(one.prompts[place].metadata) for place in places]
        classes = answer_classes(by_problem, rewards, self.judge, scoring)
        problems = []
        for number, (place, (answers, given)) in enumerate(zip(places, classes, strict=True)):
            own, prompt = rollouts[number * n : (number + 1) * n], one.prompts[place]
            responses = tuple(
                Response(
                    verdict.verdict,
                    answer,
                    len(rollout.response_ids),
                    rollout.status == "truncated",
                    count_reflections(rollout.text, words),
                )
                for verdict, answer, rollout in zip(by_problem[number], given, own, strict=True)
            )
            asked = (place, prompt.text, prompt.label, one.copies[place])
            problems.append(Problem(*asked, tuple(answers), responses))
        return problems


def _note(
    journal: Journal, written: set[Key], lock: threading.Lock, key: Key, done: Future[Rollout]
) -> None:
    """Write a finished rollout, once, from whichever thread comes first."""
    if not done.cancelled() and done.exception() is None and done.result().status != "aborted":
        with lock:
            if key not in written:
                written.add(key)
                journal.write(key, done.result())


def _write_responses(
    file: Path,
    one: EvaluationSet,
    places: Sequence[int],
    rollouts: Sequence[Rollout],
    verdicts: Sequence[Verdict],
) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as out:
        for number, (rollout, verdict) in enumerate(zip(rollouts, verdicts, strict=True)):
            place, sample = places[number // one.samples], number % one.samples
            prompt = one.prompts[place]
            row = {"set": one.name, "index": place, "sample": sample}
            row |= readable(prompt, rollout) | {"metadata": prompt.metadata}
            row |= {"reward": verdict.value, "verdict": verdict.verdict}
            out.write(json_line(row | {"extracted": verdict.extracted}))


# Verifiers whose label is an answer of the kind that they extract.
COMPARING = ("math", "multiple_choice")


def answer_classes(
    problems: Sequence[Sequence[Verdict]],
    rewards: Sequence[str],
    judge: Judge,
    scoring: ScoringConfig,
) -> list[tuple[list[str], list[int | None]]]:
    """The answers that majority@k votes on: for each problem, from the verdicts of its responses
    and the reward that gave them, its answers, and the one that each response gave.

    All answers that were judged correct are one: they equal the label. Others are one where their
    texts agree except for white space, or where the verifier, given one of them as the label,
    judges the other correct. That is asked only of verifiers that compare two answers, and only
    where a problem has a correct response: else no vote can be right.
    """
    right = [
        {_key(v.extracted) for v in verdicts if v.verdict == "correct"} - {None}
        for verdicts in problems
    ]
    # problem -> key of an answer -> key of the one that it equals
    merged: dict[int, dict[str, str]] = {}
    for reward in COMPARING:
        own = {place: problems[place] for place, each in enumerate(rewards) if each == reward}
        if own:
            merged |= _compared(own, right, judge.backends[reward], scoring)
    return [
        _numbered(verdicts, right[place], merged.get(place, {}))
        for place, verdicts in enumerate(problems)
    ]


def _key(answer: str | None) -> str | None:
    return None if answer is None else "".join(answer.split())


def _numbered(
    verdicts: Sequence[Verdict], right: set[str | None], merged: dict[str, str]
) -> tuple[list[str], list[int | None]]:
    """Answers in the order in which they first came."""
    numbers: dict[str, int] = {}
    answers: list[str] = []
    given: list[int | None] = []
    for verdict in verdicts:
        key = _key(verdict.extracted)
        if key is None or verdict.extracted is None:
            given.append(None)
            continue
        shared = "correct" if key in right else "other " + merged.get(key, key)
        if shared not in numbers:
            numbers[shared] = len(numbers)
            answers.append(verdict.extracted)
        given.append(numbers[shared])
    return answers, given


def _compared(
    problems: Mapping[int, Sequence[Verdict]],
    right: Sequence[set[str | None]],
    verifier: RewardBackend,
    scoring: ScoringConfig,
) -> dict[int, dict[str, str]]:
    """Compare answers in rounds over all problems: the first remaining answer of each problem is
    the label, and those that equal it leave with it.
    """
    left: dict[int, dict[str, str]] = {}  # problem -> key -> answer as written
    for place, verdicts in problems.items():
        written = {
            key: v.extracted
            for v in verdicts
            if v.extracted is not None and (key := _key(v.extracted))
        }
        if right[place]:
            left[place] = {key: text for key, text in written.items() if key not in right[place]}
    merged: dict[int, dict[str, str]] = {place: {} for place in problems}
    while left := {place: answers for place, answers in left.items() if len(answers) > 1}:
        pairs, samples = [], []
        for place, answers in left.items():
            label, *others = answers
            pairs += [(place, label, other) for other in others]
            samples += [
                Sample(_response(answers[other], scoring), answers[label]) for other in others
            ]
            left[place] = {key: answers[key] for key in others}
        for (place, label, other), verdict in zip(pairs, verifier.judge(samples), strict=True):
            if verdict.verdict == "correct":
                merged[place][other] = label
                del left[place][other]
    return merged


def _response(answer: str, scoring: ScoringConfig) -> str:
    """A response that gives this answer, in the form that scoring.extraction reads."""
    if scoring.extraction == "answer":
        return f"Answer: {answer}"
    if scoring.extraction == "tag":
        return f"<{scoring.answer_tag}>{answer}</{scoring.answer_tag}>"
    return f"\\boxed{{{answer}}}"
