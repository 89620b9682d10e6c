"""`python -m megatron_stare relay` runs a weight relay until a signal stops it. A relay is for
servers that only a slow link connects to their trainer.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from megatron_stare.config import SGLangConfig
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.rollout.sglang.access import (
    KEY_VARIABLE,
    api_key,
    public_url,
    standing_open,
    url_of,
)
from megatron_stare.sync.delta.relay import RelayServer


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
