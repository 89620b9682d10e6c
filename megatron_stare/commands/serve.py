"""Servers to attach to: `python -m megatron_stare serve` keeps
them alive until it is told to stop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_stare.config import Config
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.parts import load_tokenizer
from megatron_stare.loop.sync.served_engine import served_model
from megatron_stare.rollout.engine import EngineError
from megatron_stare.rollout.sglang.access import KEY_VARIABLE, api_key
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.server import Server


def advice(servers: Sequence[Server], keyed: bool) -> str:
    """How to train on these servers, from any machine that reaches them; never the key itself."""
    urls = ",".join(server.process.public_url for server in servers if server.process)
    key = f", with their key in sglang.api_key or {KEY_VARIABLE}" if keyed else ""
    return f"serving; train with rollout.engine=sglang 'sglang.urls=[{urls}]'{key}"


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
        print(advice(pool.servers, bool(api_key(settings))), flush=True)
        while not interrupt.noted:
            if pool.failure is not None:
                raise EngineError(str(pool.failure)) from pool.failure
            time.sleep(0.2)
