"""The journal of finished rollouts: its state after a kill, a damaged line and several resumes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy
import pytest

from megatron_stare.collect import journal as journals
from megatron_stare.collect.dispatcher import PromptDispatcher
from megatron_stare.collect.journal import ATTEMPTS_NAME, MAGIC, Journal, forget, frame
from megatron_stare.collect.rollout_worker import RolloutWorker
from megatron_stare.collect.rounds import RolloutWorkers
from megatron_stare.collect.sampling_settings import sampling_digest
from megatron_stare.config import Config, override
from megatron_stare.records import Prompt, Rollout
from megatron_stare.rollout.engine import Request
from tests.collect.test_rollout_buffer_stream import FULLY
from tests.conftest import fill


def rollout(*versions: int) -> Rollout:
    count = len(versions)
    spread = versions if len(set(versions)) > 1 else ()
    return Rollout(
        (5,) * count,
        (-0.1234567890123,) * count,
        (1,) * count,
        status="completed",
        weight_version=versions[-1],
        text="text",
        token_versions=spread,
    )


def attempt(directory: Path, step: int, *written: tuple[int, int, Rollout]) -> None:
    """One attempt of a run, from `step`, that finishes these rollouts and is killed."""
    journal = Journal(directory)
    journal.open(step)
    for prompt, number, found in written:
        journal.start_step(found.weight_version)
        journal.write((prompt, number), found)
    journal.close()


def found_by(directory: Path, step: int, prompt: int) -> Rollout | None:
    """The rollout of this prompt that an attempt from `step` finds."""
    journal = Journal(directory)
    journal.open(step)
    journal.close()
    return journal.pop((prompt, 0), oldest=-100)


def test_a_later_attempt_finds_each_rollout_once(tmp_path: Path):
    journal = Journal(tmp_path)
    journal.open(3)
    journal.write((4, 0), rollout(3, 3))
    journal.write((4, 1), rollout(2, 3))
    journal.start_step(4)
    journal.write((5, 0), rollout(3, 4))
    journal.write((6, 0), rollout(4, 4))
    journal.close()
    with (tmp_path / "step_00000004.frames").open("ab") as file:
        file.write(frame(rollout(4, 4), key=(7, 0), attempt="x")[:-3])
    later = Journal(tmp_path)
    later.open(4)
    later.write((7, 1), rollout(4))
    assert later.pop((4, 0), oldest=0) == rollout(3, 3)
    assert later.pop((4, 0), oldest=0) is None, "given once"
    assert later.pop((4, 1), oldest=3) is None, "its first token is too old"
    assert later.pop((5, 0), oldest=0) == rollout(3, 4)
    assert later.pop((7, 0), oldest=0) is None
    later.close()
    earlier = Journal(tmp_path)
    earlier.open(3)
    assert earlier.pop((6, 0), oldest=0) == rollout(2, 2), (
        "the weights of a step that was lost count as older"
    )
    assert earlier.pop((7, 1), oldest=0) == rollout(2), "a torn frame does not spoil the next"
    forget(tmp_path, 4)
    assert [file.name for file in tmp_path.glob("step_*")] == ["step_00000004.frames"]


def test_a_full_disk_is_a_warning_and_loses_no_finished_rollout(
    small_disk: Path, caplog: pytest.LogCaptureFixture
):
    journal = Journal(small_disk / "rollouts")
    journal.open(0)
    journal.write((0, 0), rollout(0, 0))
    filler = fill(small_disk, leave=0)
    long = rollout(*[0] * 2000)
    journal.write((0, 1), long)
    journal.write((0, 2), long)
    assert [record.levelname for record in caplog.records] == [
        "WARNING"
    ] and "No space left" in caplog.text
    filler.unlink()
    journal.write((0, 3), rollout(0, 0))
    journal.close()
    later = Journal(small_disk / "rollouts")
    later.open(0)
    assert [later.pop((0, number), oldest=0) for number in range(4)] == [
        rollout(0, 0),
        long,
        long,
        rollout(0, 0),
    ]
    later.close()


@pytest.mark.parametrize("second", [5, 6, 3])
def test_rollouts_of_lost_weights_are_not_fresh_after_a_second_resume(second: int, tmp_path: Path):
    """Weights 5 of the first attempt follow its weights 3, from which the second attempt starts.
    The third starts from weights 5 of the second, and these differ from those of the first.
    """
    attempt(tmp_path, 0, (0, 0, rollout(3, 3)), (1, 0, rollout(5, 5)), (2, 0, rollout(3, 5)))
    attempt(tmp_path, 3, (3, 0, rollout(5)))
    found = {prompt: found_by(tmp_path, second, prompt) for prompt in range(4)}
    assert found[0] == rollout(3, 3), "its weights are those of the checkpoint"
    assert found[1] == rollout(2, 2), "one step older than the weights of both attempts"
    assert found[2] == rollout(3, 2)
    assert found[3] == (rollout(5) if second >= 5 else rollout(2))


def test_a_rollout_of_a_later_attempt_replaces_an_earlier_one(tmp_path: Path):
    attempt(tmp_path, 0, (0, 0, rollout(5, 5)))
    attempt(tmp_path, 3, (0, 0, rollout(4)))
    assert found_by(tmp_path, 4, 0) == rollout(4)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", None])
def test_without_its_table_of_attempts_no_rollout_is_fresh(content: bytes | None, tmp_path: Path):
    attempt(tmp_path, 0, (0, 0, rollout(0)), (1, 0, rollout(2)))
    if content is None:
        (tmp_path / ATTEMPTS_NAME).unlink()
    else:
        (tmp_path / ATTEMPTS_NAME).write_bytes(content)
    for _ in range(2):
        assert all(found_by(tmp_path, 2, prompt).weight_version < 0 for prompt in (0, 1))  # type: ignore[union-attr]


def unframed(**changes: Any) -> bytes:
    """A frame with a right checksum whose rollout cannot be one."""
    found = rollout(1, 1)
    for name, value in changes.items():
        object.__setattr__(found, name, value)
    return frame(found, key=(9, 0), attempt="")


WHOLE = frame(rollout(1, 1), key=(9, 0), attempt="")
DAMAGED_FRAMES = {
    "torn in its start": WHOLE[:10],
    "torn in its line": WHOLE[:60],
    "torn in its arrays": WHOLE[:-1],
    "a flipped bit of an array": WHOLE[:-3] + bytes([WHOLE[-3] ^ 1]) + WHOLE[-2:],
    "another length": WHOLE[:8] + bytes([WHOLE[8] ^ 1]) + WHOLE[9:],
    "a mark alone": MAGIC,
    "zeros of a power cut": bytes(200),
    "NaN": unframed(logprobs=numpy.array([math.nan, -1.0], numpy.float32)),
    "infinite": unframed(logprobs=numpy.array([-1.0, -math.inf], numpy.float32)),
    "other lengths": unframed(logprobs=numpy.array([-1.0], numpy.float32)),
    "a prompt": frame(Prompt(9, (1, 2), "")),
    "no key": frame(rollout(1, 1), attempt=""),
    "a key of another build": frame(rollout(1, 1), key="9-0", attempt=""),
    "no attempt": frame(rollout(1, 1), key=(9, 0)),
}


@pytest.mark.parametrize("name", DAMAGED_FRAMES)
def test_a_damaged_frame_is_counted_and_the_rest_is_read(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    attempt(tmp_path, 1, (0, 0, rollout(1, 1)))
    file = tmp_path / "step_00000001.frames"
    file.write_bytes(file.read_bytes() + DAMAGED_FRAMES[name])
    attempt(tmp_path, 1, (1, 0, rollout(1, 1)))
    assert_one_is_skipped_of_three(tmp_path, caplog)


def assert_one_is_skipped_of_three(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    journal = Journal(tmp_path)
    journal.open(1)
    journal.close()
    assert journal.skipped == 1 and "1 of 3 entries cannot be used" in caplog.text
    assert len(caplog.records) == 1 and len(caplog.text) < 500
    assert journal.found == {(0, 0): rollout(1, 1), (1, 0): rollout(1, 1)}


def test_a_journal_reaches_the_disk_once_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    journal, flushed = Journal(tmp_path), list[str]()
    journal.open(0)
    sync = os.fsync

    def noted(number: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{number}")).name)
        sync(number)

    monkeypatch.setattr(os, "fsync", noted)
    for number in range(8):
        journal.write((0, number), rollout(0))
    assert not flushed
    journal.start_step(1)
    journal.write((0, 8), rollout(0))
    journal.close()
    files = [name for name in flushed if name.startswith("step_")]
    assert files == ["step_00000000.frames", "step_00000001.frames"]
    assert tmp_path.name in flushed, "the new file's name"


def test_rollouts_that_became_too_old_are_forgotten(tmp_path: Path):
    attempt(tmp_path, 0, *((prompt, 0, rollout(prompt)) for prompt in range(6)))
    journal = Journal(tmp_path)
    journal.open(4)
    assert len(journal.found) == 6
    for step in (4, 5, 6):
        journal.start_step(step, oldest=step - 2)
        assert min(prompt for prompt, _ in journal.found) == step - 2
    journal.close()


def test_rollouts_that_are_too_old_are_not_held_while_the_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run with rare checkpoints has hundreds of steps in its files, most of them of weights that
    a kill has lost.
    """
    attempt(tmp_path, 0, *((prompt, 0, rollout(prompt)) for prompt in range(9)))
    attempt(tmp_path, 2)
    journal, held, read = Journal(tmp_path), list[int](), Journal._read
    noted = lambda self, file: (held.append(len(self.found)), read(self, file))[1]  # noqa: E731
    monkeypatch.setattr(Journal, "_read", noted)
    journal.open(2, oldest=2)
    journal.close()
    assert sorted(journal.found) == [(2, 0)], "weights 3 to 8 were lost"
    assert len(held) == 7 and max(held) == 1, "files of steps 0 and 1 are not even opened"


