"""adapters.merge=false in the embedded engine: log-probs are those of the trainer's adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_stare.config import Config, override
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.adapters import adapters_of
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.logbook import read_metrics
from megatron_stare.rollout.embedded import EmbeddedEngine
from tests.distributed import run_distributed
from tests.policy.test_optimizer_state import actor_of
from tests.small_run import small_config
from tests.tiny_models import byte_tokenizer, tiny_config, write_checkpoint

APART = ("adapters.rank=4", "adapters.alpha=8", "adapters.merge=false")
TOLERANCE = 1e-4


def logits_of(engine: EmbeddedEngine) -> torch.Tensor:
    with torch.no_grad():
        return engine.model(torch.arange(1, 12)[None]).logits[0]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_the_engines_model_is_that_with_merged_weights(
    family: str, tmp_path: Path, topology: Topology
) -> None:
    """In fp32: the base, then two versions of the adapters of five of the seven targets."""
    start = write_checkpoint(tmp_path / "model", tiny_config(family))
    byte_tokenizer().save_pretrained(start)
    config = override(Config(), [*APART, "adapters.targets=q,v,o,up,down"])
    model = PolicyModel(str(start), config.policy, topology, 1.0, config.adapters, seed=1)
    kinds = (str(start), byte_tokenizer(), 4, torch.float32, torch.device("cpu"))
    apart, merged = EmbeddedEngine(*kinds, adapter_scale=2.0), EmbeddedEngine(*kinds)
    base = None
    for version in range(3):
        apart.load_weights(model.served_weights(), version)
        merged.load_weights(model.weights(), version)
        torch.testing.assert_close(logits_of(apart), logits_of(merged), atol=TOLERANCE, rtol=0)
        if base is not None:
            assert (logits_of(apart) - base).abs().max() > 100 * TOLERANCE
        base = logits_of(apart)
        dice = torch.Generator().manual_seed(version)
        for adapter in adapters_of(model.chunks):
            for second in adapter.lora_B.values():
                second.data.copy_(torch.randn(second.shape, generator=dice))


def streamed(rank: int, world_size: int, folder: str, layout: str) -> dict[str, torch.Tensor]:
    """The tensors that an engine receives under a layout."""
    options = (*APART, f"policy.{layout}_model_parallel_size=2")
    actor = actor_of(Path(folder) / "model", "fp32", options)
    return {name: tensor.clone() for name, tensor in actor.served_weights()}


def test_every_rank_gets_base_and_adapters(tmp_path: Path, topology: Topology) -> None:
    start = write_checkpoint(tmp_path / "model", tiny_config("qwen2", num_hidden_layers=4))
    byte_tokenizer().save_pretrained(start)
    kinds = (str(start), byte_tokenizer(), 4, torch.float32, torch.device("cpu"))
    config = override(Config(), APART)
    alone = PolicyModel(str(start), config.policy, topology, 1.0, config.adapters)
    expected = dict(alone.served_weights())
    for layout in ("tensor", "pipeline"):
        for stream in run_distributed(streamed, 2, str(tmp_path), layout):
            engine = EmbeddedEngine(*kinds, adapter_scale=2.0)
            engine.load_weights(stream.items(), 0)
            assert len(dict(engine.adapters.places())) == 4 * 7 * 2
            assert stream.keys() == expected.keys()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in stream.items())


def test_a_version_without_its_adapters_is_refused(tmp_path: Path, topology: Topology) -> None:
    """Else the engine would apply those of the version before."""
    start = write_checkpoint(tmp_path / "model", tiny_config("qwen2"))
    byte_tokenizer().save_pretrained(start)
    config = override(Config(), APART)
    model = PolicyModel(str(start), config.policy, topology, 1.0, config.adapters)
    engine = EmbeddedEngine(
        str(start), byte_tokenizer(), 4, torch.float32, torch.device("cpu"), adapter_scale=2.0
    )
    engine.load_weights(model.served_weights(), 0)
    with pytest.raises(RuntimeError, match="never sent base_model"):
        engine.load_weights(model.weights(), 1)


def test_a_run_samples_from_the_weights_that_it_trains(tmp_path: Path, topology: Topology) -> None:
    options = (*APART, "optimizer.lr=1e-2")
    config = small_config(tmp_path, *options, f"run.dir={tmp_path / 'apart'}")
    assert Trainer(config, topology).run(Interrupt())
    rows = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    assert all(row["logprob_diff_max"] < TOLERANCE for row in rows if "logprob_diff_max" in row)
    assert any("logprob_diff_max" in row for row in rows)
    assert not [key for row in rows for key in row if key.startswith("adapters/")]
