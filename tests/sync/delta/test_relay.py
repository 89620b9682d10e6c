"""The directory of a relay: what it takes, what it refuses, what a kill leaves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_stare.config import UserError
from megatron_stare.sync.delta.encoding import KeptWeights, Table, packed, unpacked
from megatron_stare.sync.delta.relay import Refused, WeightRelay
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
        delta = kept.replace([(name, new[name]) for name in names], encoding=bool(base))
        part = delta if base else kept.whole(names)
        files = {} if base or number else {"config.json": "e30="}
        table = Table(f"run-{version}", base, number, number == 1, part.entries, files)
        found.append(packed(table, part.blocks))
    return found


def apply_all(relay: WeightRelay, contents: list[bytes]) -> None:
    for content in contents:
        relay.apply(content)


def assert_holds(relay: WeightRelay, version: int) -> None:
    assert relay.held == f"run-{version}"
    found: dict[str, Tensor] = {}
    for file in sorted(relay.path.glob("*.safetensors")):
        found |= load_file(file)
    assert found.keys() == set("abc")
    for name, tensor in weights(version).items():
        assert torch.equal(found[name], tensor) and found[name].dtype is tensor.dtype
    others = {file.name for file in relay.path.iterdir() if file.suffix != ".safetensors"}
    assert others == {"config.json", "model.safetensors.index.json"}


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[WeightRelay]:
    with closing(WeightRelay(tmp_path / "relay")) as found:
        yield found


@pytest.fixture
def kept(relay: WeightRelay) -> KeptWeights:
    """The trainer's copy, once the relay has its first version."""
    found = KeptWeights()
    for content in messages(found, 0):
        assert not relay.path.exists()
        relay.apply(content)
    assert_holds(relay, 0)
    return found


def test_a_relay_applies_versions_in_order(relay: WeightRelay, kept: KeptWeights) -> None:
    for version in (1, 2):
        first, last = messages(kept, version, f"run-{version - 1}")
        relay.apply(first)
        assert relay.held == "" and not relay.path.exists(), "it is not a model now"
        relay.apply(last)
        assert_holds(relay, version)
    apply_all(relay, messages(kept, 3))
    assert_holds(relay, 3)


def corrupt(place: str) -> Callable[[WeightRelay], None]:
    """One bit of a tensor's bytes on disk; `c` is all that its file holds."""

    def change(relay: WeightRelay) -> None:
        (file,) = (relay.path / name for name in [f"model-0000{place}.safetensors"])
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    return change


def edited(name: str, old: bytes, new: bytes) -> Callable[[WeightRelay], None]:
    """A file of the same size and with the same times, with other bytes outside of its tensors."""

    def change(relay: WeightRelay) -> None:
        file = relay.path / name
        content, state = file.read_bytes(), file.stat()
        assert old in content and len(old) == len(new)
        file.write_bytes(content.replace(old, new, 1))
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))

    return change


