"""Servers that hold their weights in other ways:
two tensor-parallel ranks, tied embeddings, query and key norms.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from megatron_stare.config import SGLangConfig
from megatron_stare.rollout.sglang.health import CACHES, WEIGHTS
from megatron_stare.rollout.sglang.pool import SGLangPool
from tests.rollout.sglang.idle import sample_all
from tests.rollout.sglang.world import (
    CHECKSUMS,
    PLAIN,
    assert_sampled_from,
    make_model,
    requests,
    served,
    sync,
)

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_two_ranks_with_tied_embeddings(tmp_path: Path):
    """Checksums of both ranks' shards are compared by every sync;
    widths are padded to 64 on each of them.

    Between the two syncs the ranks give their memory back, and take it again."""
    first, second = (
        make_model(tmp_path / name, "qwen3_tied", seed)
        for seed, name in enumerate(("first", "second"))
    )
    settings = SGLangConfig(
        server_args="--tp-size 2",
        sync_bucket_mib=1,
        sync_timeout=120,
        colocated=True,
        verify_weights=CHECKSUMS,
    )
    with contextlib.closing(SGLangPool(settings, served(first), tmp_path)) as pool:
        pool.start().result()
        assert pool.servers[0].layout.tensor_size == 2
        asked = requests(8)
        for version, checkpoint in enumerate((first, second)):
            pool.resume_memory(WEIGHTS)
            sync(pool, checkpoint, version, tmp_path)
            pool.resume_memory(CACHES)
            assert_sampled_from(checkpoint, asked, sample_all(pool, asked, PLAIN).result())
            pool.release_memory()
        assert pool.servers[0].released == {*WEIGHTS, *CACHES}
    log = (tmp_path / "sglang_0.log").read_text()
    assert (
        log.count('"POST /release_memory_occupation')
        == log.count('"POST /resume_memory_occupation')
        == 2
    )
