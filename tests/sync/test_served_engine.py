"""Two ranks and one server on their device: who gives memory back, and when it is taken."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import torch

from megatron_stare.config import Config, override
from megatron_stare.policy import topology as topologies
from megatron_stare.sync import served_engine
from tests.distributed import run_distributed
from tests.rollout.sglang.fake_server import fake_servers
from tests.rollout.sglang.idle import tiny_model
from tests.tiny_models import byte_tokenizer

SETTINGS = (
    "rollout.engine=sglang",
    "sglang.colocated=true",
    "sglang.sync_method=tensor",
    "sglang.verify_weights=false",
)


def share(rank: int, world_size: int, directory: Path, url: str) -> None:
    """Release, and new weights; each rank tells the server when it has given its memory back."""
    release = served_engine.release_workspaces

    def give_back() -> None:
        time.sleep(0.3 * rank)  # the last rank is late
        release()
        httpx.post(f"{url}/given_back", json={"rank": rank})

    served_engine.release_workspaces = give_back
    paths = (f"policy.hf_checkpoint={directory / 'model'}", f"run.dir={directory / 'run'}")
    config = override(Config(), [*paths, f"sglang.urls=[{url}]", *SETTINGS])
    topology = topologies.start(config.policy)
    engine = served_engine.ServedEngine(config, byte_tokenizer(), topology)
    try:
        for version in range(2):
            engine.load_weights([("a", torch.ones(3)), ("b", torch.zeros(2))], version)
            engine.release_memory()
        engine.load_weights([("a", torch.ones(3))], 2)
    finally:
        engine.close()


def test_servers_take_memory_when_every_rank_has_given_it_back(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    with fake_servers(1, model_path=str(tmp_path / "model"), vocab_size=71) as (url,):
        run_distributed(share, 2, tmp_path, url)
        order = httpx.get(f"{url}/seen").json()["order"]
    update = ["begin_weight_update", "update_weights_from_tensor", "end_weight_update"]
    given = ["given_back"] * 2
    resume = "resume_memory_occupation"
    first = [*given, *update, *given]
    later = ["release_memory_occupation", *given, resume, *update, *given, resume]
    names = [path.removeprefix("/") for path in order]
    assert [name for name in names if name in {*later}] == [*first, *later, *later]
