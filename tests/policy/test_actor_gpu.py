"""fp8 on a GPU: whole runs of sequences of odd lengths, under every kind of scales, saved and
resumed. The null device rounds to fp8 as a GPU does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.config import UserError, override
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import build
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.topology import Topology
from tests.small_run import rows_of, small_config
from tests.tiny_models import byte_tokenizer, tiny_config, write_checkpoint

pytestmark = pytest.mark.nullcuda
# Blocks that share a scale are 128 wide.
WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8}
WIDE |= {"num_key_value_heads": 8, "vocab_size": 257, "max_position_embeddings": 64}
FP8 = ("policy.dtype=bf16", "policy.fp8=hybrid")
PACKED = {"delayed": "true", "tensorwise": "false", "blockwise": "true"}
EXACT = ("loss", "grad_norm", "surprisal", "entropy", "weight_mean", "weight_w", "reward")
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Rows]:
    """Metrics of a run up to a step, by its name and overrides."""
    if not build._has_transformer_engine():
        pytest.skip("no TransformerEngine here: run tools/nullcuda/build")
    place = tmp_path_factory.mktemp("fp8")
    write_checkpoint(place / "wide", tiny_config("qwen2", eos_token_id=0, **WIDE))
    byte_tokenizer().save_pretrained(place / "wide")

    def run(name: str, steps: int, *options: str) -> Rows:
        where = (f"policy.hf_checkpoint={place / 'wide'}", f"run.dir={place / name}")
        config = small_config(place, *where, *options, f"train.num_rollout={steps}")
        with topologies.session(config.policy) as topology:
            assert Trainer(config, topology).run(Interrupt())
        gc.collect()
        return rows_of(config)

    return run


@pytest.fixture(scope="module")
def in_bf16(train: Callable[..., Rows]) -> dict[str, Any]:
    (row,) = train("bf16", 1, "policy.dtype=bf16", "policy.packed_sequences=true")
    return row


@pytest.mark.parametrize("recipe", PACKED)
def test_a_run_in_fp8_resumes_exactly(
    recipe: str, train: Callable[..., Rows], in_bf16: dict[str, Any]
) -> None:
    """Three steps at once are two, saved, and a third: the scales of steps before too. The first,
    whose rollouts are those of bf16, has its numbers up to what fp8 rounds off.
    """
    options = (
        *FP8,
        f"policy.tuning.fp8_recipe={recipe}",
        f"policy.packed_sequences={PACKED[recipe]}",
        "policy.max_tokens_per_gpu=256",  # blockwise takes 128 rows at a time
    )
    once = train(recipe, 3, *options)
    assert all(row["grad_norm"] > 0 and row["skipped"] == 0 for row in once)
    for steps in (2, 3):
        twice = train(f"{recipe} saved", steps, *options, "run.save_interval=2")
    for one, other in zip(once, twice, strict=True):
        assert {key: one[key] for key in EXACT} == pytest.approx({key: other[key] for key in EXACT})
    assert once[0]["reward"] == in_bf16["reward"]
    # Which tokens are chosen is decided by ranks, and the gradient is of those.
    for key, most in (("surprisal", 0.1), ("entropy", 0.1), ("grad_norm", 0.25)):
        assert once[0][key] == pytest.approx(in_bf16[key], rel=most), key
        assert once[0][key] != pytest.approx(in_bf16[key], rel=1e-5), key


def test_shared_prompts_in_transformer_engines_layers(train: Callable[..., Rows]) -> None:
    """A step in fp32 has the numbers of whole sequences, and so has the entropy after its update,
    which step 2 measures on the tokens of step 1. The tokens of step 2 may differ: its weights
    differ in last bits, and one sampled token is enough.
    """
    options = ("policy.packed_sequences=true", "policy.max_tokens_per_gpu=256")
    whole = train("whole", 2, *options)
    shared = train("shared", 2, *options, "policy.shared_prompts=true")
    compared = [(0, key) for key in EXACT] + [(1, "entropy_change/previous_realised")]
    for step, key in compared:
        assert shared[step][key] == pytest.approx(whole[step][key], rel=1e-4), key


def test_widths_that_fp8_cannot_multiply_are_named(tmp_path: Path, topology: Topology) -> None:
    if not build._has_transformer_engine():
        pytest.skip("no TransformerEngine here: run tools/nullcuda/build")
    model = write_checkpoint(tmp_path / "model", tiny_config("qwen2"))  # 44 wide inside
    config = override(small_config(tmp_path), [f"policy.hf_checkpoint={model}", *FP8])
    with pytest.raises(UserError, match="intermediate_size is 44 on a rank"):
        Actor(config, topology, 10)
