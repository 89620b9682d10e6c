"""Experts in blocks of FP8: the file, the weights that transformers reads, the reported error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_stare.__main__ import main
from megatron_stare.config import UserError
from megatron_stare.policy.build import read_hf_config
from megatron_stare.policy.huggingface import block_fp8
from megatron_stare.policy.huggingface.fp8_weights import block_matrices
from megatron_stare.policy.quantization import check_source, load_exported, quantize_blocks
from tests.conftest import SGLANG_PYTHON
from tests.paths import ROOT
from tests.policy.conversion.test_convert_text_part import as_published
from tests.reference import e4m3_blocks
from tests.tiny_models import save_tokenizer, tiny_config, write_checkpoint

SHAPE = {"hidden_size": 160, "vocab_size": 257, "moe_intermediate_size": 136}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ragged blocks, several files, one layer without experts."""
    directory = tmp_path_factory.mktemp("experts") / "source"
    config = tiny_config("qwen3_moe", num_experts=4, num_hidden_layers=3, **SHAPE)
    write_checkpoint(directory, config, max_shard_size="500KB")
    save_tokenizer(directory)
    return directory


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_experts_are_written_in_blocks_and_other_weights_unchanged(
    source: Path, tmp_path: Path
) -> None:
    hf = read_hf_config(str(source))
    experts = block_matrices(hf, experts_only=True)
    quantize_blocks(source, tmp_path, hf, "fp8_experts")
    before, after = tensors_of(source), tensors_of(tmp_path)
    assert len(experts) == 2 * 4 * 3
    assert after.keys() == before.keys() | {f"{name}_scale_inv" for name in experts}
    assert len(list(tmp_path.glob("*.safetensors"))) == len(list(source.glob("*.safetensors"))) > 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys()
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]
    left = set(config["modules_to_not_convert"])
    for name, tensor in before.items():
        assert (name.removesuffix(".weight") in left) == (tensor.dim() == 2 and name not in experts)
        if name not in experts:
            assert torch.equal(after[name], tensor), name
            continue
        assert after[name].dtype == torch.float8_e4m3fn
        decoded = block_fp8.decode(after[name], after[f"{name}_scale_inv"])
        assert torch.equal(decoded.double(), e4m3_blocks(tensor)), name


def test_a_tensor_of_all_experts_becomes_those_of_each(source: Path, tmp_path: Path) -> None:
    hf, fused = read_hf_config(str(source)), tmp_path / "fused"
    shutil.copytree(source, fused, ignore=shutil.ignore_patterns("model*"))
    tensors = as_published(tensors_of(source))
    save_file(tensors, fused / "model.safetensors", metadata={"format": "pt"})
    found = []
    for number, directory in enumerate((source, fused)):
        (target := tmp_path / str(number)).mkdir()
        quantize_blocks(directory, target, hf, "fp8_experts")
        found.append(tensors_of(target))
    assert found[0].keys() == found[1].keys() != tensors.keys()
    assert all(torch.equal(found[1][name], tensor) for name, tensor in found[0].items())


def test_all_linear_layers_are_written_in_blocks(tmp_path: Path) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
    source = write_checkpoint(tmp_path / "source", tiny_config("qwen2_tied", **wide))
    (target := tmp_path / "target").mkdir()
    quantize_blocks(source, target, check_source(source, "fp8_blocks"), "fp8_blocks")
    before, found = tensors_of(source), load_exported(target).state_dict()
    for name, tensor in before.items():
        expected = e4m3_blocks(tensor) if name.endswith("_proj.weight") else tensor.double()
        assert torch.equal(found[name].double(), expected), name


READER = """
import json, sys
from safetensors.torch import load_file, save_file
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant
from sglang.srt.layers.quantization.utils import is_layer_skipped
import torch
from pathlib import Path

directory = Path(sys.argv[1])
said = json.loads((directory / "config.json").read_text())["quantization_config"]
config = Fp8Config.from_config(said)
assert config.is_checkpoint_fp8_serialized and config.weight_block_size == [128, 128]
fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
for layer in (0, 1, 2):
    kinds = ["self_attn.qkv_proj", "self_attn.o_proj"]
    kinds += ["mlp.gate", "mlp.experts"] if layer else ["mlp.gate_up_proj", "mlp.down_proj"]
    for kind in kinds:
        skipped = is_layer_skipped(f"model.layers.{layer}.{kind}", config.ignored_layers, fused)
        assert skipped == (kind != "mlp.experts"), (layer, kind)
tensors = {}
for file in directory.glob("*.safetensors"):
    tensors |= load_file(file)
read = {
    name: block_quant_dequant(tensors[name], scale, [128, 128], torch.float32)
    for name in list(tensors)
    if (scale := tensors.get(f"{name}_scale_inv")) is not None
}
save_file(read, sys.argv[2])
"""


@pytest.mark.sglang
def test_sglangs_own_code_reads_the_weights_that_we_read(source: Path, tmp_path: Path) -> None:
    """Its server computes with FP8 on GPUs and on CPUs with AMX alone; what it reads of the files,
    and which layers it takes for quantised, needs neither.
    """
    hf, target = read_hf_config(str(source)), tmp_path / "target"
    target.mkdir()
    quantize_blocks(source, target, hf, "fp8_experts")
    words = [str(SGLANG_PYTHON), "-c", READER, str(target), str(tmp_path / "read")]
    places = {"PYTHONPATH": str(ROOT / "tools/sglang_cpu/stubs"), "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(words, env=os.environ | places, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, ours = load_file(tmp_path / "read"), tensors_of(target)
    assert theirs.keys() == block_matrices(hf, experts_only=True)
    for name, tensor in theirs.items():
        assert torch.equal(tensor, block_fp8.decode(ours[name], ours[f"{name}_scale_inv"])), name


def test_the_command_measures_the_error(source: Path, tmp_path: Path) -> None:
    file, target = tmp_path / "prompts.jsonl", tmp_path / "target"
    rows = [
        {"prompt": f"What is {a} + {b}?", "label": str(a + b)} for a in range(4) for b in (1, 2)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["quantize", str(source), str(target), "--calibration", str(file)]
    assert main([*words, "--format", "fp8_experts"]) == 0
    record = json.loads((target / "quantization.json").read_text())
    assert record["format"] == "fp8_experts" and record["modelopt"] == ""
    assert 0 < record["error"]["kl_mean"] < 1 and record["error"]["top1_agreement"] > 0.5
    assert (target / "tokenizer_config.json").is_file()


def test_formats_that_do_not_suit_a_model_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"fp8: .* is a qwen3_moe, with experts; use fp8_blocks or fp8_experts"
    ):
        check_source(source, "fp8")
    dense = write_checkpoint(tmp_path, tiny_config("qwen3"))
    with pytest.raises(
        UserError, match=r"fp8_experts: .* is a qwen3, without experts; use fp8_blocks or fp8"
    ):
        check_source(dense, "fp8_experts")
    ragged = r"fp8_blocks has blocks .* hold \[48, 32\] of model.*q_proj.weight \[48, 32\] on each"
    with pytest.raises(UserError, match=ragged):
        check_source(dense, "fp8_blocks")
