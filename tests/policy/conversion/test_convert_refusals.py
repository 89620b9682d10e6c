"""Malformed and damaged sources are refused in one line."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_stare.__main__ import main
from megatron_stare.policy.conversion import convert
from tests.policy.conversion.conftest import make, refused
from tests.tiny_models import tiny_config, write_checkpoint


def edit_config(source: Path, **fields) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(source: Path, change) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def split(source: Path) -> None:
    """Rewritten in two files with an index, of which the second is then lost."""
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    files = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, source / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "model.safetensors").unlink()
    (source / "b.safetensors").unlink()


EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


INVERSE = "model.layers.0.self_attn.rotary_emb.inv_freq"


MALFORMED = {
    "no config.json": (lambda s: (s / "config.json").unlink(), "SOURCE="),
    "config.json is not JSON": (lambda s: (s / "config.json").write_text("{"), "config.json"),
    "a foreign architecture": (lambda s: edit_config(s, model_type="bloom"), "model_type"),
    "no weights": (lambda s: (s / "model.safetensors").unlink(), "safetensors"),
    "a missing shard": (split, "b.safetensors"),
    "a truncated file": (lambda s: truncate(s / "model.safetensors"), "model.safetensors"),
    "a file of noise": (
        lambda s: (s / "model.safetensors").write_bytes(os.urandom(4096)),
        "model.safetensors",
    ),
    "an integer dtype": (
        lambda s: edit_weights(s, lambda t: t.update({EMBEDDING: t[EMBEDDING].to(torch.int8)})),
        "I8",
    ),
    "another vocabulary": (
        lambda s: edit_config(s, vocab_size=300),
        "vocab_size=300 but the weights have 257",
    ),
    "more layers": (
        lambda s: edit_config(s, num_hidden_layers=3, layer_types=None),
        "num_hidden_layers=3 but the weights have 2",
    ),
    "fewer layers": (
        lambda s: edit_config(s, num_hidden_layers=1, layer_types=None),
        "num_hidden_layers=1 but the weights have 2",
    ),
    "fewer key-value heads": (
        lambda s: edit_config(s, num_key_value_heads=1),
        "num_key_value_heads=1 but the weights have 2",
    ),
    "tied in config only": (
        lambda s: edit_config(s, tie_word_embeddings=True),
        "tie_word_embeddings=True",
    ),
    "untied in config only": (
        lambda s: edit_weights(s, lambda t: t.pop(OUTPUT)),
        "tie_word_embeddings=False",
    ),
    "another rope": (
        lambda s: edit_weights(s, lambda t: t.update({INVERSE: 5e5 ** -(torch.arange(4) / 4)})),
        "rope_theta=10000 but the weights' " + INVERSE + " was made with 5e+05",
    ),
    "a tensor without a place": (
        lambda s: edit_weights(s, lambda t: t.update(other=torch.ones(2))),
        "other",
    ),
    "a tensor missing": (
        lambda s: edit_weights(s, lambda t: t.pop("model.norm.weight")),
        "model.norm.weight",
    ),
    "a quantised checkpoint": (
        lambda s: edit_weights(
            s, lambda t: t.update({EMBEDDING: t[EMBEDDING].to(torch.float8_e4m3fn)})
        ),
        "F8_E4M3",
    ),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_source_is_refused(fault, tmp_path, capsys):
    source = make(tmp_path / "source", "qwen2", max_shard_size="1GB")
    damage, word = MALFORMED[fault]
    damage(source)
    refused(capsys, ["convert", "hf-to-megatron", str(source), str(tmp_path / "target")], word)
    assert not (tmp_path / "target").exists()


def test_an_existing_target_is_not_touched(sources, tmp_path, capsys):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "precious").write_text("mine")
    refused(
        capsys,
        ["convert", "hf-to-megatron", str(sources["llama"]), str(tmp_path / "target")],
        "exists already",
    )
    assert (tmp_path / "target" / "precious").read_text() == "mine"


def test_an_unwritable_target_is_refused(sources, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    refused(
        capsys,
        ["convert", "hf-to-megatron", str(sources["llama"]), str(tmp_path / "file" / "target")],
        "file",
    )


def test_a_base_that_is_not_needed_is_refused(sources, alone, tmp_path, capsys):
    convert.hf_to_megatron(sources["llama"], tmp_path / "megatron", alone)
    command = ["convert", "megatron-to-hf", f"{tmp_path}/megatron", f"{tmp_path}/hf"]
    refused(capsys, [*command, "--base", f"{tmp_path}/base"], "--base", "holds whole weights")


@pytest.mark.parametrize("source", ["", "missing"])
def test_a_source_without_a_checkpoint_is_refused(source, tmp_path, capsys):
    refused(
        capsys,
        ["convert", "megatron-to-hf", str(tmp_path / source), str(tmp_path / "target")],
        "SOURCE",
    )


def test_a_checkpoint_that_was_removed_is_refused_with_those_that_are_there(tmp_path, capsys):
    (tmp_path / "checkpoints/step_00000004").mkdir(parents=True)
    source = str(tmp_path / "checkpoints/step_00000002")
    command = ["convert", "megatron-to-hf", source, str(tmp_path / "target")]
    refused(capsys, command, "there are step_00000004")


DAMAGES = {
    "a bit flip": lambda d: flip(d / "__0_0.distcp"),
    "a truncated part": lambda d: truncate(d / "__0_0.distcp"),
    "a missing part": lambda d: (d / "__0_0.distcp").unlink(),
    "a manifest of noise": lambda d: (d / "integrity.json").write_bytes(b"{{"),
}


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("fault", DAMAGES)
def test_a_damaged_megatron_checkpoint_is_refused(fault, sources, alone, tmp_path, capsys):
    convert.hf_to_megatron(sources["qwen3_tied"], tmp_path / "megatron", alone)
    DAMAGES[fault](tmp_path / "megatron")
    word = "integrity.json" if "manifest" in fault else "__0_0.distcp"
    refused(
        capsys,
        ["convert", "megatron-to-hf", str(tmp_path / "megatron"), str(tmp_path / "hf")],
        word,
        "damaged",
    )
    assert not (tmp_path / "hf").exists()


class Opened:
    """Unpickled, it makes a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return open, (str(self.target), "w")