def test_a_step_whose_file_cannot_be_opened_keeps_its_rollouts_for_a_later_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """As without inodes: a file in the place of the folder. Kept bytes are bounded: the newest."""
    monkeypatch.setattr(
        journals, "MOST_UNWRITTEN", 2 * len(frame(rollout(0), key=(0, 0), attempt=12 * "x"))
    )
    place = tmp_path / "worker_0"
    place.write_text("no folder")
    journal = Journal(tmp_path, "worker_0")
    journal.open(0)
    for number in range(4):
        journal.start_step(number)
        journal.write((0, number), rollout(0))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    place.unlink()
    journal.write((0, 4), rollout(0))
    journal.close()
    later = Journal(tmp_path)
    later.open(4)
    later.close()
    assert sorted(number for _, number in later.found) == [2, 3, 4]


class Instant:
    """A stream, an engine without servers, and a judge that gives every other rollout a point."""

    version, position, submitted = 5, 0, 0

    def draw(self, count: int) -> list[Prompt]:
        self.position += count
        return [Prompt(self.position - 1, (1,), "")]

    def submit(self, requests: Sequence[Request], params: object) -> list[Future[Rollout]]:
        self.submitted += len(requests)
        return [Future() for _ in requests]

    def abort(self, requests: object) -> None:
        """Nothing is in flight."""

    def start(self, pairs: Sequence[tuple[Prompt, Rollout]]) -> Future[list[Rollout]]:
        judged: Future[list[Rollout]] = Future()
        judged.set_result(
            [
                dataclasses.replace(r, reward=n % 2, verdict="wrong")
                for n, (_, r) in enumerate(pairs)
            ]
        )
        return judged


def test_a_step_after_two_resumes_takes_lost_rollouts_as_stale(tmp_path: Path):
    """Weights 5 sampled a group; the run went back to 3, made its own 5, and is resumed there."""
    options = (FULLY, "rollout.max_staleness=4", "rollout.rollout_batch_size=1")
    options += ("rollout.dynamic_sampling_metric=reward",)
    world: Any = Instant()
    config = override(Config(), list(options))
    sampled = dataclasses.replace(rollout(5, 5), sampling=sampling_digest(config))
    attempt(tmp_path, 0, *((0, number, sampled) for number in range(8)))
    attempt(tmp_path, 3)
    worker = RolloutWorker(config, world, world, Journal(tmp_path))
    dispatcher = PromptDispatcher(config, world, RolloutWorkers([0], worker))
    with contextlib.closing(worker):
        dispatcher.set_step(5, limit=1)
        dispatcher.enough(1).result(timeout=30)
        (group,) = dispatcher.next_groups()
    assert worker.counts()["journal_rollouts"] == len(group.rollouts) == 8
    assert all(found.versions.tolist() == [2, 2] for found in group.rollouts)
