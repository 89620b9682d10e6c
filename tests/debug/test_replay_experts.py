"""Routing replay through whole runs: journal, SIGKILL, resume, record, replay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_stare.collect.journal import Frame, Key, journal_directory, read_frames
from megatron_stare.config import Config
from megatron_stare.debug.replay import Replay
from megatron_stare.loop.record import read_groups
from megatron_stare.loop.run_directory import read_head, recorded_steps, records_directory
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Rollout
from tests.forked import Command, train
from tests.loop.test_trainer import wait_for_step
from tests.rollout.sglang.test_requests_streaming import wait_until
from tests.small_run import rows_of, small_config
from tests.tiny_models import tiny_config, write_checkpoint

STEPS = 8
SETTINGS = ("rollout.asynchrony=fully_async", "rollout.max_staleness=3")
SETTINGS += ("policy.routing_replay=rollout", f"train.num_rollout={STEPS}", "run.record=all")
SETTINGS += ("run.save_interval=1", "run.keep_every=1")


def config_of(directory: Path, *settings: str) -> Config:
    """A run of a model with experts in three of its four layers."""
    config = small_config(directory, *SETTINGS, *settings)
    shape = {"vocab_size": 257, "max_position_embeddings": 64}
    write_checkpoint(directory / "model", tiny_config("qwen3_moe", **shape))
    return config


def journaled(config: Config) -> dict[Key, Rollout]:
    """The finished rollouts of a run on its disk."""
    files = journal_directory(config).rglob("*.frames")
    found = [each for file in sorted(files) for each in read_frames(file.read_bytes())]
    return {
        tuple(each.extra["key"]): each.record
        for each in found
        if isinstance(each, Frame) and isinstance(each.record, Rollout)
    }


def kill_midway(config: Config, step: int, child: Command) -> dict[Key, Rollout]:
    """Kill the run after `step`, when its journal has rollouts that no checkpoint has; the rollouts
    of the journal at that time.
    """
    wait_for_step(config, step, child)
    latest = Path(config.run.dir) / "checkpoints/latest"
    name, known = latest.read_text(), journaled(config).keys()

    def there_is_more() -> bool:
        nonlocal name, known
        if latest.read_text() != name:
            name, known = latest.read_text(), journaled(config).keys()
        return bool(journaled(config).keys() - known) or child.code is not None

    wait_until(there_is_more)
    child.kill()
    assert len(rows_of(config)) < config.train.num_rollout, child.output
    found = journaled(config)
    assert found and all(rollout.routing_bytes for rollout in found.values())
    return found


def recorded(config: Config, topology: Topology) -> Iterator[tuple[int, str, int, Rollout]]:
    """Step, attempt, positions that the engine read, and rollout of all that was trained on."""
    records = records_directory(Path(config.run.dir))
    for step in recorded_steps(records):
        head = read_head(records, step)
        for group in read_groups(records, head, topology):
            for rollout in group.rollouts:
                assert isinstance(rollout, Rollout)
                read = len(group.prompt.token_ids) + rollout.length - 1
                yield step, head.attempt, read, rollout


def check_whole(config: Config, topology: Topology, width: int) -> None:
    """Every recorded rollout has the experts of all its positions, `width` bytes each, and every
    step is repeated bit for bit.
    """
    rows = rows_of(config)
    assert [row["step"] for row in rows] == recorded_steps(records_directory(Path(config.run.dir)))
    for row in rows:
        assert row["routing_missing"] == 0 < row["routing_agreement"] <= 1
    for step, _, read, rollout in recorded(config, topology):
        assert rollout.routing_bytes == width * read, step
    for row in rows:
        for compared in Replay(Path(config.run.dir), row["step"], topology).steps():
            assert compared.identical, compared.differing


def check_taken(config: Config, before: dict[Key, Rollout], topology: Topology) -> None:
    """A later attempt trained on rollouts of the journal, with the experts that it has of them."""
    known = {rollout.logprobs.tobytes(): rollout for rollout in before.values()}
    attempts = list(dict.fromkeys(attempt for _, attempt, _, _ in recorded(config, topology)))
    assert len(attempts) == 2
    again = [
        (rollout, known[rollout.logprobs.tobytes()])
        for _, attempt, _, rollout in recorded(config, topology)
        if attempt == attempts[1] and rollout.logprobs.tobytes() in known
    ]
    assert again
    for rollout, journal in again:
        assert journal.routing_bytes > 0 and rollout.routing.tolist() == journal.routing.tolist()
    assert sum(row.get("journal_rollouts", 0) for row in rows_of(config)) > 0


@pytest.mark.slow
def test_a_killed_run_resumes_with_its_recorded_experts(tmp_path: Path, topology: Topology):
    config = config_of(tmp_path)
    before = kill_midway(config, 3, train(config))
    again = train(config)
    assert again.wait(300) == 0, again.output
    check_whole(config, topology, width=3 * 3)
    check_taken(config, before, topology)
