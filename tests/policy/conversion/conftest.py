"""Checkpoints of every family that the tests of the conversion share."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stare.__main__ import main
from megatron_stare.config import PolicyConfig
from megatron_stare.policy import topology as topologies
from tests.tiny_models import byte_tokenizer, tiny_config, write_checkpoint

FAMILIES = (
    "qwen2",
    "qwen2_tied",
    "qwen3",
    "qwen3_tied",
    "llama",
    "llama3_rope",
    "mistral",
    "smollm3",
    "seed_oss",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "dots1",
    "glm4_moe",
    "qwen3_moe",
    "deepseek_v3",
    "glm4_moe_lite",
)


def make(directory: Path, family: str, **save) -> Path:
    """A tiny model directory with a tokenizer; several weight files."""
    write_checkpoint(
        directory, tiny_config(family, vocab_size=257), **({"max_shard_size": "40KB"} | save)
    )
    byte_tokenizer().save_pretrained(directory)
    return directory


class Sources(dict[str, Path]):
    """A model directory of each family, made when the first test asks for it. Tests only read."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def __missing__(self, family: str) -> Path:
        self[family] = make(self.base / family, family)
        return self[family]


@pytest.fixture(scope="session")
def sources(tmp_path_factory) -> dict[str, Path]:
    return Sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture
def alone():
    with topologies.session(PolicyConfig()) as topology:
        yield topology


def refused(capsys, arguments: list[str], *words: str) -> None:
    """Exit code 2 and one line that holds the words; no traceback."""
    assert main(arguments) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    for word in words:
        assert word in line
