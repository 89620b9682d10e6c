"""Held-out problems: avg@k, pass@k, majority@k and more, on whatever engine holds the policy.

`evaluate` writes each finished rollout to run.dir/evaluation as it comes; the same command after a
kill samples only what is missing. Rollouts are found again only for the same weights, prompts, seed
and sampling settings, whatever the step is called. Those of other weights are left where they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pickle
import shutil
import threading
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from megatron_stare.collect import sampling_settings
from megatron_stare.collect.journal import Journal, Key
from megatron_stare.config import Config, EngineError, EvaluationSetConfig, ScoringConfig
from megatron_stare.data.prompts import Tools, check_rewarded, load_prompts
from megatron_stare.data.sources import parts
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.numerics.exchange import all_gather_bytes
from megatron_stare.policy.topology import Topology, agreed
from megatron_stare.records import Prompt, Rollout, readable
from megatron_stare.reporting.heartbeat import phase
from megatron_stare.reporting.problem_scores import (
    EVALUATION,
    Problem,
    Response,
    count_reflections,
    problem_row,
    responses_directory,
    set_metrics,
    start_key,
)
from megatron_stare.rollout.engine import Engine, Request, SamplingParams
from megatron_stare.scoring.judge import Judge, RewardBackend, sample_of
from megatron_stare.scoring.verdict import Sample, Verdict
from megatron_stare.system import BestEffort, atomic_file, digest, json_line, return_memory

PROBLEMS_NAME = "problems.jsonl"
# A journal's directory is named after the weights that sampled its rollouts, so that no version in
# it is too old, whichever attempt of whichever run it comes from.
_ATTEMPTS, _OLDEST = {"evaluation": 0}, -(1 << 31)


@dataclass(frozen=True)
class EvaluationSet:
    """`samples` responses of each prompt. `copies[i]` is how many rows prompt i stands for."""

    name: str
    prompts: tuple[Prompt, ...]
    copies: tuple[int, ...]
    samples: int
    params: SamplingParams
    seed: tuple[int, ...]

    def request(self, place: int, number: int) -> Request:
        """The request for response `number` of the prompt at `place`."""
        prompt = self.prompts[place]
        return Request(prompt.token_ids, (*self.seed, place, number), prompt=prompt)

    def fingerprint(self, policy: str) -> str:
        """16 hex digits of everything but `samples` that decides a response."""
        parts = (
            policy,
            self.seed,
            dataclasses.astuple(self.params),
            [p.token_ids.tolist() for p in self.prompts],
        )
        return digest(json.dumps(parts), 16)


def build_sets(
    config: Config, tokenizer: PreTrainedTokenizerBase, tools: Tools = ()
) -> tuple[list[EvaluationSet], list[str]]:
    """All sets by name, and what there is to say about their rows, in lines. UserError:
    a file that cannot be used.

    A set's random numbers hang on run.seed and its name, so that other sets may come and go.
    """
    sets, lines = [], []
    interval, at_start = config.evaluation.eval_interval, config.evaluation.eval_at_start
    if (interval or at_start) and not config.evaluation.eval_data:
        given, off = (f"interval={interval}", "0") if interval else ("at_start=true", "false")
        lines.append(
            f"evaluation.eval_{given} evaluates nothing, because evaluation.eval_data is empty; "
            f"give evaluation.eval_data.<name>=<file.jsonl or .parquet>, or set it to {off}"
        )
    for name, source in sorted(config.evaluation.eval_data.items()):
        parts(source, f"evaluation.eval_data.{name}")
        rows, dropped = load_prompts(source, tokenizer, config.data, tools=tools)
        check_rewarded(config, rows, f"evaluation.eval_data.{name}")
        if dropped.total:
            lines.append(f"{name}: {dropped.total} rows of {source} are not evaluated: {dropped}")
        counts = Counter(map(_problem, rows))
        firsts = {_problem(prompt): prompt for prompt in reversed(rows)}
        prompts = tuple(
            dataclasses.replace(firsts[key], index=place) for place, key in enumerate(counts)
        )
        settings = config.evaluation.per_set.get(name, EvaluationSetConfig())
        params = _params(config, settings)
        asked = _own(settings.n_samples, config.evaluation.n_samples_per_eval_prompt)
        samples = 1 if params.greedy else asked
        if samples < asked:
            lines.append(
                f"{name}: greedy (temperature={params.temperature:g}, top_k={params.top_k}); "
                f"{asked} samples of a problem would be one and the same: each is sampled once"
            )
        if len(prompts) < len(rows):
            lines.append(
                f"{name}: {len(rows)} rows are {len(prompts)} problems, repeated; each is "
                f"evaluated once, with {samples} samples (evaluation.per_set.{name}.n_samples sets "
                "how many)"
            )
        seed = (config.run.seed, sampling_settings.EVALUATION, zlib.crc32(name.encode()))
        sets.append(EvaluationSet(name, prompts, tuple(counts.values()), samples, params, seed))
    return sets, lines


def _problem(prompt: Prompt) -> tuple[bytes, str]:
    """The identity of a problem: rows with an equal one are copies."""
    return prompt.token_ids.tobytes(), prompt.label


def _params(config: Config, settings: EvaluationSetConfig) -> SamplingParams:
    evaluation, rollout = config.evaluation, config.rollout
    return SamplingParams(
        _own(settings.temperature, evaluation.eval_temperature),
        _own(settings.top_p, evaluation.eval_top_p),
        settings.max_response_len
        or evaluation.eval_max_response_len
        or rollout.rollout_max_response_len,
        rollout.skip_special_tokens,
        stop=tuple(rollout.stop),
        top_k=_own(settings.top_k, evaluation.eval_top_k),
    )


def _own[T](setting: T | None, shared: T) -> T:
    """A set's own setting, else the one that all sets share."""
    return shared if setting is None else setting


