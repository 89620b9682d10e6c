"""`serve`, up to the pool of servers (tests/slurm has the whole)."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stare.commands import servers
from megatron_stare.config import SGLangConfig
from megatron_stare.loop.interrupt import Interrupt
from tests.small_run import small_config


@pytest.mark.parametrize(("health", "silence"), [(60, 300), (900, 900)])
def test_a_server_that_loads_weights_may_be_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, health: int, silence: int
) -> None:
    class OpenedError(Exception):
        pass

    def pool(settings: SGLangConfig, *_: object) -> None:
        raise OpenedError(settings.health_timeout)

    monkeypatch.setattr(servers, "SGLangPool", pool)
    limits = (f"sglang.health_timeout={health}", "sglang.sync_timeout=300")
    with pytest.raises(OpenedError) as opened:
        servers.serve(small_config(tmp_path, *limits), Interrupt())
    assert opened.value.args == (silence,)
