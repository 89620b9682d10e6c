"""Held-out problems: avg@k, pass@k, majority@k and more, on whatever engine holds the policy.

`evaluate` writes each finished rollout to run.dir/evaluation as it comes; the same command after a
kill samples only what is missing. Rollouts are found again only for the same weights, prompts, seed
and sampling settings, whatever the step is called. Those of other weights are left where they are.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megatron_stare.collect.process_worker import WorkerProcesses
from megatron_stare.config import Config
from megatron_stare.loop.evaluation import sets as evaluation_sets
from megatron_stare.loop.evaluation.examining import Destinations, Examiner
from megatron_stare.loop.evaluation.sets import EvaluationSet
from megatron_stare.loop.parts import offered_tools
from megatron_stare.numerics.exchange import all_gather_bytes
from megatron_stare.policy.topology import Topology, agreed
from megatron_stare.reporting.problem_scores import (
    EVALUATION,
    Problem,
    problem_row,
    responses_directory,
    set_metrics,
)
from megatron_stare.rollout.engine import Engine
from megatron_stare.scoring.judge import Judge
from megatron_stare.system import json_line, return_memory

PROBLEMS_NAME = "problems.jsonl"


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
        workers: WorkerProcesses | None = None,
    ) -> None:
        """`workers` do it, where there are any."""
        self.config, self.engine, self.topology, self.workers = config, engine, topology, workers
        self.examiner = Examiner(config, engine, judge, engine.wait)
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
        if self.workers is not None:
            self.workers.abort()

    def _evaluated(self, one: EvaluationSet, kept: Destinations) -> list[Problem]:
        """The set's problems in order, on every rank;
        each worker process, or else each of the engine's sources, samples and judges its share.
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

    def _mine(self, one: EvaluationSet, kept: Destinations) -> Sequence[Problem]:
        """This rank's share of the set's problems."""
        if self.workers is not None:
            parts = self.workers.evaluate(one, kept)
            self.engine.wait(parts)
            return [problem for part in parts for problem in part.result()]
        rank, sources = self.topology.rank, self.engine.sources
        places = range(rank, len(one.prompts), sources) if rank < sources else range(0)
        return self.examiner.problems(one, places, kept, f"rank_{rank}_of_{sources}")


def write_problems(problems: dict[str, list[Problem]], directory: Path) -> Path:
    """One line per problem, for reading and for other programs."""
    target = directory / EVALUATION / PROBLEMS_NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = [problem_row(name, problem) for name, found in problems.items() for problem in found]
    target.write_text("".join(map(json_line, rows)), encoding="utf-8")
    return target