class Destinations(NamedTuple):
    """The directories in which an evaluation of a set keeps what it sampled."""

    journal: Path | None  # finished rollouts, which are not sampled again; None: not kept
    responses: Path  # .jsonl files, for reading


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


class Evaluator:
    """Evaluates the sets; a response is right where its verdict is `correct`."""

    def __init__(
        self,
        config: Config,
        sets: Sequence[EvaluationSet],
        engine: Engine,
        judge: Judge,
        topology: Topology,
    ) -> None:
        self.config, self.sets, self.engine = config, sets, engine
        self.judge, self.topology = judge, topology
        self.problems: dict[str, list[Problem]] = {}  # of the last evaluation

    def due(self, step: int) -> bool:
        """Whether to evaluate after this step: at the interval, and after the run's last step."""
        interval = self.config.evaluation.eval_interval
        return interval > 0 and (step % interval == 0 or step == self.config.train.num_rollout)

    def evaluate_start(self, step: int, interrupt: Interrupt) -> dict[str, float]:
        """eval_start/<set>/<number> of the policy that the first step starts from, if
        evaluation.eval_at_start asks for it; empty after a step. Collective.
        """
        if step or not self.config.evaluation.eval_at_start:
            return {}
        with phase("evaluate"), interrupt.ending(self.stop):
            return {start_key(key): value for key, value in self.evaluate(step).items()}

    def evaluate(
        self, step: int, journals: Path | None = None, policy: str = ""
    ) -> dict[str, float]:
        """eval/<set>/<number>, as reporting/problem_scores.py names and defines them. Collective.

        An unverifiable response counts as not right, and `unverifiable` says how many there were.
        The same random numbers serve every evaluation, so that two of them differ by the policy
        alone.

        journals: where finished rollouts of what `policy` names are kept, and found again.
        The responses are kept as text in responses_directory.
        """
        return_memory()  # the engine's caches are large: no freed blocks are in their way
        metrics: dict[str, float] = {}
        for one in self.sets:
            journal = journals / f"{one.name}-{one.fingerprint(policy)}" if journals else None
            responses = responses_directory(Path(self.config.run.dir), step) / one.name
            self.problems[one.name] = self._evaluated(one, Destinations(journal, responses))
            numbers = set_metrics(self.problems[one.name], self.config.run.seed)
            metrics |= {f"eval/{one.name}/{key}": value for key, value in numbers.items()}
        return metrics

    def stop(self) -> None:
        """End what is being sampled, from any thread: `evaluate` raises an EngineError."""
        self.engine.abort()

    def _evaluated(self, one: EvaluationSet, kept: Destinations) -> list[Problem]:
        """The set's problems in order, on every rank; each of the engine's sources samples and
        judges its share.
        """
        mine: list[Problem] = []
        agreed(self.topology, lambda: self._forget(kept))
        agreed(self.topology, lambda: mine.extend(self._mine(one, kept)))
        # the texts of the responses stay where they are
        everyone = all_gather_bytes(pickle.dumps(mine), self.topology.host)
        problems = [problem for content in everyone for problem in pickle.loads(content)]
        return sorted(problems, key=lambda problem: problem.index)

    def _forget(self, kept: Destinations) -> None:
        """Remove the responses of an earlier evaluation of this step."""
        if self.topology.is_first:
            shutil.rmtree(kept.responses, ignore_errors=True)

    def _mine(self, one: EvaluationSet, kept: Destinations) -> list[Problem]:
        """This rank's share of the set's problems, sampled and judged. A folder of the journal's
        directory gets the finished rollouts; what any folder of it has is not sampled again.
        """
        rank, sources = self.topology.rank, self.engine.sources
        places = range(rank, len(one.prompts), sources) if rank < sources else range(0)
        folder = f"rank_{rank}_of_{sources}"
        journal = (
            Journal(kept.journal, folder, lambda key: key[0] in places, _ATTEMPTS)
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
        """`samples` rollouts of each of these prompts, in order; the journal's are not sampled."""
        keys = [(place, number) for place in places for number in range(one.samples)]
        found: dict[Key, Rollout] = {}
        if journal is not None:
            journal.open(0)
            found = {
                key: rollout for key in keys if (rollout := journal.pop(key, _OLDEST)) is not None
            }
        missing = [key for key in keys if key not in found]
        requests = [one.request(*key) for key in missing]
        submitted = self.engine.submit(requests, one.params) if requests else []
        futures = dict(zip(missing, submitted, strict=True))
        unwritten, lock = set(missing), threading.Lock()

        def note(key: Key, done: Future[Rollout]) -> None:
            """Write a finished rollout, once, from whichever thread comes first."""
            if journal is None or done.cancelled() or done.exception() is not None:
                return
            with lock:
                if key in unwritten and done.result().status != "aborted":
                    unwritten.remove(key)
                    journal.write(key, done.result())

        for key, future in futures.items():
            future.add_done_callback(functools.partial(note, key))
        self.engine.wait(list(futures.values()))
        for key, future in futures.items():  # a future is done a moment before it calls back
            note(key, future)
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


def write_problems(problems: dict[str, list[Problem]], directory: Path) -> Path:
    """One line per problem, for reading and for other programs."""
    target = directory / EVALUATION / PROBLEMS_NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = [problem_row(name, problem) for name, found in problems.items() for problem in found]
    target.write_text("".join(map(json_line, rows)), encoding="utf-8")
    return target


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
