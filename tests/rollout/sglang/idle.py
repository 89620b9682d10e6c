"""A model and a pool for tests that need no server, and what is done with any pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_stare.config import SGLangConfig
from megatron_stare.records import Rollout
from megatron_stare.rollout.engine import Request, SamplingParams, State, stop_ids
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.server import Model, Server, read_config
from megatron_stare.sync.weight_sync import WeightSync, in_buckets
from tests.tiny_models import byte_tokenizer, tiny_config, write_checkpoint


def tiny_model(directory: Path) -> Model:
    """A checkpoint of a few kilobytes."""
    written = write_checkpoint(directory, tiny_config("qwen2"))
    byte_tokenizer().save_pretrained(written)
    stops = stop_ids(str(written), byte_tokenizer())
    return Model(str(written), "float32", byte_tokenizer(), stops, read_config(str(written)))


@contextlib.contextmanager
def idle_pool(model: Model, logs: Path, **settings: Any) -> Iterator[SGLangPool]:
    """A pool of three servers that receive no requests, with weights of version 1;
    its thread does not run.
    """
    urls = [f"http://127.0.0.1:{port}" for port in (1, 2, 3)]
    config = SGLangConfig(**({"urls": urls, "max_concurrency": 4} | settings))
    pool = SGLangPool(config, model, logs)
    pool.expect(1)
    for server in pool.servers:
        server.state, server.weights, server.version = State.READY, pool.tag, pool.version
    with contextlib.closing(pool):
        yield pool


def sample_all(
    pool: SGLangPool, requests: Sequence[Request], params: SamplingParams
) -> Future[list[Rollout]]:
    """`pool.submit` with one future for all, in order; the first failure is its failure."""
    futures = pool.submit(requests, params)

    async def all_of_them() -> list[Rollout]:
        return await asyncio.gather(*map(asyncio.wrap_future, futures))

    return pool.run(all_of_them())


def send_weights(
    sync: WeightSync, weights: Iterable[tuple[str, Tensor]], servers: Sequence[Server]
) -> None:
    """Send plain weights, in buckets of sglang.sync_bucket_mib."""
    sync.send(in_buckets(weights, sync.settings.sync_bucket_mib << 20), servers)
