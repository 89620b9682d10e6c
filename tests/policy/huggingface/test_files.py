"""The files of a model directory: which of them are read, and where a new one may appear."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from megatron_stare.config import UserError
from megatron_stare.policy.huggingface.checkpoint import Checkpoint
from megatron_stare.policy.huggingface.files import (
    INDEX,
    copy_companions,
    new_directory,
    set_dtype,
    weight_files,
)
from tests.tiny_models import byte_tokenizer

ONE = {"a": torch.ones(2)}


def write_index(directory: Path, *names: str) -> None:
    content = {"weight_map": {str(number): name for number, name in enumerate(names)}}
    (directory / INDEX).write_text(json.dumps(content))


def test_the_index_or_else_the_whole_file_says_what_is_read(tmp_path: Path) -> None:
    """Mistral's directories have the weights a second time, under names of its own."""
    save_file(ONE, tmp_path / "consolidated.safetensors")
    save_file(ONE, tmp_path / "model.safetensors")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    write_index(tmp_path, "model.safetensors")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    write_index(tmp_path, "consolidated.safetensors")
    with pytest.raises(UserError, match=r"has model.safetensors and an .* of other files"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert weight_files(tmp_path) == [tmp_path / "consolidated.safetensors"]


def test_every_chat_template_is_copied(tmp_path: Path) -> None:
    """transformers uses the one for tools where a prompt has some."""
    source, target = tmp_path / "source", tmp_path / "target"
    tokenizer, question = byte_tokenizer(), [{"role": "user", "content": "1+1"}]
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    tokenizer.save_pretrained(source)
    target.mkdir()
    for _ in range(2):  # a conversion that continues copies once more
        copy_companions(source, target)
    copied = AutoTokenizer.from_pretrained(target)
    tools = [{"type": "function", "function": {"name": "run"}}]
    for given, expected in ((None, "plain"), (tools, "with tools")):
        assert copied.apply_chat_template(question, tools=given, tokenize=False) == expected


def test_licences_and_the_code_that_the_config_names_are_copied(tmp_path: Path) -> None:
    """With trust_remote_code=True transformers and servers open the files of auto_map."""
    source, target = tmp_path / "source", tmp_path / "target"
    kept = {"LICENSE", "LICENSE-MODEL", "NOTICE.txt", "USE_POLICY.md", "configuration_mine.py"}
    for folder in (source, target):
        folder.mkdir()
    for name in (*kept, "README.md", "model.safetensors"):
        (source / name).write_text(name)
    copy_companions(source, target)
    assert {file.name for file in target.iterdir()} == kept


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for count in (2, 3):
        save_file(ONE, tmp_path / f"model-00001-of-{count:05d}.safetensors")
    with pytest.raises(UserError, match=r"of-00002.safetensors and .*of-00003.* both have a;"):
        Checkpoint(str(tmp_path))


def test_a_new_directory_takes_no_place_that_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "later").symlink_to(tmp_path / "missing")
    assert new_directory(tmp_path / "link") == tmp_path / "disk"
    assert new_directory(tmp_path / "later") == tmp_path / "missing"
    monkeypatch.chdir(tmp_path / "disk")
    assert new_directory(Path(".")) == tmp_path / "disk"
    with pytest.raises(UserError, match="exists already"):
        new_directory(tmp_path)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "disk")
    with pytest.raises(UserError, match="is a mount point; give a directory inside it"):
        new_directory(tmp_path / "link")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "float16"}, {"torch_dtype": "bfloat16"}),
        ({}, {"dtype": "bfloat16"}),
        ({"text_config": {"dtype": "float32"}}, {"text_config": {"dtype": "bfloat16"}}),
        (
            {"dtype": "float32", "text_config": {"dtype": "float32"}},
            {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}},
        ),
    ],
)
def test_a_config_names_the_dtype_of_its_weights(
    before: dict[str, object], after: dict[str, object], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(before))
    set_dtype(tmp_path, torch.bfloat16)
    assert json.loads(file.read_text()) == after
    text = json.dumps(after, indent=7)
    file.write_text(text)
    set_dtype(tmp_path, torch.bfloat16)
    assert file.read_text() == text, "a config.json that says so keeps its bytes"
