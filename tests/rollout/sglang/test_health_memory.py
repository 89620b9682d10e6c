"""Servers that share the trainer's memory:
released before training, resumed around the next weights, or refused.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from megatron_stare.config import SGLangConfig, UserError
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.logbook import read_metrics
from megatron_stare.rollout.sglang.pool import SGLangPool
from tests.rollout.sglang.proxy import Proxy
from tests.rollout.sglang.world import CHECKSUMS, TOLERANCE, VERIFY, served
from tests.small_run import small_config

pytestmark = pytest.mark.sglang

STEP = [
    "generate",
    'release {"tags": ["cuda_graph", "kv_cache", "weights"]}',
    'resume {"tags": ["weights"]}',
    "begin",
    "update",
    "end",
    *(["check"] if CHECKSUMS else []),
    'resume {"tags": ["cuda_graph", "kv_cache"]}',
]
NAMES = {
    "/generate": "generate",
    "/release_memory_occupation": "release",
    "/resume_memory_occupation": "resume",
    "/begin_weight_update": "begin",
    "/update_weights_from_tensor": "update",
    "/end_weight_update": "end",
    "/weights_checker": "check",
}


def test_a_run_releases_memory_to_train_and_resumes_it_around_the_weights(
    proxy: Proxy, checkpoint: Path, tmp_path: Path, topology: Topology
):
    settings = (
        "rollout.engine=sglang",
        f"sglang.urls=[{proxy.url}]",
        f"policy.hf_checkpoint={checkpoint}",
    )
    sharing = ("sglang.colocated=true", "sglang.sync_method=tensor", "train.num_rollout=2")
    one_round = "rollout.dynamic_sampling=false"
    trainer = Trainer(small_config(tmp_path, *settings, *sharing, one_round, VERIFY), topology)
    assert trainer.run(Interrupt())
    rows = read_metrics(Path(trainer.config.run.dir) / "metrics.jsonl")
    assert len(rows) == 2 and all(row["logprob_diff_max"] < TOLERANCE for row in rows)
    calls: list[str] = []
    for path, body in proxy.asked:
        if path in NAMES:
            tags = f" {json.dumps(json.loads(body))}" if "memory" in path else ""
            if calls[-1:] != [name := NAMES[path] + tags]:  # many requests are one generation
                calls.append(name)
    assert calls == [*STEP[1:], *STEP, *STEP]


def test_a_server_that_cannot_give_memory_back_is_refused(
    proxy: Proxy, checkpoint: Path, tmp_path: Path
):
    proxy.faults["/server_info"] = [lambda answer: answer.update(enable_memory_saver=False)] * 10
    settings = SGLangConfig(urls=[proxy.url], colocated=True, sync_method="tensor")
    with contextlib.closing(SGLangPool(settings, served(checkpoint), tmp_path)) as pool:
        with pytest.raises(
            UserError, match=r"cannot release its memory.*start it with --enable-memory-saver"
        ):
            pool.start().result(timeout=60)
        assert not proxy.seen["/release_memory_occupation"]


def test_nccl_cannot_broadcast_to_a_gpu_it_shares(tmp_path: Path):
    shared = ("rollout.engine=sglang", "sglang.colocated=true")
    with pytest.raises(
        UserError, match=r"needs separate GPUs for trainer and servers; set .*sync_method=null"
    ):
        small_config(tmp_path, *shared, "sglang.sync_method=broadcast")
    assert small_config(tmp_path, *shared).sglang.transport == "tensor"
    assert small_config(tmp_path, shared[0]).sglang.transport == "broadcast"
