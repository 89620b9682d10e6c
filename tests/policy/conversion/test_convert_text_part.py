"""Vision-language models: their text part is trained, the other parts come back byte by byte."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
)

from megatron_stare.__main__ import main
from megatron_stare.config import PolicyConfig, UserError
from megatron_stare.policy import build
from megatron_stare.policy.conversion import convert
from megatron_stare.policy.huggingface.families import megatron_fields
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.topology import Topology
from megatron_stare.rollout.embedded import EmbeddedEngine
from megatron_stare.rollout.engine import stop_ids
from tests.policy.conversion.conftest import make, refused
from tests.policy.conversion.test_convert import assert_same_files
from tests.policy.huggingface.test_checkpoint_fp8 import SAID, decoded, edit, encode
from tests.tiny_models import byte_tokenizer, tiny_config

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}


CLASSES = {"qwen3_5": Qwen3_5Config, "qwen3_5_moe": Qwen3_5MoeConfig}


def vision_language(
    directory: Path, kind: str = "qwen3_5", dtype: torch.dtype = torch.bfloat16, **text: object
) -> Path:
    """A checkpoint with a text part, a vision part and one that predicts further tokens."""
    part = tiny_config(f"{kind}_text", vocab_size=257, **text).to_dict()
    part["full_attention_interval"] = 4  # what SGLang reads in place of layer_types
    config = CLASSES[kind](text_config=part, vision_config=VISION)
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    further = {"mtp.fc.weight": torch.randn(4, 8).bfloat16()}
    save_file(as_published(load_file(file)) | further, file, metadata={"format": "pt"})
    byte_tokenizer().save_pretrained(directory)
    return directory


def as_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with all experts of a layer in two of them, as the model has them in memory."""
    found: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    by_number = sorted(tensors, key=lambda name: [int(each) for each in re.findall(r"\d+", name)])
    for name in by_number:
        before, marker, after = name.partition(".experts.")
        if marker:
            matrix = after.split(".")[1]
            experts.setdefault(f"{before}{marker}{matrix}", []).append(tensors[name])
        else:
            found[name] = tensors[name]
    stacked = {name: torch.stack(each) for name, each in experts.items()}
    for name, down in stacked.items():
        if name.endswith("down_proj"):
            gate, up = (stacked[name.replace("down", each)] for each in ("gate", "up"))
            found |= {name: down, name.replace("down", "gate_up"): torch.cat([gate, up], 1)}
    return found


@pytest.fixture(scope="module", params=CLASSES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_language(tmp_path_factory.mktemp("vision_language") / "model", request.param)


def test_a_round_trip_gives_every_file_back(source: Path, tmp_path: Path) -> None:
    """Both ways with --verify, which compares tensors and logits."""
    stored = load_file(source / "model.safetensors")
    assert {name.split(".")[1] for name in stored if name.startswith("model.")} == {
        "language_model",
        "visual",
    }
    experts = {name.rpartition(".")[2] for name in stored if ".experts." in name}
    kind = json.loads((source / "config.json").read_text())["model_type"]
    assert experts == ({"gate_up_proj", "down_proj"} if kind == "qwen3_5_moe" else set())
    megatron, back = tmp_path / "megatron", tmp_path / "hf"
    assert main(["convert", "hf-to-megatron", str(source), str(megatron), "--verify"]) == 0
    command = ["convert", "megatron-to-hf", str(megatron), str(back), "--base", str(source)]
    assert main([*command, "--verify"]) == 0
    assert_same_files(source, back)


def test_a_conversion_back_asks_for_the_other_parts(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "hf-to-megatron", str(source), str(tmp_path / "megatron")]) == 0
    command = ["convert", "megatron-to-hf", str(tmp_path / "megatron"), str(tmp_path / "hf")]
    refused(capsys, command, "only the text part of a qwen3_5", " model; ", "--base")
    assert not (tmp_path / "hf").exists()


def test_work_with_another_base_is_not_continued(
    source: Path, alone: Topology, tmp_path: Path
) -> None:
    other, megatron = tmp_path / "other", tmp_path / "megatron"
    shutil.copytree(source, other)
    tensors = load_file(source / "model.safetensors")
    changed = {n: t if n.startswith("model.language_model") else t + 1 for n, t in tensors.items()}
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    convert.hf_to_megatron(source, megatron, alone)

    def stopped(count: int) -> None:
        raise KeyboardInterrupt  # after the first file

    with pytest.raises(KeyboardInterrupt):
        convert.megatron_to_hf(
            megatron, tmp_path / "hf", alone, progress=lambda total: stopped, base=other
        )
    convert.megatron_to_hf(megatron, tmp_path / "hf", alone, base=source)
    assert_same_files(source, tmp_path / "hf")


