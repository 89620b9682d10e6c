"""A model and a pool for tests that need no server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_stare.config import SGLangConfig
from megatron_stare.rollout.engine import State
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.server import Model, read_config
from megatron_stare.rollout.stops import stop_ids
from tests.tiny_models import byte_tokenizer, tiny_config, write_checkpoint


def tiny_model(directory: Path) -> Model:
    """A checkpoint of a few kilobytes."""
    written = write_checkpoint(directory, tiny_config("qwen2"))
    byte_tokenizer().save_pretrained(written)
    stops = stop_ids(str(written), byte_tokenizer())
    return Model(str(written), "float32", byte_tokenizer(), stops, read_config(str(written)))


@contextlib.contextmanager
def idle_pool(model: Model, logs: Path, **settings: Any) -> Iterator[SGLangPool]:
    """A pool of three servers that nobody asks anything, with weights of version 1;
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
