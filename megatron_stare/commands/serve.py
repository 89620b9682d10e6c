"""Servers to attach to: `python -m megatron_stare serve` keeps
them alive until it is told to stop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path

from megatron_stare.config import Config
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.parts import load_tokenizer
from megatron_stare.loop.sync.served_engine import served_model
from megatron_stare.rollout.engine import EngineError
from megatron_stare.rollout.sglang.pool import SGLangPool


def serve(config: Config, interrupt: Interrupt) -> None:
    """Launch sglang.num_servers servers of policy.hf_checkpoint, print how to use them,
    revive the dead.

    A run that attaches to them brings its own weights. Returns on a signal; UserError where they
    cannot start.
    """
    settings = dataclasses.replace(config.sglang, urls=[], router_url="")
    model = served_model(config, load_tokenizer(config.policy.hf_checkpoint))
    with contextlib.closing(SGLangPool(settings, model, Path(config.run.dir) / "servers")) as pool:
        started = pool.begin()
        while not started.done() and not interrupt.noted:
            time.sleep(0.1)
        if interrupt.noted:
            return
        started.result()
        urls = ",".join(server.client.url for server in pool.servers)
        print(f"serving; train with rollout.engine=sglang 'sglang.urls=[{urls}]'", flush=True)
        while not interrupt.noted:
            if pool.failure is not None:
                raise EngineError(str(pool.failure)) from pool.failure
            time.sleep(0.2)