OTHER_FILES: dict[str, Callable[[WeightRelay], None]] = {
    "a name in a header": edited("model-00000.safetensors", b'"a"', b'"b"'),
    "the length of a header": edited("model-00001.safetensors", b"\0\0\0{", b"\0\0\1{"),
    "the index": edited("model.safetensors.index.json", b'"c"', b'"a"'),
    "config.json": edited("config.json", b"{}", b"[]"),
    "a file that is gone": lambda relay: (relay.path / "config.json").unlink(),
    "a file too many": lambda relay: (relay.path / "model.safetensors").write_bytes(b""),
}
FAULTS: dict[str, Callable[[WeightRelay], None]] = {
    "a tensor that changes": corrupt("1"),
    "a tensor that stays": corrupt("0"),
    "a file cut short": lambda relay: (relay.path / "model-00001.safetensors").write_bytes(b"1"),
    "a file of tensors that is gone": lambda relay: (
        relay.path / "model-00000.safetensors"
    ).unlink(),
    **OTHER_FILES,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_question_finds_files_that_were_changed(
    fault: str, relay: WeightRelay, kept: KeptWeights
) -> None:
    """A server that is late loads what the relay says that it holds."""
    relay.check()
    assert_holds(relay, 0)
    FAULTS[fault](relay)
    relay.check()
    assert relay.held == ""
    apply_all(relay, messages(kept, 1))
    relay.check()
    assert_holds(relay, 1)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_changed_file_is_refused(fault: str, relay: WeightRelay, kept: KeptWeights) -> None:
    FAULTS[fault](relay)
    with pytest.raises(Refused):
        apply_all(relay, messages(kept, 1, "run-0"))
    assert relay.held == "" and not relay.path.exists()
    apply_all(relay, messages(kept, 1))
    assert_holds(relay, 1)


def test_a_version_out_of_order_is_refused(relay: WeightRelay, kept: KeptWeights) -> None:
    first, last = messages(kept, 1, "run-0")
    with pytest.raises(Refused, match="it changes run-7, and here is run-0"):
        relay.apply(packed(replace(unpacked(first)[0], base="run-7"), unpacked_blocks(first)))
    with pytest.raises(Refused, match="here is nothing"):
        relay.apply(first)
    other = KeptWeights()
    begin, end = messages(other, 0)
    with pytest.raises(Refused, match="part 1 of run-0 came, and nothing is due"):
        relay.apply(end)
    relay.apply(begin)
    with pytest.raises(Refused, match="part 1 of run-1 came, and part 1 of run-0 is due"):
        relay.apply(last)
    assert not relay.path.exists()


def unpacked_blocks(content: bytes) -> list[memoryview]:
    return [block for blocks in unpacked(content)[1] for block in blocks]


@pytest.mark.parametrize("base", ["", "run-0"])
def test_a_damaged_update_is_refused(base: str, relay: WeightRelay, kept: KeptWeights) -> None:
    """Every byte after the table belongs to a tensor, whose digest finds the damage."""
    first, last = messages(kept, 1, base)
    relay.apply(first)
    damaged = bytearray(last)
    damaged[-20] ^= 4
    with pytest.raises(Refused):
        relay.apply(bytes(damaged))
    assert relay.held == "" and not relay.path.exists()


@pytest.mark.parametrize("base", ["", "run-0"])
def test_an_incomplete_update_is_refused(base: str, relay: WeightRelay, kept: KeptWeights) -> None:
    """The table of deltas also names unchanged tensors; that of a whole update names all."""
    first, _ = messages(kept, 1, base)
    table = replace(unpacked(first)[0], last=True)
    if base:
        with pytest.raises(Refused, match="has no c"):
            relay.apply(packed(table, unpacked_blocks(first)))
        assert not relay.path.exists()
    else:
        relay.apply(packed(table, unpacked_blocks(first)))
        assert sorted(load_file(relay.path / "model-00000.safetensors")) == ["a", "b"]


def test_a_file_with_another_name_is_not_written(relay: WeightRelay, kept: KeptWeights) -> None:
    first, _ = messages(kept, 1)
    table = replace(unpacked(first)[0], files={"../escaped": "e30="})
    with pytest.raises(Refused, match="is not a file of a model"):
        relay.apply(packed(table, unpacked_blocks(first)))
    assert not (relay.directory / "escaped").exists()


def test_a_relay_that_starts_again_trusts_nothing(relay: WeightRelay, kept: KeptWeights) -> None:
    first, _ = messages(kept, 1, "run-0")
    relay.apply(first)  # and is killed here: only the lock goes
    relay._closing.close()
    with closing(WeightRelay(relay.directory)) as again:
        assert again.held == "" and [file.name for file in again.directory.iterdir()] == [
            OWN_MARKER
        ]


def test_directories_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "weights").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for taken in ("thesis", "file"):
        with pytest.raises(UserError, match=r"is in the way .* give the relay another directory"):
            WeightRelay(tmp_path / taken)
    assert (tmp_path / "thesis" / "weights").read_text() == "mine"
    with (
        closing(WeightRelay(tmp_path / "own")),
        pytest.raises(UserError, match="another relay works in"),
    ):
        WeightRelay(tmp_path / "own")
