"""Whole runs with routing replay on a real server: killed and resumed, with workers, behind a
router; what journal and record have of the experts, and recorded steps taken again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from megatron_stare.config import Config, override
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from megatron_stare.rollout.sglang.process import ServerProcess
from tests.debug.test_replay_experts import SETTINGS, check_taken, check_whole, kill_midway
from tests.forked import train
from tests.policy.test_experts import shape_of
from tests.rollout.sglang.test_sglang_router import generated, started_router
from tests.rollout.sglang.world import NEWER, VERIFY, make_model, start_server, wait_for
from tests.small_run import rows_of, small_config

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(not NEWER, reason="this SGLang returns no experts"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts in every layer: SGLang does not read mlp_only_layers."""
    directory = tmp_path_factory.mktemp("routed") / "model"
    return make_model(directory, "qwen3_moe", mlp_only_layers=[], num_hidden_layers=2)


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "server.txt"
    found = start_server(checkpoint, log, 0, "--enable-return-routed-experts")
    with contextlib.ExitStack() as stack:
        stack.callback(found.stop)
        wait_for([found], checkpoint)
        yield found


@pytest.fixture
def config(server: ServerProcess, checkpoint: Path, tmp_path: Path) -> Config:
    """A run on the server whose rollouts are long enough to be killed among them."""
    return small_config(
        tmp_path,
        *SETTINGS,
        *("rollout.engine=sglang", f"sglang.urls=[{server.url}]", "sglang.sync_method=tensor"),
        *("rollout.rollout_max_response_len=40", f"policy.hf_checkpoint={checkpoint}", VERIFY),
    )


def test_a_killed_run_resumes_with_the_servers_experts(
    config: Config, checkpoint: Path, topology: Topology
) -> None:
    """Every recorded step is replayed bit for bit, without the server."""
    before = kill_midway(config, 3, train(config))
    again = train(config)
    assert again.wait(400) == 0, again.output
    check_whole(config, topology, shape_of(checkpoint).width)
    check_taken(config, before, topology)
    assert all(row["engine_answers_without_routing"] == 0 for row in rows_of(config))


def test_with_a_router_the_workers_are_asked_directly(
    config: Config, server: ServerProcess, checkpoint: Path, tmp_path: Path, topology: Topology
) -> None:
    """Because it drops the field: an answer by way of it has none."""
    with started_router([server.url], tmp_path / "router.txt") as url:
        assert "routed_experts" not in answer_of(url) and answer_of(server.url)["routed_experts"]
        settings = ["sglang.urls=[]", f"sglang.router_url={url}", "train.num_rollout=2"]
        before = generated(server)
        run = Trainer(override(config, settings), topology)
        assert run.run(Interrupt())
        assert run.engine.pool.router is None and generated(server) - before >= 2 * 16
    check_whole(run.config, topology, shape_of(checkpoint).width)


def answer_of(url: str) -> dict[str, object]:
    """The parts of an answer without its tokens."""
    asked = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}}
    asked |= {"return_routed_experts": True}
    answer = httpx.post(f"{url}/generate", json=asked, timeout=60).raise_for_status().json()
    return answer["meta_info"]
