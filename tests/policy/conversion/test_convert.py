"""Conversion both ways: every byte back, from every layout, after a kill, on a full disk."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_stare.__main__ import main
from megatron_stare.config import PolicyConfig
from megatron_stare.policy import build, model_state
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.checkpoints.checkpoints import Save
from megatron_stare.policy.conversion import convert, verification
from megatron_stare.policy.huggingface import weights as hf_weights
from tests.conftest import fill
from tests.distributed import fork_server, run_distributed
from tests.policy.conversion.conftest import FAMILIES, make, refused

PP2 = PolicyConfig(pipeline_model_parallel_size=2)


TP2 = PolicyConfig(tensor_model_parallel_size=2, sequence_parallel=True)


TP2_PP2 = dataclasses.replace(TP2, pipeline_model_parallel_size=2)


LAYOUTS = {
    "tp2_pp2": TP2_PP2,
    "tp2": TP2,
    "pp2": PP2,
    "stacked": TP2,
    "ep2": PolicyConfig(expert_model_parallel_size=2),
}


def families_of(layout: str) -> tuple[str, ...]:
    """Megatron always numbers the layers of a mixed model; experts are spread over ranks where
    there are some. Every family has TP2 and PP2, and one of each kind has both together.
    """
    if layout == "stacked":
        return FAMILIES[:-6]
    if layout == "tp2_pp2":
        return ("qwen2_tied", "qwen3_5_text", "qwen3_moe", "deepseek_v3")
    return FAMILIES[-5:] if layout == "ep2" else FAMILIES


def assert_same_files(source: Path, target: Path) -> None:
    """Every file of the source is in the target, byte by byte; the manifest alone is new."""
    names = {file.name for file in source.iterdir()}
    assert {file.name for file in target.iterdir()} == names | {"integrity.json"}
    for name in names:
        assert (source / name).read_bytes() == (target / name).read_bytes(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_trip_gives_every_file_back(family, sources, alone, tmp_path):
    convert.hf_to_megatron(sources[family], tmp_path / "megatron", alone)
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", alone)
    assert_same_files(sources[family], tmp_path / "hf")
    prompts = [[1, 2, 3, 4, 5, 250], [7] * 40]
    logits = verification.compare_logits(sources[family], tmp_path / "megatron", alone, prompts)
    assert logits.positions == 46
    assert logits.difference < 1e-5 * max(1.0, logits.scale)


def resave(rank: int, world_size: int, sources: dict[str, Path], base: Path) -> None:
    """Every family loaded from HF under TP2 x PP2 and TP2,
    the latter's checkpoint reloaded under the other layouts.
    """
    for layout, policy in LAYOUTS.items():
        place = topologies.start(policy)
        for family in families_of(layout):
            source, target = sources[family], base / f"{family}_{layout}"
            chunks = build.build_model(build.read_hf_config(str(source)), policy, place)
            if layout in ("tp2_pp2", "tp2"):
                hf_weights.load_hf(chunks, str(source), build.read_hf_config(str(source)), place)
            else:
                model_state.into_model(chunks, base / f"{family}_tp2", place)
            if rank == 0:
                target.mkdir()
                shutil.copy(source / "config.json", target)
            torch.distributed.barrier()
            state = model_state.sharded_weights(chunks, place, numbered=layout != "stacked")
            Save(state, target, place, background=layout == "pp2").finish()


@pytest.fixture(scope="module")
def resaved(sources, tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("resaved")
    run_distributed(resave, 4, {family: sources[family] for family in FAMILIES}, base)
    return base


@pytest.mark.parametrize(
    ("layout", "family"), [(layout, family) for layout in LAYOUTS for family in families_of(layout)]
)
def test_any_layout_converts_back_to_the_same_tensors(
    layout, family, resaved, sources, alone, tmp_path
):
    convert.megatron_to_hf(resaved / f"{family}_{layout}", tmp_path / "hf", alone)
    before = {
        k: v for file in sources[family].glob("*.safetensors") for k, v in load_file(file).items()
    }
    after = load_file(tmp_path / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name


def test_bf16_and_mixed_dtypes_are_kept(alone, tmp_path):
    source = make(tmp_path / "source", "qwen2", max_shard_size="1GB")
    tensors = {
        name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()
    }
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert.hf_to_megatron(source, tmp_path / "megatron", alone)
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", alone)
    assert_same_files(source, tmp_path / "hf")


def test_dtype_converts_and_config_says_so(sources, alone, tmp_path):
    convert.hf_to_megatron(sources["qwen3"], tmp_path / "megatron", alone, dtype="bf16")
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", alone)
    for file in sources["qwen3"].glob("*.safetensors"):
        after = load_file(tmp_path / "hf" / file.name)
        for name, tensor in load_file(file).items():
            assert torch.equal(after[name], tensor.bfloat16()), name
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def crawl(source: Path, target: Path, marker: Path, direction: str) -> None:
    """Convert with parts of one parameter, stopping for good after the fourth."""
    convert.PART_BYTES = 1
    count = 0

    def moved(_: int) -> None:
        nonlocal count
        count += 1
        if count == 4:
            marker.touch()
            time.sleep(600)

    with topologies.session(PolicyConfig()) as topology:
        getattr(convert, direction)(source, target, topology, progress=lambda total: moved)


@pytest.mark.parametrize(
    "direction", ["hf_to_megatron", pytest.param("megatron_to_hf", marks=pytest.mark.slow)]
)
def test_a_killed_conversion_continues_where_it_stopped(
    direction, sources, alone, tmp_path, monkeypatch
):
    source = sources["qwen3_moe"]
    if direction == "megatron_to_hf":
        convert.hf_to_megatron(source, tmp_path / "source", alone)
        source = tmp_path / "source"
    target, marker = tmp_path / "target", tmp_path / "marker"
    child = fork_server().Process(target=crawl, args=(source, target, marker, direction))
    child.start()
    deadline = time.monotonic() + 120
    while not marker.exists():
        assert child.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert not target.exists()
    working = tmp_path / ".target.converting" / "content"
    finished = {
        f.name: f.stat().st_mtime_ns
        for f in working.iterdir()
        if f.suffix in (".distcp", ".safetensors")
    }
    assert len(finished) >= 4
    monkeypatch.setattr(convert, "PART_BYTES", 1)
    getattr(convert, direction)(source, target, alone)
    assert {name: (target / name).stat().st_mtime_ns for name in finished} == finished
    assert not (tmp_path / ".target.converting").exists()
    if direction == "hf_to_megatron":
        convert.megatron_to_hf(target, tmp_path / "hf", alone)
        target = tmp_path / "hf"
    assert_same_files(sources["qwen3_moe"], target)


def test_a_full_disk_is_reported_and_the_same_command_continues(small_disk, sources, capsys):
    filler, target = fill(small_disk, leave=100 << 10), small_disk / "target"
    command = ["convert", "hf-to-megatron", str(sources["qwen3_moe"]), str(target)]
    refused(capsys, command, "No space left", "make room")
    assert not target.exists()
    filler.unlink()
    assert main(command) == 0
    assert (target / "integrity.json").is_file()


def test_a_link_to_an_empty_directory_is_a_target(sources, alone, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    convert.hf_to_megatron(sources["llama"], tmp_path / "link", alone)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "integrity.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


def test_work_on_another_source_is_not_continued(sources, alone, tmp_path):
    working = tmp_path / ".target.converting" / "content"
    working.mkdir(parents=True)
    (working / "model.safetensors").write_bytes(b"stale")
    convert.hf_to_megatron(sources["llama"], tmp_path / "target", alone)
    assert not (tmp_path / "target" / "model.safetensors").exists()
