"""Weights by way of a disk: what is written, for whom, and that nothing else is touched."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_stare.config import UserError
from megatron_stare.policy.huggingface.files import TEMPLATES
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.server import Model
from megatron_stare.sync.disk import OWN_MARKER, DiskTransport
from megatron_stare.sync.weight_sync import WeightBucket
from tests.rollout.sglang.idle import idle_pool, tiny_model
from tests.sync.delta.world import full_disk

BUCKET = [("a", torch.ones(2))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory that every server sees, with a user's file in it."""
    directory = tmp_path / "shared"
    (directory / "thesis").mkdir(parents=True)
    (directory / "thesis" / "chapter.txt").write_text("four years")
    return directory


@pytest.fixture
def pool(model: Model, place: Path, tmp_path: Path) -> Iterator[SGLangPool]:
    settings = {"sync_method": "disk", "sync_directory": str(place)}
    with idle_pool(model, tmp_path / "logs", **settings) as found:
        yield found


def transport(pool: SGLangPool, directory: Path) -> DiskTransport:
    return DiskTransport(pool, pool.settings, pool.model.hf_checkpoint, directory / "weights")


@pytest.fixture
def templates(model: Model) -> Iterator[Path]:
    """The folder of a model with several chat templates, in the model's directory."""
    folder = Path(model.hf_checkpoint) / TEMPLATES
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("with tools")
    yield folder
    shutil.rmtree(folder)


def test_a_users_files_in_sync_directory_are_left_alone(
    pool: SGLangPool, place: Path, tmp_path: Path, templates: Path
):
    disk = transport(pool, tmp_path)
    for tag in (None, "run-1"):  # a bucket, then the last one
        disk.send(WeightBucket([(f"of {tag}", torch.ones(2))]), [], tag)
        assert (place / "thesis" / "chapter.txt").read_text() == "four years"
    assert [entry.name for entry in place.iterdir()] == ["thesis"], "what it wrote is gone"


def test_files_of_a_killed_attempt_are_removed_by_the_next(
    pool: SGLangPool, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Slurm may start it on another machine."""
    transport(pool, tmp_path).send(WeightBucket([*BUCKET, ("b", torch.ones(2))]), [], None)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    transport(pool, tmp_path).send(WeightBucket(BUCKET), [], "run-1")
    assert [entry.name for entry in place.iterdir()] == ["thesis"]
    transport(pool, tmp_path).directory.mkdir()  # killed before the marker was there
    transport(pool, tmp_path).send(WeightBucket(BUCKET), [], "run-2")
    assert [entry.name for entry in place.iterdir()] == ["thesis"]


def test_two_runs_do_not_share_a_directory(pool: SGLangPool, tmp_path: Path):
    one, other = (transport(pool, tmp_path / name) for name in ("one", "other"))
    assert one.directory != other.directory and one.directory.parent == other.directory.parent
    shutil.copytree(tmp_path / "one", tmp_path / "copied")
    assert transport(pool, tmp_path / "copied").directory != one.directory


@pytest.mark.parametrize("taken_by", ["directory", "link", "file"])
def test_a_directory_without_a_marker_is_refused_and_kept(
    taken_by: str, pool: SGLangPool, place: Path, tmp_path: Path
):
    disk = transport(pool, tmp_path)
    if taken_by == "link":  # to what a user marked, so that the link itself is the reason
        (place / "thesis" / OWN_MARKER).touch()
        disk.directory.symlink_to(place / "thesis")
    elif taken_by == "directory":
        disk.directory.mkdir()
        (disk.directory / "data.txt").write_text("mine")
    else:
        disk.directory.write_text("mine")
    before = sorted(place.rglob("*"))
    with pytest.raises(UserError, match=r"is in the way .* choose another sglang.sync_directory"):
        disk.send(WeightBucket(BUCKET), [], "run-1")
    assert sorted(place.rglob("*")) == before


def test_a_full_disk_is_named_with_the_remedy(pool: SGLangPool, tmp_path: Path):
    disk = transport(pool, tmp_path)
    large = WeightBucket([("a", torch.zeros(1 << 18))])
    with full_disk(), pytest.raises(UserError, match=r"cannot be written .* make room, or choose"):
        disk.send(large, [], None)
    disk.abandon(UserError("as the sync does"))
    disk.send(large, [], "run-1")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_weights_on_disk_have_the_permissions_of_the_umask(
    umask: int, mode: int, pool: SGLangPool, tmp_path: Path
):
    """safetensors writes for its own user alone; a server may run as another."""
    disk = transport(pool, tmp_path)
    before = os.umask(umask)
    try:
        disk.send(WeightBucket(BUCKET), [], None)
    finally:
        os.umask(before)
    assert (disk.directory / "model-00000.safetensors").stat().st_mode & 0o777 == mode
