"""Builds the parts of a run, of one worker process and of an evaluation without training,
cheapest checks first, so that bad input costs no model load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from typing import Any, NamedTuple

from megatron_stare.collect.journal import Journal, journal_directory
from megatron_stare.collect.judging import build_judge
from megatron_stare.collect.local_worker import LocalWorker
from megatron_stare.collect.process_worker import WorkerProcesses
from megatron_stare.collect.rollout_buffer import RolloutBuffer
from megatron_stare.collect.rollout_worker import is_streamed
from megatron_stare.collect.rounds import RolloutWorkers, decoded_together
from megatron_stare.collect.worker_main import WorkerParts
from megatron_stare.config import Config, UserError
from megatron_stare.data.prompts import prompts_digest
from megatron_stare.loop import run_directory
from megatron_stare.loop.evaluation import Evaluator, Examiner, policy_name
from megatron_stare.loop.learn import Learner
from megatron_stare.loop.parity import Witness
from megatron_stare.loop.parts import (
    build_engine,
    embedded_engine,
    load_tokenizer,
    saved_policy,
    with_tools,
)
from megatron_stare.loop.prepare import updates_per_rollout
from megatron_stare.loop.resolve import resolve
from megatron_stare.policy import build
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.adapters import check as check_adapters
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.problem_scores import EVALUATION, Problem
from megatron_stare.rollout.engine import Engine
from megatron_stare.rollout.sglang.pool import PoolReplica
from megatron_stare.scoring.judge import Judge
from megatron_stare.sync.served_engine import served_model
from megatron_stare.system import raise_file_limit


class Parts(NamedTuple):
    """The parts of a training run."""

    actor: Actor
    engine: Engine
    collector: RolloutBuffer
    evaluator: Evaluator
    judge: Judge
    learner: Learner


def assemble(config: Config, topology: Topology) -> Parts:
    """All parts, ready for the first step except for the weights in the engine.
    UserError for whatever cannot work.
    """
    raise_file_limit()
    if topology.is_first:
        run_directory.claim(config)
    hf, objective, judge, tokenizer, stream, lines = resolve(config)
    build.transformer_config(hf, config.policy, topology)
    check_adapters(hf, config.adapters, config.policy)
    if topology.is_first:
        run_directory.claim_prompts(config, len(stream.prompts), prompts_digest(stream.prompts))
        for line in lines:
            print(line, flush=True)
    with contextlib.ExitStack() as on_failure:
        workers = build_workers(config, topology)
        if workers is not None:
            on_failure.callback(workers.close)
        engine = build_engine(config, tokenizer, topology, workers)
        evaluator = Evaluator(config, tokenizer, engine, judge, topology, workers)
        actor = Actor(config, topology, config.train.num_rollout * updates_per_rollout(config))
        witness = Witness(config, actor, engine, stream, tokenizer)
        learner = Learner(config, objective, actor, tokenizer, witness)
        rollout_workers = _rollout_workers(config, engine, judge, topology, workers)
        collector = RolloutBuffer(config, stream, engine, rollout_workers, topology)
        on_failure.pop_all()
        return Parts(actor, engine, collector, evaluator, judge, learner)


def build_workers(config: Config, topology: Topology) -> WorkerProcesses | None:
    """The worker processes of a run that has some; the caller closes them."""
    if not config.rollout.workers:
        return None
    return WorkerProcesses(config, topology, build_worker_parts)


def _rollout_workers(
    config: Config,
    engine: Engine,
    judge: Judge,
    topology: Topology,
    processes: WorkerProcesses | None,
) -> RolloutWorkers:
    """The worker processes, on rank 0; without any, one local worker on every rank that the engine
    takes requests on. A stream always samples on rank 0 and has a journal there; a round of the
    embedded engine that is interrupted is sampled again.
    """
    rollout, streamed = config.rollout, is_streamed(config)
    if processes is not None:
        together = 0 if streamed else decoded_together(config, rollout.n_samples_per_prompt)
        return RolloutWorkers([0], rollout.workers, processes.workers, together)
    ranks = range(1 if streamed else engine.sources)
    journal = Journal(journal_directory(config)) if streamed else None
    own = [LocalWorker(config, engine, judge, journal)] if topology.rank in ranks else []
    return RolloutWorkers(ranks, 1, own)


def build_worker_parts(config: Config) -> WorkerParts:
    """An engine, a judge and an evaluator for one worker process. Runs in that process."""
    judge = build_judge(config)
    tokenizer = load_tokenizer(config.policy.hf_checkpoint)
    pool = None
    if config.rollout.engine == "sglang":
        kept = config.rollout.cache_over_versions == "kept"
        pool = PoolReplica(config.sglang, served_model(config, tokenizer), keeps_cache=kept)
    plain: Any = pool or embedded_engine(config, tokenizer)
    engine = with_tools(plain, config, tokenizer)
    examiner = Examiner(config, engine, judge, _wait)
    return WorkerParts(judge, engine, pool, examiner.problems)


def _wait(futures: Sequence[Future[Any]]) -> None:
    """Wait until all are done; raise the first failure."""
    wait(futures, return_when=FIRST_EXCEPTION)
    for future in futures:
        if future.done():
            future.result()


def evaluate_checkpoint(
    config: Config, topology: Topology, load: str
) -> tuple[dict[str, float], dict[str, list[Problem]]]:
    """Evaluate the checkpoint of run.dir that `load` names, or policy.hf_checkpoint where the run
    has none. Builds no optimizer and no gradient buffers. Collective.

    The metrics, and the problems of every set.
    """
    if not config.evaluation.eval_data:
        raise UserError(
            "evaluation.eval_data is empty; give evaluation.eval_data.<name>=<file.jsonl or "
            ".parquet>"
        )
    directory = Path(config.run.dir)
    judge, tokenizer = build_judge(config), load_tokenizer(config.policy.hf_checkpoint)
    with contextlib.ExitStack() as ending:
        ending.callback(judge.close)
        workers = build_workers(config, topology)
        if workers is not None:
            ending.callback(workers.close)
        engine = build_engine(config, tokenizer, topology, workers)
        ending.callback(engine.close)
        evaluator = Evaluator(config, tokenizer, engine, judge, topology, workers)
        model, step = saved_policy(config, topology, load)
        engine.load_weights(model.served_weights(), step)
        name = policy_name(config, model.fingerprint())
        metrics = evaluator.evaluate(step, directory / EVALUATION, name)
        return {"step": step} | metrics, evaluator.problems
