"""The directory of a mirror: what it takes, what it refuses, what a kill leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_stare.config import UserError
from megatron_stare.sync.delta.kept import KeptWeights
from megatron_stare.sync.delta.message import Table, packed, unpacked
from megatron_stare.sync.delta.mirror import Mirror, Refused
from megatron_stare.sync.disk import OWN_MARKER

BUCKETS = [["a", "b"], ["c"]]


def weights(version: int) -> dict[str, Tensor]:
    """Three tensors, of which `b` never changes."""
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(33, 17, generator=generator).bfloat16() for name in "abc"}
    found["b"] = found["b"].float()
    for name in "ac":
        found[name][version % 33] += version
    return found


def messages(kept: KeptWeights, version: int, base: str = "") -> list[bytes]:
    """An update, in two parts; a delta where it has a base."""
    new, found = weights(version), []
    for number, names in enumerate(BUCKETS):
        delta = kept.advance([(name, new[name]) for name in names], encoding=bool(base))
        part = delta if base else kept.whole(names)
        files = {} if base or number else {"config.json": "e30="}
        table = Table(f"run-{version}", base, number, number == 1, part.entries, files)
        found.append(packed(table, part.blocks))
    return found


def take(mirror: Mirror, contents: list[bytes]) -> None:
    for content in contents:
        mirror.take(content)


def assert_holds(mirror: Mirror, version: int) -> None:
    assert mirror.held == f"run-{version}"
    found: dict[str, Tensor] = {}
    for file in sorted(mirror.path.glob("*.safetensors")):
        found |= load_file(file)
    assert found.keys() == set("abc")
    for name, tensor in weights(version).items():
        assert torch.equal(found[name], tensor) and found[name].dtype is tensor.dtype
    beside = {file.name for file in mirror.path.iterdir() if file.suffix != ".safetensors"}
    assert beside == {"config.json", "model.safetensors.index.json"}


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    with closing(Mirror(tmp_path / "mirror")) as found:
        yield found


@pytest.fixture
def kept(mirror: Mirror) -> KeptWeights:
    """What the trainer keeps, once the mirror has its first version."""
    found = KeptWeights()
    for content in messages(found, 0):
        assert not mirror.path.exists()
        mirror.take(content)
    assert_holds(mirror, 0)
    return found


def test_one_version_after_another(mirror: Mirror, kept: KeptWeights) -> None:
    for version in (1, 2):
        first, last = messages(kept, version, f"run-{version - 1}")
        mirror.take(first)
        assert mirror.held == "" and not mirror.path.exists(), "it is no model now"
        mirror.take(last)
        assert_holds(mirror, version)
    take(mirror, messages(kept, 3))
    assert_holds(mirror, 3)


def corrupt(place: str) -> Callable[[Mirror], None]:
    """One bit of a tensor's bytes on disk; `c` is all that its file holds."""

    def change(mirror: Mirror) -> None:
        (file,) = (mirror.path / name for name in [f"model-0000{place}.safetensors"])
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    return change


FAULTS: dict[str, Callable[[Mirror], None]] = {
    "a tensor that changes": corrupt("1"),
    "a tensor that stays": corrupt("0"),
    "a file cut short": lambda mirror: (mirror.path / "model-00001.safetensors").write_bytes(b"1"),
    "a file that is gone": lambda mirror: (mirror.path / "model-00000.safetensors").unlink(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_longer_as_it_was_sent_is_refused(
    fault: str, mirror: Mirror, kept: KeptWeights
) -> None:
    FAULTS[fault](mirror)
    with pytest.raises(Refused):
        take(mirror, messages(kept, 1, "run-0"))
    assert mirror.held == "" and not mirror.path.exists()
    take(mirror, messages(kept, 1))
    assert_holds(mirror, 1)


def test_what_does_not_follow_is_refused(mirror: Mirror, kept: KeptWeights) -> None:
    first, last = messages(kept, 1, "run-0")
    with pytest.raises(Refused, match="it changes run-7, and here is run-0"):
        mirror.take(packed(replace(unpacked(first)[0], base="run-7"), unpacked_blocks(first)))
    with pytest.raises(Refused, match="here is nothing"):
        mirror.take(first)
    other = KeptWeights()
    begin, end = messages(other, 0)
    with pytest.raises(Refused, match="part 1 of run-0 came, and nothing is due"):
        mirror.take(end)
    mirror.take(begin)
    with pytest.raises(Refused, match="part 1 of run-1 came, and part 1 of run-0 is due"):
        mirror.take(last)
    assert not mirror.path.exists()


def unpacked_blocks(content: bytes) -> list[memoryview]:
    return [block for blocks in unpacked(content)[1] for block in blocks]


@pytest.mark.parametrize("base", ["", "run-0"])
def test_what_arrives_damaged_is_refused(base: str, mirror: Mirror, kept: KeptWeights) -> None:
    """Every byte behind the table is one of a tensor's, whose digest tells."""
    first, last = messages(kept, 1, base)
    mirror.take(first)
    spoilt = bytearray(last)
    spoilt[-20] ^= 4
    with pytest.raises(Refused):
        mirror.take(bytes(spoilt))
    assert mirror.held == "" and not mirror.path.exists()


@pytest.mark.parametrize("base", ["", "run-0"])
def test_an_update_without_all_tensors_is_none(
    base: str, mirror: Mirror, kept: KeptWeights
) -> None:
    """Of deltas the table names what stays too; what is sent whole is what there is."""
    first, _ = messages(kept, 1, base)
    table = replace(unpacked(first)[0], last=True)
    if base:
        with pytest.raises(Refused, match="has no c"):
            mirror.take(packed(table, unpacked_blocks(first)))
        assert not mirror.path.exists()
    else:
        mirror.take(packed(table, unpacked_blocks(first)))
        assert sorted(load_file(mirror.path / "model-00000.safetensors")) == ["a", "b"]


def test_a_file_with_another_name_is_not_written(mirror: Mirror, kept: KeptWeights) -> None:
    first, _ = messages(kept, 1)
    table = replace(unpacked(first)[0], files={"../escaped": "e30="})
    with pytest.raises(Refused, match="lies beside weights"):
        mirror.take(packed(table, unpacked_blocks(first)))
    assert not (mirror.directory / "escaped").exists()


def test_a_mirror_that_starts_again_trusts_nothing(mirror: Mirror, kept: KeptWeights) -> None:
    first, _ = messages(kept, 1, "run-0")
    mirror.take(first)  # and is killed here: only the lock goes
    mirror._closing.close()
    with closing(Mirror(mirror.directory)) as again:
        assert again.held == "" and [file.name for file in again.directory.iterdir()] == [
            OWN_MARKER
        ]


def test_directories_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "weights").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for taken in ("thesis", "file"):
        with pytest.raises(UserError, match=r"is in the way .* give the mirror another directory"):
            Mirror(tmp_path / taken)
    assert (tmp_path / "thesis" / "weights").read_text() == "mine"
    with (
        closing(Mirror(tmp_path / "own")),
        pytest.raises(UserError, match="another mirror works in"),
    ):
        Mirror(tmp_path / "own")
