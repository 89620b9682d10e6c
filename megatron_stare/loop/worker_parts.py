"""Builds the parts that a worker process samples and judges with."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from megatron_stare.collect.judging import build_judge
from megatron_stare.collect.workers.worker_main import WorkerParts
from megatron_stare.config import Config
from megatron_stare.loop.evaluation.examining import Examiner
from megatron_stare.loop.parts import embedded_engine, load_tokenizer, with_tools
from megatron_stare.rollout.sglang.pool_replica import PoolReplica
from megatron_stare.sync.served_engine import served_model


def build_worker_parts(config: Config) -> WorkerParts:
    """An engine, a judge and an evaluator for one worker process. Runs in that process."""
    judge = build_judge(config)
    tokenizer = load_tokenizer(config.policy.hf_checkpoint)
    pool = None
    if config.rollout.engine == "sglang":
        pool = PoolReplica(config.sglang, served_model(config, tokenizer))
    plain: Any = pool or embedded_engine(config, tokenizer)
    engine = with_tools(plain, config, tokenizer)
    examiner = Examiner(config, engine, judge, _wait)
    return WorkerParts(judge, engine, plain, pool, examiner.rows)


def _wait(futures: Sequence[Future[Any]]) -> None:
    """Until all are done; the first failure is raised."""
    wait(futures, return_when=FIRST_EXCEPTION)
    for future in futures:
        if future.done():
            future.result()
