"""fp8 on a GPU: sequences of odd lengths, under every kind of scales."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stare.config import Config, LossConfig, UserError, override
from megatron_stare.losses import find_objective
from megatron_stare.policy import build
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.topology import Topology
from tests.policy.test_actor_sequences import rounds_of_groups
from tests.tiny_models import tiny_config, write_checkpoint

pytestmark = pytest.mark.nullcuda
# Blocks that share a scale are 128 wide.
WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8}
WIDE |= {"num_key_value_heads": 8}


def config_of(directory: Path, *options: str) -> Config:
    settings = (f"policy.hf_checkpoint={directory}", "policy.dtype=bf16", "policy.fp8=hybrid")
    return override(Config(), [*settings, "policy.max_tokens_per_gpu=256", *options])


@pytest.mark.parametrize("packed", ["true", "false"])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_sequences_of_any_length_are_trained_on(
    recipe: str, packed: str, tmp_path: Path, topology: Topology
) -> None:
    if not build._has_transformer_engine():
        pytest.skip("no TransformerEngine here: run tools/nullcuda/build")
    model = write_checkpoint(tmp_path / "model", tiny_config("qwen2", **WIDE))
    config = config_of(
        model, f"policy.tuning.fp8_recipe={recipe}", f"policy.packed_sequences={packed}"
    )
    actor = Actor(config, topology, 10)
    groups = rounds_of_groups()
    lengths = {
        group.prompt_length + rollout.length - 1 for group in groups for rollout in group.rollouts
    }
    assert any(length % 8 for length in lengths)
    batch = actor.score(actor.pack(groups, 0))
    assert batch.surprisal_T is not None and len(batch.surprisal_T) == len(batch.token_index_T)
    objective, loss = find_objective("grpo"), LossConfig(name="grpo")
    signals = objective.plan(batch, loss, topology.across, {})
    metrics, seen = actor.update(batch, objective.bind(loss), signals)
    # The device has no values of fp8: what no kernel wrote may be no number.
    assert set(metrics) in (set(), {"loss", "grad_norm", "lr"})
    assert seen.surprisal_T is not None and len(seen.surprisal_T) == len(batch.token_index_T)


def test_widths_that_fp8_cannot_multiply_are_named(tmp_path: Path, topology: Topology) -> None:
    if not build._has_transformer_engine():
        pytest.skip("no TransformerEngine here: run tools/nullcuda/build")
    model = write_checkpoint(tmp_path / "model", tiny_config("qwen2"))  # 44 wide inside
    with pytest.raises(UserError, match="intermediate_size is 44 on a rank"):
        Actor(config_of(model), topology, 10)
