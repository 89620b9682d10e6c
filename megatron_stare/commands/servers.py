"""`serve` keeps rollout servers alive until a signal stops it, and runs attach to them; `relay`
runs a weight relay, for servers that only a slow link connects to their trainer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_stare.config import Config, EngineError, SGLangConfig, UserError
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.resolve import load_tokenizer
from megatron_stare.rollout.sglang.access import (
    KEY_VARIABLE,
    api_key,
    public_url,
    standing_open,
    url_of,
)
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.process import ServerProcess
from megatron_stare.rollout.sglang.server import Server, launcher
from megatron_stare.sync.delta.relay import RelayServer
from megatron_stare.sync.served_engine import served_model, write_start

_LOOK_SECONDS, _RESTART_SECONDS = 1.0, 5.0


def advice(servers: Sequence[Server], keyed: bool) -> str:
    """The message with the settings to train on these servers; it never holds the key."""
    urls = ",".join(server.process.public_url for server in servers if server.process)
    key = f", with their key in sglang.api_key or {KEY_VARIABLE}" if keyed else ""
    return f"serving; train with rollout.engine=sglang 'sglang.urls=[{urls}]'{key}"


def serve(config: Config, interrupt: Interrupt) -> None:
    """Launch sglang.num_servers servers of policy.hf_checkpoint, print how to use them,
    revive the dead.

    A run that attaches to them brings its own weights. Returns on a signal; UserError where they
    cannot start. Where sglang.server_args has a --node-rank above 0, this is one node's share of a
    server whose first node is asked: it ends and starts with that one.
    """
    first = config.sglang.first_gpu or 0
    # A server may be silent while it loads the weights of a run, which this pool does not see.
    silence = max(config.sglang.health_timeout, config.sglang.sync_timeout)
    settings = dataclasses.replace(
        config.sglang, urls=[], router_url="", first_gpu=first, health_timeout=silence
    )
    model = served_model(config, load_tokenizer(config.policy.hf_checkpoint))
    write_start(model)
    if head := _head(settings):
        follow(launcher(settings, model, Path(config.run.dir) / "servers", 0), head, interrupt)
        return
    with contextlib.closing(SGLangPool(settings, model, Path(config.run.dir) / "servers")) as pool:
        started = pool.start()
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


def follow(
    launch: Callable[[], ServerProcess], head: tuple[str, int], interrupt: Interrupt
) -> None:
    """Keep this node's share of a server running, until a signal. Once the first node, which
    answered at `head`, does not any more, the share starts again with it: a group that has lost a
    member takes no other.
    """
    process, answered = launch(), False
    try:
        while not interrupt.noted:
            here = _answers(head)
            if not process.alive() or (answered and not here):
                print(f"starting again; last: {process.last_words()}", flush=True)
                process.stop(at_once=True)
                time.sleep(_RESTART_SECONDS)
                process, here = launch(), False
            answered = here
            time.sleep(_LOOK_SECONDS)
    finally:
        process.stop(at_once=True)


def _head(settings: SGLangConfig) -> tuple[str, int] | None:
    """Host and port of the server's first node, where this is another of its nodes. UserError:
    --dist-init-addr or sglang.port is missing.
    """
    across = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    across.add_argument("--node-rank", type=int, default=0)
    across.add_argument("--dist-init-addr", default="")
    found, _ = across.parse_known_args(shlex.split(settings.server_args))
    if found.node_rank == 0:
        return None
    if not found.dist_init_addr or not settings.port:
        raise UserError(
            f"sglang.server_args={settings.server_args!r} has --node-rank above 0; give "
            "--dist-init-addr too, and in sglang.port the port of the server's first node"
        )
    return found.dist_init_addr.rpartition(":")[0], settings.port


def _answers(head: tuple[str, int]) -> bool:
    try:
        socket.create_connection(head, timeout=10.0).close()
    except OSError:
        return False
    return True


def relay(directory: Path, host: str, port: int, interrupt: Interrupt) -> None:
    """Hold a trainer's weights in `directory`, and print how to train with the relay. A signal ends
    it and deletes the weights.
    """
    key = api_key(SGLangConfig())
    server = RelayServer(directory, host, port, key)
    try:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        if standing_open(SGLangConfig(urls=[url_of(host, server.port)])):
            print(
                f"no key is set, so that any process that reaches port {server.port} can "
                f"replace the weights; set {KEY_VARIABLE}",
                file=sys.stderr,
            )
        with_key = f", with its key in sglang.api_key or {KEY_VARIABLE}" if key else ""
        print(
            f"relay in {server.relay.directory}; train with sglang.sync_method=delta "
            f"'sglang.relays=[{public_url(host, server.port)}]'{with_key}",
            flush=True,
        )
        while not interrupt.noted:
            time.sleep(0.2)
        server.shutdown()
    finally:
        server.server_close()
