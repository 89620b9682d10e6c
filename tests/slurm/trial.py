"""A trial: one run on a real Slurm through a seeded script of faults, each at a step of its own,
and what each of them cost.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_stare.collect.journal import groups_in
from megatron_stare.loop.run_directory import recorded_steps, records_directory
from megatron_stare.records import Group
from tests.slurm.cluster import Cluster, Job, Run

PATIENCE_SECONDS = 600.0
OVER = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED")


@dataclasses.dataclass(frozen=True)
class Event:
    """A fault that happens when the run has reached a given step."""

    step: int
    name: str


@dataclasses.dataclass(frozen=True)
class Survived:
    """The cost of an event: the number of restarts of the job since, by Slurm or by hand, and the
    seconds until the second step after it was written.
    """

    event: Event
    restarts: int
    resubmitted: bool
    seconds: float

    def __str__(self) -> str:
        how = "resubmitted" if self.resubmitted else f"{self.restarts} requeues"
        return f"{self.event.name} at step {self.event.step}: {how}; {self.seconds:.1f} s"


def script(seed: int, names: Sequence[str], first: int, every: int) -> list[Event]:
    """All events once, in an order that the seed determines, `every` steps apart."""
    order = random.Random(seed).sample(list(names), len(names))
    return [Event(first + every * place, name) for place, name in enumerate(order)]


class Trial:
    """Keeps a job running until it is complete; resubmits a job that Slurm does not requeue."""

    def __init__(self, cluster: Cluster, run: Run, submit: Callable[[], Job]) -> None:
        self.cluster, self.run, self.submit = cluster, run, submit
        self.job = submit()
        self.resubmissions = 0

    def run_through(
        self, events: Sequence[Event], faults: Mapping[str, Callable[[Trial], None]], steps: int
    ) -> list[Survived]:
        """The events, each followed up to the next step; then the rest of the run."""
        survived = []
        for event in events:
            self.until_step(event.step)
            restarts, resubmissions = self._restarts(), self.resubmissions
            begun = time.monotonic()
            faults[event.name](self)
            self.until_step(min(len(self.run.rows()) + 2, steps))  # it may be ahead
            again = self.resubmissions > resubmissions
            since = self._restarts() - (0 if again else restarts)
            survived.append(Survived(event, since, again, time.monotonic() - begun))
        self.until_step(steps)
        self.job.ended()
        return survived

    def until_step(self, step: int) -> None:
        """Wait; a job that has ended earlier is submitted again."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(self.run.rows()) < step:
            state = self.job["JobState"]
            if state in OVER and len(self.run.rows()) < step:
                assert state != "COMPLETED", self.job.text
                self.job, self.resubmissions = self.submit(), self.resubmissions + 1
            assert time.monotonic() < deadline, f"{state}: {self.job.text}"
            time.sleep(0.3)

    def _restarts(self) -> int:
        return int(self.job["Restarts"])


def trained_groups(run: Path) -> dict[int, list[Group]]:
    """The records of each step."""
    found: dict[int, list[Group]] = {}
    for step in recorded_steps(records_directory(run)):
        folder = records_directory(run) / f"step_{step:08d}"
        content = b"".join(file.read_bytes() for file in sorted(folder.glob("*.frames")))
        found[step] = groups_in(content)
    return found
