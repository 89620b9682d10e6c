"""The fingerprint of a policy's weights: one for all ranks, another for any other weight."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_stare.config import PolicyConfig
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.model import PolicyModel
from tests.distributed import run_distributed
from tests.tiny_models import tiny_config, write_checkpoint

LAYOUTS = ({"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {})


def model_of(checkpoint: str, topology: topologies.Topology, **policy: int) -> PolicyModel:
    return PolicyModel(checkpoint, PolicyConfig(**policy), topology, 1.0)


def under_each_layout(rank: int, world_size: int, checkpoint: str) -> list[list[str]]:
    """Per layout: as loaded, loaded again, with one weight of rank 1 changed."""
    found = []
    for layout in LAYOUTS:
        with_topology = topologies.start(PolicyConfig(**layout))
        model = model_of(checkpoint, with_topology, **layout)
        marks = [
            model.fingerprint(),
            model_of(checkpoint, with_topology, **layout).fingerprint(),
        ]
        if rank == 1:
            change_one_weight(model)
        found.append([*marks, model.fingerprint()])
    return found


def change_one_weight(model: PolicyModel) -> None:
    *_, last = model.chunks[-1].parameters()
    with torch.no_grad():
        flat = last.view(-1)
        flat[-1] = torch.nextafter(flat[-1], flat.new_tensor(9.0))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("qwen2_tied")))


def test_two_ranks_agree_and_notice_each_others_changes(checkpoint: str) -> None:
    first, second = run_distributed(under_each_layout, 2, checkpoint)
    assert first == second
    for loaded, again, changed in first:
        assert re.fullmatch("[0-9a-f]{16}", loaded)
        assert loaded == again != changed


def test_the_fingerprint_distinguishes_weights_and_needs_no_gradient(
    topology: topologies.Topology, checkpoint: str, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", tiny_config("qwen2_tied"), seed=1)
    model = model_of(checkpoint, topology)
    before = model.fingerprint()
    assert before == model.fingerprint() != model_of(str(other), topology).fingerprint()
    change_one_weight(model)
    assert model.fingerprint() != before
    assert all(parameter.grad is None for parameter in model.chunks[0].parameters())
