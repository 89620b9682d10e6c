"""Records of every step's rollouts in the run's directory, from which a step is repeated.

    records/<attempt>.yaml                         the configuration of one start of the run
    records/step_00000012/step.json             of the step that metrics.jsonl calls 12
    records/step_00000012/<attempt>_rank_00000.frames  the groups that a rank held, judged

9 bytes a token, 13 where its versions differ, and the text; written once. A step that is taken
again replaces its record: step.json, which is written last, names the attempt whose files count.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import uuid
from pathlib import Path

from megatron_stare import config as configuration
from megatron_stare.collect.batch import Collected
from megatron_stare.collect.journal import group_frames, groups_in
from megatron_stare.collect.rounds import all_gather_groups
from megatron_stare.config import Config, UserError
from megatron_stare.loop.run_directory import (
    HEAD_NAME,
    Head,
    folder_of,
    recorded_steps,
    records_directory,
)
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.checkpoints.names import listed, step_of
from megatron_stare.policy.topology import Topology, agreed
from megatron_stare.records import EVERY_RANK, Group
from megatron_stare.system import BestEffort, atomic_write


class Recorder:
    """Writes the record of every step that this start of the run takes.

    What cannot be written (a full disk) is a warning: the run does not need it.
    """

    def __init__(self, config: Config, topology: Topology) -> None:
        self.config, self.topology = config, topology
        self.directory = records_directory(Path(config.run.dir))
        self.attempt = topology.gather(uuid.uuid4().hex[:12])[0]
        self._best_effort = BestEffort(f"steps in {self.directory} cannot be replayed")

    def write(self, step: int, collected: Collected, actor: Actor) -> None:
        """Keep what step `step` (as metrics.jsonl counts) trains on, and what the actor is like
        before it. Collective.
        """
        if self.config.run.record == "none":
            return
        folder, topology = folder_of(self.directory, step), self.topology
        weights = actor.fingerprint()
        holders = [0 if group.holder == EVERY_RANK else group.holder for group in collected.groups]
        own = [place for place, holder in enumerate(holders) if holder == topology.rank]
        written = self._best_effort(lambda: self._write_groups(folder, collected.groups, own))
        if not all(topology.gather(written)) or not topology.is_first:
            return
        head = Head(
            step, self.attempt, topology.world_size, tuple(holders), collected.signal, weights
        )
        self._best_effort(lambda: self._write_head(folder, head))

    def _write_groups(self, folder: Path, groups: tuple[Group, ...], own: list[int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        frames = group_frames((place, groups[place]) for place in own)
        _frames_file(folder, self.attempt, self.topology.rank).write_bytes(b"".join(frames))

    def _write_head(self, folder: Path, head: Head) -> None:
        written = self.directory / f"{self.attempt}.yaml"
        if not written.exists():
            configuration.dump(self.config, written)
        atomic_write(folder / HEAD_NAME, json.dumps(dataclasses.asdict(head)) + "\n")
        for file in folder.glob("*.frames"):
            if not file.name.startswith(self.attempt):
                file.unlink()
        if self.config.run.record == "replayable":
            self._forget()

    def _forget(self) -> None:
        """Remove the records of steps that no checkpoint leads to any more."""
        checkpoints = listed(Path(self.config.run.dir) / "checkpoints")
        if len(checkpoints) < max(1, self.config.run.keep_last):
            return
        oldest = step_of(checkpoints[0])
        for step in recorded_steps(self.directory):
            if step <= oldest:
                shutil.rmtree(folder_of(self.directory, step))


def read_groups(directory: Path, head: Head, topology: Topology) -> list[Group]:
    """The groups that the step trained on, as its ranks had them. Collective. UserError: a file is
    missing or damaged.
    """
    own: list[Group] = []

    def read() -> None:
        own.extend(
            _read_own(_frames_file(folder_of(directory, head.step), head.attempt, topology.rank))
        )
        expected = sum(holder == topology.rank for holder in head.holders)
        if len(own) != expected:
            raise UserError(
                f"the record of step {head.step} has {len(own)} of the {expected} groups of rank "
                f"{topology.rank}; choose another step"
            )

    agreed(topology, read)
    each = [iter(groups) for groups in all_gather_groups(own, topology)]
    return [next(each[holder]) for holder in head.holders]


def recorded_groups(directory: Path, head: Head) -> list[Group]:
    """All ranks' groups of a recorded step, in one process. UserError as `read_groups`."""
    folder = folder_of(directory, head.step)
    ranks = {*head.holders}
    own = {rank: iter(_read_own(_frames_file(folder, head.attempt, rank))) for rank in ranks}
    found = [group for rank in head.holders if (group := next(own[rank], None))]
    if len(found) < len(head.holders):
        raise UserError(
            f"the record of step {head.step} has {len(found)} of {len(head.holders)} groups; "
            "choose another step"
        )
    return found


def _read_own(file: Path) -> list[Group]:
    try:
        return groups_in(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); choose another step") from None


def _frames_file(folder: Path, attempt: str, rank: int) -> Path:
    return folder / f"{attempt}_rank_{rank:05d}.frames"
