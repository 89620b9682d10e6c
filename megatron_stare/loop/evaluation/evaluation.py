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
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_stare.config import Config, UserError
from megatron_stare.loop.agreement import agreed
from megatron_stare.loop.collection.journal import Journal, Key
from megatron_stare.loop.collection.judging import build_judge
from megatron_stare.loop.evaluation import sets as evaluation_sets
from megatron_stare.loop.evaluation.answer_classes import answer_classes
from megatron_stare.loop.evaluation.sets import EvaluationSet
from megatron_stare.loop.parts import build_engine, load_tokenizer, offered_tools
from megatron_stare.numerics.exchange import gather_bytes
from megatron_stare.policy import model_state
from megatron_stare.policy.checkpoints.checkpoints import CheckpointDirectory, step_of
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Rollout
from megatron_stare.reporting.problem_scores import (
    Problem,
    Response,
    count_reflections,
    problem_row,
    set_metrics,
)
from megatron_stare.rollout.engine import Engine, EngineError
from megatron_stare.scoring.judge import Judge, sample_of

DIRECTORY, PROBLEMS_NAME = "evaluation", "problems.jsonl"


class Evaluator:
    """Every set of evaluation.eval_data, tokenised once.
    A response is right where its verdict is `correct`.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        engine: Engine,
        judge: Judge,
        topology: Topology,
    ) -> None:
        self.config, self.engine, self.judge, self.topology = config, engine, judge, topology
        self.sets, lines = evaluation_sets.build_sets(config, tokenizer, offered_tools(config))
        if lines and topology.is_first:
            print("\n".join(lines), flush=True)
        self.problems: dict[str, list[Problem]] = {}  # of the last evaluation

    def due(self, step: int) -> bool:
        """Whether to evaluate after this step:
        at the interval, and after the last step of the run.
        """
        interval = self.config.evaluation.eval_interval
        return interval > 0 and (step % interval == 0 or step == self.config.train.num_rollout)

    def evaluate(self, journals: Path | None = None, policy: str = "") -> dict[str, float]:
        """eval/<set>/<number>, as reporting/problem_scores.py names and defines them. Collective.

        An unverifiable response counts as not right, and `unverifiable` says how many there were.
        The same random numbers serve every evaluation, so that two of them differ by the policy
        alone.

        journals: where finished rollouts of what `policy` names are kept, and found again.
        """
        metrics: dict[str, float] = {}
        for one in self.sets:
            directory = journals / f"{one.name}-{one.fingerprint(policy)}" if journals else None
            self.problems[one.name] = self._evaluated(one, directory)
            numbers = set_metrics(self.problems[one.name], self.config.run.seed)
            metrics |= {f"eval/{one.name}/{key}": value for key, value in numbers.items()}
        return metrics

    def _evaluated(self, one: EvaluationSet, directory: Path | None) -> list[Problem]:
        """The set's problems in order, on every rank;
        each of the engine's sources samples and judges its share.
        """
        mine: list[Problem] = []
        agreed(self.topology, lambda: mine.extend(self._mine(one, directory)))
        # the texts of the responses stay where they are
        rows = [
            (found.index, found.answers, [dataclasses.astuple(each) for each in found.responses])
            for found in mine
        ]
        everyone = gather_bytes(json.dumps(rows).encode(), self.topology.host)
        told = [self._problem(one, *row) for content in everyone for row in json.loads(content)]
        return sorted(told, key=lambda problem: problem.index)

    def _problem(
        self, one: EvaluationSet, place: int, answers: list[str], responses: list[list[Any]]
    ) -> Problem:
        prompt, given = one.prompts[place], tuple(Response(*each) for each in responses)
        return Problem(place, prompt.text, prompt.label, one.copies[place], tuple(answers), given)

    def _mine(self, one: EvaluationSet, directory: Path | None) -> list[Problem]:
        """This rank's share of the set's problems."""
        rank, sources = self.topology.rank, self.engine.sources
        places = range(rank, len(one.prompts), sources) if rank < sources else range(0)
        journal = Journal(directory / f"rank_{rank}_of_{sources}") if directory and places else None
        with contextlib.closing(journal) if journal else contextlib.nullcontext():
            rollouts = self._sampled(one, places, journal)
        return self._judged(one, places, rollouts)

    def _sampled(
        self, one: EvaluationSet, places: Sequence[int], journal: Journal | None
    ) -> list[Rollout]:
        """`samples` rollouts of each of this rank's prompts, in order;
        those in the journal are not sampled again.
        """
        keys = [(place, number) for place in places for number in range(one.samples)]
        found: dict[Key, Rollout] = {}
        if journal is not None:
            journal.open(max(0, self.engine.version))
            found = {
                key: rollout for key in keys if (rollout := journal.take(key, oldest=0)) is not None
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
        self.engine.wait(list(futures.values()))
        if journal is not None:
            for key, future in futures.items():  # a future is done a moment before it calls back
                notes[key](future)
        rollouts = [found[key] if key in found else futures[key].result() for key in keys]
        if any(rollout.status == "aborted" for rollout in rollouts):
            raise EngineError("the engine aborted a rollout that nobody asked it to abort")
        return rollouts

    def _judged(
        self, one: EvaluationSet, places: Sequence[int], rollouts: list[Rollout]
    ) -> list[Problem]:
        n, words = one.samples, self.config.evaluation.reflection_words
        samples = [
            sample_of(one.prompts[places[number // n]], rollout)
            for number, rollout in enumerate(rollouts)
        ]
        verdicts = self.judge.verdicts(samples)
        by_problem = [verdicts[start : start + n] for start in range(0, len(verdicts), n)]
        classes = answer_classes(by_problem, self.judge, self.config.scoring)
        problems = []
        for number, (place, (answers, given)) in enumerate(zip(places, classes, strict=True)):
            prompt, own = one.prompts[place], rollouts[number * n : (number + 1) * n]
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
            problems.append(
                Problem(
                    place, prompt.text, prompt.label, one.copies[place], tuple(answers), responses
                )
            )
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


def evaluate_checkpoint(
    config: Config, topology: Topology
) -> tuple[dict[str, float], dict[str, list[Problem]]]:
    """Evaluate the newest checkpoint of run.dir, or policy.hf_checkpoint where the run has none.
    Builds no optimizer and no gradient buffers. Collective.

    The metrics, and the problems of every set behind them.
    """
    if not config.evaluation.eval_data:
        raise UserError(
            "evaluation.eval_data is empty; give evaluation.eval_data.<name>=<file.jsonl or "
            ".parquet>"
        )
    directory = Path(config.run.dir)
    judge, tokenizer = build_judge(config), load_tokenizer(config.policy.hf_checkpoint)
    with (
        contextlib.closing(judge),
        contextlib.closing(build_engine(config, tokenizer, topology)) as engine,
    ):
        evaluator = Evaluator(config, tokenizer, engine, judge, topology)
        newest = CheckpointDirectory(directory / "checkpoints", topology).find(claim=False)
        temperature = config.rollout.rollout_temperature
        model = PolicyModel(config.policy.hf_checkpoint, config.policy, topology, temperature)
        if newest:
            model_state.into_model(model.chunks, newest, topology)
        step = step_of(newest) if newest else 0
        engine.load_weights(model.weights(), step)
        metrics = evaluator.evaluate(
            directory / DIRECTORY, evaluation_sets.policy_name(config, model.fingerprint())
        )
        return {"step": step} | metrics, evaluator.problems


def write_problems(problems: dict[str, list[Problem]], directory: Path) -> Path:
    """One line per problem, for reading and for other programs."""
    target = directory / DIRECTORY / PROBLEMS_NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = [problem_row(name, problem) for name, found in problems.items() for problem in found]
    target.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return target
