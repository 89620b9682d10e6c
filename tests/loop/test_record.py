"""The groups of a recorded step, read in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stare.collect.journal import group_frames
from megatron_stare.loop import record
from megatron_stare.loop.run_directory import Head
from megatron_stare.records import Group, Prompt, Rollout


def test_every_ranks_file_is_read_once_and_groups_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders = (0, 1, 0, 1, 0)
    rollout = Rollout([1, 2], [-1.0] * 2, [True] * 2, status="completed", weight_version=0)
    groups = [Group(Prompt(number, [3], ""), (rollout,)) for number in range(len(holders))]
    (tmp_path / "step_00000007").mkdir()
    for rank in (0, 1):
        own = [(place, groups[place]) for place, holder in enumerate(holders) if holder == rank]
        file = tmp_path / f"step_00000007/a_rank_{rank:05d}.frames"
        file.write_bytes(b"".join(group_frames(own)))
    files, read = [], record._read_own

    def counted(file: Path) -> list[Group]:
        files.append(file.name)
        return read(file)

    monkeypatch.setattr(record, "_read_own", counted)
    found = record.recorded_groups(tmp_path, Head(7, "a", 2, holders, signal=True, weights=""))
    assert [group.prompt.index for group in found] == [0, 1, 2, 3, 4]
    assert sorted(files) == ["a_rank_00000.frames", "a_rank_00001.frames"]
