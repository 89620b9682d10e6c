"""The evaluation of a checkpoint, without training."""

from __future__ import annotations

import contextlib
from pathlib import Path

from megatron_stare.collect.judging import build_judge
from megatron_stare.config import Config, UserError
from megatron_stare.loop.assemble import build_workers
from megatron_stare.loop.evaluation import sets as evaluation_sets
from megatron_stare.loop.evaluation.evaluation import DIRECTORY, Evaluator
from megatron_stare.loop.parts import build_engine, load_tokenizer, newest_policy
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.problem_scores import Problem


def evaluate_checkpoint(
    config: Config, topology: Topology
) -> tuple[dict[str, float], dict[str, list[Problem]]]:
    """Evaluate the newest checkpoint of run.dir, or policy.hf_checkpoint where the run has none.
    Builds no optimizer and no gradient buffers. Collective.

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
        model, step = newest_policy(config, topology)
        engine.load_weights(model.weights(), step)
        metrics = evaluator.evaluate(
            directory / DIRECTORY, evaluation_sets.policy_name(config, model.fingerprint())
        )
        return {"step": step} | metrics, evaluator.problems
