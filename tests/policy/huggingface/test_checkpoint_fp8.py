"""Checkpoints in DeepSeek's own FP8 format as a start of training and of conversion: matrices in
blocks of 128 x 128 with a scale of any size each, read by slices.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_stare.config import PolicyConfig, UserError
from megatron_stare.policy import topology
from megatron_stare.policy.conversion import convert, verification
from megatron_stare.policy.huggingface.checkpoint import Checkpoint
from megatron_stare.policy.model import PolicyModel
from tests.distributed import run_distributed
from tests.tiny_models import tiny_config, write_checkpoint

# Blocks end inside matrices, and what a rank of two holds of them ends inside blocks.
WIDE = {"hidden_size": 144, "intermediate_size": 264, "moe_intermediate_size": 136}
SAID = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.")
LAYOUTS = {
    "TP2 SP": PolicyConfig(tensor_model_parallel_size=2, sequence_parallel=True, dtype="bf16"),
    "PP2": PolicyConfig(pipeline_model_parallel_size=2, dtype="bf16"),
    "EP2": PolicyConfig(expert_model_parallel_size=2, dtype="bf16"),
}


def blocks(shape: torch.Size) -> list[tuple[int, int, slice, slice]]:
    return [
        (row // 128, column // 128, slice(row, row + 128), slice(column, column + 128))
        for row in range(0, shape[0], 128)
        for column in range(0, shape[1], 128)
    ]


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The checkpoint has the scales of DeepSeek's script, max |W_b| / 448, which are not powers of
    two.
    """
    scale = torch.empty([-(-size // 128) for size in weight.shape])
    code = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row, column, down, right in blocks(weight.shape):
        scale[row, column] = weight[down, right].abs().max() / 448
        code[down, right] = (weight[down, right] / scale[row, column]).to(code.dtype)
    return code, scale


def decoded(code: Tensor, scale: Tensor) -> Tensor:
    found = torch.empty(code.shape, dtype=torch.bfloat16)
    for row, column, down, right in blocks(code.shape):
        found[down, right] = (code[down, right].float() * scale[row, column]).bfloat16()
    return found


def write(directory: Path, family: str, **changes: Any) -> dict[str, Tensor]:
    """An FP8 checkpoint; returns what its weights mean, in bf16 (the router's bias in fp32)."""
    write_checkpoint(directory, tiny_config(family, **WIDE | changes), seed=4)
    means, stored = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.dim() < 2 or any(word in name for word in PLAIN):
            kept = tensor if name.endswith("correction_bias") else tensor.bfloat16()
            means[name] = stored[name] = kept
            continue
        code, scale = encode(tensor)
        stored |= {name: code, f"{name}_scale_inv": scale}
        means[name] = decoded(code, scale)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    edit(directory, quantization_config=SAID | {"activation_scheme": "dynamic"}, dtype="bfloat16")
    return means


def edit(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def assert_same(found: dict[str, Tensor], means: dict[str, Tensor]) -> None:
    assert found.keys() == means.keys()
    for name, tensor in means.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


FAMILIES = ("deepseek_v3", "qwen3_moe", "qwen3")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    base = tmp_path_factory.mktemp("fp8")
    return {family: (base / family, write(base / family, family)) for family in FAMILIES}


@pytest.fixture
def alone() -> Any:
    yield topology.start(PolicyConfig())
    topology.stop()


def weights_under_each_layout(
    rank: int, world_size: int, directories: dict[str, Path]
) -> dict[tuple[str, str], dict[str, Tensor]]:
    found = {}
    for layout, policy in LAYOUTS.items():
        place = topology.start(policy)
        for family, directory in directories.items():
            if layout != "EP2" or "num_experts" in (directory / "config.json").read_text():
                model = PolicyModel(str(directory), policy, place, 1.0)
                found[layout, family] = {n: each.clone() for n, each in model.weights()}
    return found


def test_ranks_load_decoded_weights(
    sources: dict[str, tuple[Path, dict[str, Tensor]]],
) -> None:
    directories = {family: directory for family, (directory, _) in sources.items()}
    ranks = run_distributed(weights_under_each_layout, 2, directories)
    assert len(ranks[0]) == 8
    for found in ranks:
        for (_, family), weights in found.items():
            assert_same(weights, sources[family][1])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_fp8_checkpoint_converts_to_megatron_and_back_to_bf16(
    family: str,
    sources: dict[str, tuple[Path, dict[str, Tensor]]],
    alone: Any,
    tmp_path: Path,
) -> None:
    source, means = sources[family]
    totals, done = list[int](), list[int]()

    def progress(total: int) -> Callable[[int], None]:
        totals.append(total)
        return done.append

    assert convert.hf_to_megatron(source, tmp_path / "megatron", alone, progress=progress) == (
        sum(done)
    )
    assert totals == [sum(done)]
    assert verification.compare_tensors(source, tmp_path / "megatron", alone, True)[1] == []
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", alone)
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), means)
    for directory in ("megatron", "hf"):
        said = json.loads((tmp_path / directory / "config.json").read_text())
        assert "quantization_config" not in said and said["dtype"] == "bfloat16"
    prompts = [[1, 2, 3, 4, 70]]
    logits = verification.compare_logits(source, tmp_path / "megatron", alone, prompts)
    assert logits.close and logits.scale > 0.1


def test_whole_blocks_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """In fp32, where ours round to bf16. It takes ragged blocks for others."""
    source = tmp_path / "model"
    means = write(source, "qwen3", hidden_size=256, intermediate_size=256, head_dim=128)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    checkpoint = Checkpoint(str(source))
    for name, tensor in means.items():
        assert torch.equal(checkpoint.read(name, tuple(tensor.shape)), tensor)
        assert torch.equal(theirs[name].bfloat16(), tensor), name


def test_an_export_of_training_says_nothing_of_fp8(
    sources: dict[str, tuple[Path, dict[str, Tensor]]], alone: Any, tmp_path: Path
) -> None:
    source, means = sources["deepseek_v3"]
    model = PolicyModel(str(source), PolicyConfig(dtype="bf16"), alone, 1.0)
    convert.export_hf(model, source, tmp_path / "export")
    assert_same(load_file(tmp_path / "export" / "model.safetensors"), means)
    assert "quantization_config" not in json.loads((tmp_path / "export/config.json").read_text())


SPANS = [
    (slice(None),),
    (slice(0, 72),),
    (slice(72, 144),),
    (slice(None), slice(130, 264)),
    (slice(100, 101), slice(127, 129)),
]


@pytest.mark.parametrize("span", SPANS)
def test_a_slice_equals_that_of_the_whole_tensor(
    span: tuple[slice, ...], sources: dict[str, tuple[Path, dict[str, Tensor]]]
) -> None:
    source, means = sources["qwen3"]
    name = "model.layers.0.mlp.down_proj.weight"
    stored = Checkpoint(str(source)).stored(name, (144, 264))
    index = span if len(span) > 1 else span[0]
    assert torch.equal(stored[index], means[name][index])


NAME = "model.layers.1.self_attn.o_proj.weight"


def without_scale(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{NAME}_scale_inv"]


def short_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}_scale_inv"] = tensors[f"{NAME}_scale_inv"][:1].clone()


def stray_scale(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight_scale_inv"] = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (without_scale, f"{NAME}_scale_inv is missing"),
        (short_scale, f"{NAME}_scale_inv has shape"),
        (stray_scale, "model.norm.weight_scale_inv has no place"),
        ({"quant_method": "compressed-tensors"}, "quant_method='compressed-tensors'"),
        ({"weight_block_size": [1, 128]}, r"weight_block_size=\[1, 128\]"),
        ({"weight_block_size": None}, "weight_block_size=None"),
    ],
)
def test_other_formats_are_refused(
    damage: Any,
    named: str,
    sources: dict[str, tuple[Path, dict[str, Tensor]]],
    alone: Any,
    tmp_path: Path,
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(sources["qwen3"][0], directory)
    if callable(damage):
        tensors = load_file(directory / "model.safetensors")
        damage(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        edit(directory, quantization_config=SAID | damage)
    with pytest.raises(UserError, match=named):
        PolicyModel(str(directory), PolicyConfig(), alone, 1.0)
