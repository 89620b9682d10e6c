"""Conversion on a machine with a GPU: TransformerEngine's checkpoints and our layers' are one kind,
and the device's memory is left alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig, Qwen2Config

from megatron_stare.config import PolicyConfig
from megatron_stare.policy import build, model_state
from megatron_stare.policy.checkpoints.checkpoints import Save
from megatron_stare.policy.conversion import convert, megatron_files
from megatron_stare.policy.huggingface import weights as hf_weights
from megatron_stare.policy.topology import Topology
from tests.policy.conversion.conftest import FAMILIES, make
from tests.policy.conversion.test_convert import assert_same_files

pytestmark = pytest.mark.nullcuda
SIZES = {"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 27648}
HEADS = {"num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064}


def with_te() -> None:
    if not build._has_transformer_engine():
        pytest.skip("no TransformerEngine here: run tools/nullcuda/build")


def is_linear(name: str) -> bool:
    """Whether the child ``name`` of an attention or of a gated delta net is a linear layer."""
    return name.startswith("linear_") or name.endswith("_proj")


def saved(hf: PretrainedConfig, chunks: list, target: Path, topology: Topology) -> Path:
    target.mkdir()
    hf.save_pretrained(target)
    Save(model_state.sharded_weights(chunks, topology), target, topology, False).finish()
    return target


def test_the_description_of_parameters_takes_no_memory(topology: Topology) -> None:
    """The models have 32B parameters, or experts."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    found = megatron_files.places(Qwen2Config(**SIZES, **HEADS), topology)
    assert len(found.slots) == 64 * 7 + 3
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_transformer_engines_layers_goes_both_ways(
    family: str, topology: Topology, tmp_path: Path
) -> None:
    """HF -> their layers -> checkpoint -> HF gives the tensors' bytes back; a converted checkpoint,
    which has no scales of fp8, fills their layers.
    """
    with_te()
    source = make(tmp_path / "source", family, max_shard_size="1GB")
    hf, policy = build.read_hf_config(str(source)), PolicyConfig()
    chunks = build.build_model(hf, policy, topology)
    attention = chunks[0].decoder.layers[0].self_attention.named_children()
    linear = [type(part).__name__ for name, part in attention if is_linear(name)]
    assert linear
    assert all(name.startswith("TE") for name in linear)
    hf_weights.load_hf(chunks, str(source), hf, topology)
    stored = saved(hf, chunks, tmp_path / "stored", topology)
    convert.megatron_to_hf(stored, tmp_path / "back", topology)
    name = "model.safetensors"
    assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()

    convert.hf_to_megatron(source, tmp_path / "converted", topology)
    filled = build.build_model(hf, policy, topology)
    for parameter in filled[0].parameters():
        parameter.data.zero_()
    model_state.into_model(filled, tmp_path / "converted", topology)
    for one, other in zip(chunks[0].parameters(), filled[0].parameters(), strict=True):
        assert torch.equal(one.cpu(), other.cpu())
    convert.megatron_to_hf(tmp_path / "converted", tmp_path / "hf", topology)
    assert_same_files(source, tmp_path / "hf")