def test_other_parts_in_fp8_come_back_in_bf16(tmp_path: Path) -> None:
    """Qwen's FP8 directories have the layers for further tokens in blocks too."""
    source = vision_language(tmp_path / "source")
    expected, stored = load_file(source / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in expected.items():
        stored[name] = tensor
        if name.startswith("mtp.") or name.endswith(("gate_proj.weight", "k_proj.weight")):
            stored[name], stored[f"{name}_scale_inv"] = encode(tensor.float())
            expected[name] = decoded(stored[name], stored[f"{name}_scale_inv"])
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    edit(source, quantization_config=SAID)
    megatron, back = tmp_path / "megatron", tmp_path / "hf"
    assert main(["convert", "hf-to-megatron", str(source), str(megatron), "--verify"]) == 0
    command = ["convert", "megatron-to-hf", str(megatron), str(back), "--base", str(source)]
    assert main(command) == 0
    found = load_file(back / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


def test_an_export_of_the_trained_model_is_whole(
    source: Path, alone: Topology, tmp_path: Path
) -> None:
    """Its text part is the trainer's, and transformers' vision-language model reads all of it."""
    model = PolicyModel(str(source), PolicyConfig(dtype="bf16"), alone, 1.0)
    with torch.no_grad():
        for parameter in model.chunks[0].parameters():
            parameter.mul_(1.5)
    convert.export_hf(model, source, tmp_path / "export")
    before, after = (load_file(d / "model.safetensors") for d in (source, tmp_path / "export"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        trained = name.startswith("model.language_model.") or name == "lm_head.weight"
        assert torch.equal(after[name], (tensor * 1.5) if trained else tensor), name
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "export", dtype=torch.bfloat16)
    assert torch.equal(whole.lm_head.weight, after["lm_head.weight"])


def test_the_text_part_is_that_of_transformers(source: Path, tmp_path: Path) -> None:
    hf = build.read_hf_config(str(source))
    assert hf.model_type.startswith("qwen3_5_") and not hf.tie_word_embeddings
    theirs = AutoModelForCausalLM.from_pretrained(source)
    assert megatron_fields(theirs.config) == megatron_fields(hf)
    assert stop_ids(str(source), byte_tokenizer()) == {0}
    tied = vision_language(tmp_path / "tied", tie_word_embeddings=True)
    content = json.loads((tied / "config.json").read_text())
    content["text_config"].pop("tie_word_embeddings")
    (tied / "config.json").write_text(json.dumps(content | {"tie_word_embeddings": True}))
    assert build.read_hf_config(str(tied)).tie_word_embeddings
    engine = EmbeddedEngine(str(tied), byte_tokenizer(), 1, torch.float32, torch.device("cpu"))
    assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight
    engine.close()


def test_a_text_part_alone_needs_no_other(
    sources: dict[str, Path], alone: Topology, tmp_path: Path
) -> None:
    """A text model's own directory that names another kind of model is still refused."""
    content = json.loads((sources["qwen3"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"model_type": "qwen3_vl"}))
    with pytest.raises(UserError, match="model_type"):
        build.read_hf_config(str(tmp_path))


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_experts_of_any_family_may_be_in_two_tensors(
    family: str, alone: Topology, tmp_path: Path
) -> None:
    """The model is the same as from one tensor for each, and files come back in their own form."""
    single, fused = make(tmp_path / "single", family, max_shard_size="1GB"), tmp_path / "fused"
    shutil.copytree(single, fused)
    tensors = load_file(single / "model.safetensors")
    save_file(as_published(tensors), fused / "model.safetensors", metadata={"format": "pt"})
    one, other = (PolicyModel(str(each), PolicyConfig(), alone, 1.0) for each in (single, fused))
    assert one.fingerprint() == other.fingerprint()
    convert.export_hf(other, fused, tmp_path / "export")
    before, after = (load_file(d / "model.safetensors") for d in (fused, tmp_path / "export"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    for command in (
        ["hf-to-megatron", str(fused), str(tmp_path / "megatron")],
        ["megatron-to-hf", str(tmp_path / "megatron"), str(tmp_path / "back")],
    ):
        assert main(["convert", *command, "--verify"]) == 0
    assert_same_files(fused, tmp_path / "back")