def test_a_megatron_checkpoint_runs_no_code(sources, alone, tmp_path, capsys):
    convert.hf_to_megatron(sources["qwen3_tied"], tmp_path / "megatron", alone)
    metadata = tmp_path / "megatron" / ".metadata"
    metadata.write_bytes(pickle.dumps(Opened(tmp_path / "ran")))
    (tmp_path / "megatron" / "integrity.json").unlink()
    command = ["convert", "megatron-to-hf", str(tmp_path / "megatron"), str(tmp_path / "hf")]
    refused(capsys, command, ".metadata is damaged", "io.open does not belong there")
    assert not (tmp_path / "ran").exists()


def test_no_code_of_a_model_runs_even_if_the_user_is_asked(tmp_path, capsys, monkeypatch):
    """transformers asks at a terminal, with the model's name alone."""
    source, marker = tmp_path / "source", tmp_path / "ran"
    source.mkdir()
    auto_map = {"AutoConfig": "configuration_mine.Mine"}
    content = {"model_type": "unheard_of", "auto_map": auto_map}
    (source / "config.json").write_text(json.dumps(content))
    (source / "configuration_mine.py").write_text(f"open({str(marker)!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda question: "y")
    command = ["convert", "hf-to-megatron", str(source), str(tmp_path / "target")]
    refused(capsys, command, "knows its model_type, and no such code runs here")
    assert not marker.exists()


@pytest.mark.parametrize(
    "field", [{"num_hidden_layers": 3}, {"vocab_size": 300}, {"tie_word_embeddings": True}]
)
def test_a_config_of_another_model_next_to_a_checkpoint_is_refused(
    field, sources, alone, tmp_path, capsys
):
    convert.hf_to_megatron(sources["qwen2"], tmp_path / "megatron", alone)
    edit_config(tmp_path / "megatron", **field)
    (tmp_path / "megatron" / "integrity.json").unlink()
    refused(
        capsys,
        ["convert", "megatron-to-hf", str(tmp_path / "megatron"), str(tmp_path / "hf")],
        "config.json",
    )


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("llama", "attention_bias"),
        ("llama", "mlp_bias"),
        ("qwen3", "attention_bias"),
        ("deepseek_v3", "attention_bias"),
        ("seed_oss", "attention_out_bias"),
    ],
)
def test_a_field_that_no_family_builds_is_named_and_not_its_tensors(
    family: str, field: str, tmp_path: Path, capsys
) -> None:
    write_checkpoint(tmp_path / "model", tiny_config(family, **{field: True}))
    command = ["convert", "hf-to-megatron", f"{tmp_path}/model", f"{tmp_path}/target"]
    refused(capsys, command, f"config.json: {field}=True is not supported for {family}")


def test_a_tokenizer_of_another_model_is_named_before_anything_is_written(
    tmp_path: Path, capsys
) -> None:
    make(tmp_path / "model", "qwen3")
    write_checkpoint(tmp_path / "model", tiny_config("qwen3", vocab_size=71))
    command = ["convert", "hf-to-megatron", f"{tmp_path}/model", f"{tmp_path}/target"]
    refused(capsys, [*command, "--verify"], "its tokenizer gives the id", "vocab_size=71")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_that_predict_further_tokens_are_left_out_and_named(
    family: str, tmp_path: Path, capsys
) -> None:
    config = tiny_config(family)
    write_checkpoint(tmp_path / "model", config)
    edit_config(tmp_path / "model", num_nextn_predict_layers=1)
    last, further = (f"model.layers.{config.num_hidden_layers + n}." for n in (-1, 0))

    def add(tensors: dict[str, torch.Tensor]) -> None:
        copies = {name: each.clone() for name, each in tensors.items() if name.startswith(last)}
        tensors |= {name.replace(last, further): each for name, each in copies.items()}
        tensors[f"{further}eh_proj.weight"] = torch.zeros(32, 64)

    edit_weights(tmp_path / "model", add)
    count = sum(
        name.startswith(further) for name in load_file(tmp_path / "model/model.safetensors")
    )
    command = ["convert", "hf-to-megatron", f"{tmp_path}/model", f"{tmp_path}/target"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert f"left out: {count} tensors" in said and f"{further}eh_proj.weight" in said
