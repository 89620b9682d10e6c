"""FP8 experts on a GPU, where TransformerEngine groups them: what the model holds is rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_stare.policy import build
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.huggingface.weights import named_parameters
from tests.policy.test_experts_rounded import ROUNDED, an_actor, held
from tests.reference import e4m3_blocks
from tests.tiny_models import tiny_config, write_checkpoint

pytestmark = pytest.mark.nullcuda


def test_grouped_experts_are_rounded_too(tmp_path: Path) -> None:
    """Each expert's own matrix, at first and when they have moved."""
    if not build._has_transformer_engine():
        pytest.skip("no TransformerEngine here: run tools/nullcuda/build")
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16, "num_experts": 4}
    config = tiny_config("qwen3_moe", moe_intermediate_size=48, **shape)
    actor = an_actor(write_checkpoint(tmp_path / "model", config), *ROUNDED)
    try:
        assert any(".weight3" in name for name, _ in actor.chunks[0].named_parameters())
        assert any(".local_experts.3." in name for name in named_parameters(actor.chunks))
        assert_rounded(held(actor))
        with torch.no_grad():
            for parameter in named_parameters(actor.chunks).values():
                parameter += 0.01
        actor.rounded.round()
        assert_rounded(held(actor))
    finally:
        topologies.stop()


def assert_rounded(weights: dict[str, torch.Tensor]) -> None:
    for name in (name for name in weights if ".experts." in name):
        own = weights[name].cpu()
        assert torch.equal(own.double(), e4m3_blocks(own)), name
