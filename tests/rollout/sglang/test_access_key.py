"""A real server with a key: launched, given weights, asked, and closed to everybody else."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from megatron_stare.config import SGLangConfig, UserError
from megatron_stare.rollout.sglang.access import KEY_VARIABLE
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.sync.served_engine import make_sync
from tests.rollout.sglang.idle import sample_all, send_weights
from tests.rollout.sglang.world import (
    CHECKSUMS,
    PLAIN,
    STREAM_INTERVAL,
    assert_sampled_from,
    requests,
    served,
)

pytestmark = pytest.mark.sglang

KEY = "open-sesame-4711"


def test_a_server_with_a_key_answers_only_clients_with_the_key(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    settings = SGLangConfig(
        api_key=KEY,
        verify_weights=CHECKSUMS,
        sync_timeout=60,
        stream_interval=STREAM_INTERVAL,
    )
    with contextlib.closing(SGLangPool(settings, served(checkpoint), tmp_path)) as pool:
        pool.start().result(timeout=600)
        pool.expect(3)
        sender = make_sync(pool, settings, str(checkpoint), tmp_path / "weights")
        send_weights(sender, load_file(checkpoint / "model.safetensors").items(), pool.servers)
        asked = requests(6)
        assert_sampled_from(checkpoint, asked, sample_all(pool, asked, PLAIN).result(timeout=120))
        client = pool.servers[0].client
        pool.run(client.pause()).result()
        pool.run(client.resume()).result()
        pool.probe()
        assert pool.admission.up_to_date()
        without = SGLangConfig(urls=[pool.servers[0].client.url])
        with (
            contextlib.closing(SGLangPool(without, served(checkpoint), tmp_path)) as stranger,
            pytest.raises(UserError, match="refuses requests without a key"),
        ):
            stranger.start().result(timeout=60)
        children = psutil.Process().children(recursive=True)
        assert children and not any(KEY in " ".join(one.cmdline()) for one in children)
        log = tmp_path / "sglang_0.log"
        assert log.stat().st_mode & 0o077 == 0
        assert KEY not in log.read_text().splitlines()[0]
