"""The journal of finished rollouts: what a kill, a spoilt line and several resumes leave of it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from megatron_stare.loop.collection.journal import LIVES_NAME, Journal
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Rollout
from tests.loop.collection.test_collection import FULLY, rollout
from tests.small_run import rows_of, small_config


def live(directory: Path, step: int, *written: tuple[int, Rollout]) -> None:
    """One life of a run, from `step` on, that finishes these rollouts and is killed."""
    journal = Journal(directory)
    journal.open(step)
    for prompt, found in written:
        journal.turn(found.weight_version)
        journal.write((prompt, 0), found)
    journal.close()


def taken(directory: Path, step: int, prompt: int) -> Rollout | None:
    """What a life that begins at `step` finds of this prompt."""
    journal = Journal(directory)
    journal.open(step)
    journal.close()
    return journal.take((prompt, 0), oldest=-100)


@pytest.mark.parametrize("second", [5, 6, 3])
def test_rollouts_of_lost_weights_are_not_fresh_after_a_second_resume(second: int, tmp_path: Path):
    """The first life's weights 5 come after its 3, to which the second life went back; when the
    third begins, with weights 5 of the second, they are still others.
    """
    live(tmp_path, 0, (0, rollout(3, 3)), (1, rollout(5, 5)), (2, rollout(3, 5)))
    live(tmp_path, 3, (3, rollout(5)))
    found = {prompt: taken(tmp_path, second, prompt) for prompt in range(4)}
    assert found[0] == rollout(3, 3), "its weights are those of the checkpoint"
    assert found[1] == rollout(2, 2), "one step older than what both lives share"
    assert found[2] == rollout(3, 2)
    assert found[3] == (rollout(5) if second >= 5 else rollout(2))


def test_a_rollout_that_a_later_life_sampled_again_is_the_one_that_counts(tmp_path: Path):
    live(tmp_path, 0, (0, rollout(5, 5)))
    live(tmp_path, 3, (0, rollout(4)))
    assert taken(tmp_path, 4, 0) == rollout(4)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", None])
def test_without_its_table_of_lives_nothing_counts_as_fresh(content: bytes | None, tmp_path: Path):
    live(tmp_path, 0, (0, rollout(0)), (1, rollout(2)))
    if content is None:
        (tmp_path / LIVES_NAME).unlink()
    else:
        (tmp_path / LIVES_NAME).write_bytes(content)
    for _ in range(2):
        assert all(taken(tmp_path, 2, prompt).weight_version < 0 for prompt in (0, 1))  # type: ignore[union-attr]


def test_lines_from_before_lives_were_noted_are_read(tmp_path: Path):
    lines = [
        [n, 0, dataclasses.asdict(rollout(*versions))] for n, versions in ((1, (2, 2)), (2, (4,)))
    ]
    (tmp_path / "step_00000002.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    assert taken(tmp_path, 3, 1) == rollout(2, 2)
    assert taken(tmp_path, 3, 2) == taken(tmp_path, 4, 2) == rollout(2)


def line(**changes: object) -> bytes:
    fields = dataclasses.asdict(rollout(1, 1)) | changes
    return json.dumps([9, 0, "", fields]).encode()


SPOILT = {
    "torn": b'[9, 0, "", {"response_ids": [1, 2',
    "not UTF-8": b'[9, 0, "", {"text": "\xff\xfe"}]',
    "zeros of a power cut": bytes(200),
    "NaN": line(logprobs=(float("nan"), -1.0)),
    "infinite": line(logprobs=(-1.0, float("-inf"))),
    "too large": line().replace(b"-0.1234567890123", b"-1e999", 1),
    "null": line(logprobs=(None, -1.0)),
    "words for ids": line(response_ids=("a", "b")),
    "other lengths": line(logprobs=(-1.0,)),
    "an unknown field": line(colour="red"),
    "no list": b"{}",
    "no rollout": b"[9, 0, 1, 2]",
    "nested": b"[" * 100_000,
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_line_is_counted_and_the_rest_is_read(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    live(tmp_path, 1, (0, rollout(1, 1)))
    file = tmp_path / "step_00000001.jsonl"
    file.write_bytes(file.read_bytes() + SPOILT[name])
    live(tmp_path, 1, (1, rollout(1, 1)))
    caplog.clear()
    journal = Journal(tmp_path)
    journal.open(1)
    journal.close()
    assert journal.skipped == 1 and "1 of 3 lines cannot be used" in caplog.text
    assert len(caplog.records) == 1 and len(caplog.text) < 500
    assert journal.found == {(0, 0): rollout(1, 1), (1, 0): rollout(1, 1)}


def test_what_was_written_reaches_the_disk_once_per_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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
    journal.turn(1)
    journal.write((0, 8), rollout(0))
    journal.close()
    files = [name for name in flushed if name.startswith("step_")]
    assert files == ["step_00000000.jsonl", "step_00000001.jsonl"]
    assert tmp_path.name in flushed, "the new file's name"


def test_a_run_that_is_killed_twice_never_trains_on_lost_weights_as_fresh(
    tmp_path: Path, topology: Topology
):
    """Killed after step 3 with a checkpoint of step 1; then after step 3 with one of step 2."""
    options = (FULLY, "rollout.max_staleness=4", "run.save_interval=1", "train.num_rollout=6")
    for saved in (1, 2):
        run = Trainer(small_config(tmp_path, *options), topology)
        save, step = run.checkpoints.save, run.train_step

        def at(number: int, *others: object, saved: int = saved, save: object = save) -> None:
            if number <= saved:
                save(number, *others)  # type: ignore[operator]

        def killed(run: Trainer = run, step: object = step) -> dict[str, float]:
            if run.step == 4:
                raise InterruptedError
            return step()  # type: ignore[operator, no-any-return]

        run.checkpoints.save = at  # type: ignore[method-assign, assignment]
        run.train_step = killed  # type: ignore[method-assign]
        with pytest.raises(InterruptedError):
            run.run(Interrupt())
    whole = small_config(tmp_path, *options)
    assert Trainer(whole, topology).run(Interrupt())
    rows = rows_of(whole)
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert max(row.get("journal_rollouts", 0) for row in rows) > 0, "the journal was used"
    assert all(row.get("logprob_diff_max", 0) < 1e-4 for row in rows), (
        "what counts as fresh was sampled by the weights that train on it"
    )
    assert json.loads((Path(whole.run.dir) / "rollouts" / LIVES_NAME).read_text()).values()
