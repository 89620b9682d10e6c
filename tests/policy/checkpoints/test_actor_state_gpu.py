"""A run on TransformerEngine's layers and its fused Adam, saved and taken up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stare.policy import build
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.checkpoints import actor_state
from megatron_stare.policy.checkpoints.checkpoints import Save
from megatron_stare.policy.optimizer import MOMENTS, mains, make_room
from megatron_stare.policy.topology import Topology
from tests.small_run import small_config

pytestmark = pytest.mark.nullcuda
STEPS = 3


def held(actor: Actor) -> list[torch.Tensor]:
    """Weights, moments and fp32 copies."""
    tensors: list[Any] = [value for chunk in actor.chunks for value in chunk.parameters()]
    for part in actor.optimizer.chained_optimizers:
        for _, _, main in mains(part):
            tensors += [main, *(part.optimizer.state[main][name] for name in MOMENTS)]
    return [tensor.detach().cpu().float() for tensor in tensors]


@pytest.mark.parametrize("spread", ["true", "false"])
def test_the_actor_resumes_exactly(spread: str, tmp_path: Path, topology: Topology) -> None:
    options = ("policy.dtype=bf16", f"policy.use_distributed_optimizer={spread}")
    config = small_config(tmp_path, *options)
    first, second = (Actor(config, topology, 10) for _ in range(2))
    if not build._has_transformer_engine():
        pytest.skip("no TransformerEngine here: run tools/nullcuda/build")
    (part,) = first.optimizer.chained_optimizers
    assert type(part.optimizer).__module__.startswith("transformer_engine")
    make_room(first.optimizer, STEPS)
    generator = torch.Generator().manual_seed(1)
    for _, _, main in mains(part):
        for name in MOMENTS:
            moment = part.optimizer.state[main][name]
            moment.copy_(torch.rand(moment.shape, generator=generator))
    for _ in range(STEPS):
        first.scheduler.step(1)
    place = tmp_path / "saved"
    place.mkdir()
    Save(actor_state.of_actor(first, {"step": STEPS}), place, topology, False).finish()
    assert actor_state.into_actor(second, place)["step"] == STEPS
    for one, other in zip(held(first), held(second), strict=True):
        assert torch.equal(one, other)
    for group in second.optimizer.chained_optimizers[0].optimizer.param_groups:
        assert group["step"] == STEPS
    second.runnable[0].zero_grad_buffer()
    second.optimizer.step()
    assert {
        group["step"] for group in second.optimizer.chained_optimizers[0].optimizer.param_groups
    } == {STEPS + 1}
