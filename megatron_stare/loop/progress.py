"""A run's progress, the limits of steps without an update in a row, and what is saved of both."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_stare.collect.batch import Collected, seen_rewards, solved
from megatron_stare.collect.rollout_buffer import RolloutBuffer
from megatron_stare.config import (
    Config,
    EngineError,
    NonFiniteError,
    NoSignalError,
    RunAlarm,
    UserError,
)
from megatron_stare.loop import run_directory
from megatron_stare.loop.alarms import Alarms
from megatron_stare.loop.learn import Learner
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.checkpoints.checkpoints import Checkpoints
from megatron_stare.policy.checkpoints.names import LATEST
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group
from megatron_stare.reporting import heartbeat
from megatron_stare.reporting.live import training
from megatron_stare.reporting.logbook import open_logbook
from megatron_stare.reporting.provenance import record_start
from megatron_stare.system import BestEffort, return_memory

# Errors that end a run; every rank raises them, so that all can save together.
FATAL = (UserError, RunAlarm, FloatingPointError, EngineError)
# After this many steps in a row without signal the run ends: data or reward must be at fault.
MAX_STEPS_WITHOUT_SIGNAL = 20
# Steps. On a CPU the allocator keeps freed blocks that later requests do not fit, and the process
# grows.
RETURN_INTERVAL = 10


# The attributes of Progress that a checkpoint holds as they are.
_SAVED = ("step", "steps_without_signal", "nonfinite", "unwritten", "before")


class Progress:
    """The loop's part of a checkpoint, next to the learner's and the collector's state."""

    def __init__(self, config: Config, topology: Topology, target: float | None) -> None:
        """`target` is the run's target entropy [nats], None if it has none."""
        self.config, self.topology, self.directory = config, topology, Path(config.run.dir)
        self.alarms = Alarms(config, topology, target)
        self.step = 0
        self.steps_without_signal = 0
        self.nonfinite = 0  # steps in a row whose statistics or gradient were not finite
        # Metrics of a trained step that the logbook lacks: its evaluation, or sending its weights
        # to the engine, was interrupted.
        self.unwritten: dict[str, float] = {}
        self.solved = ""  # why nothing is left to learn
        # Entropy of the last step that was measured, and its predicted change.
        self.before: dict[str, float] = {}
        self._random_state: dict[str, Any] | None = None  # at the start of the current step

    @property
    def written(self) -> int:
        """The last step whose line was written."""
        return self.step - bool(self.unwritten)

    @property
    def has_next(self) -> bool:
        """Whether there is a step to take or a line to write, and neither an alarm nor a solved
        task ends the run.
        """
        left = self.step < self.config.train.num_rollout or bool(self.unwritten)
        return left and not self.alarms.stopping and not self.solved

    def end(self) -> bool:
        """Whether the run has nothing to continue. RunAlarm: an alarm ended it."""
        self.alarms.end()
        if self.solved and self.topology.is_first:
            run_directory.end_solved(self.directory, self.solved, self.step)
        finished = self.step >= self.config.train.num_rollout or bool(self.solved)
        return finished and not self.unwritten

    def start_step(self) -> None:
        """Keep the random state: an unfinished step is repeated from it. Every few steps, return
        unused memory.
        """
        if self.step and self.step % RETURN_INTERVAL == 0:
            return_memory()
        heartbeat.start_step(self.step + 1)
        self._random_state = random_state()

    def end_step(self, metrics: dict[str, float], groups: Sequence[Group]) -> dict[str, float]:
        """Count the step. Returns its metrics with those of the alarms, and with the entropy change
        predicted for the last step next to the one measured now, on other prompts.
        """
        metrics = metrics | self.alarms.look(groups)
        if self.before and "entropy" in metrics:
            realised = metrics["entropy"] - self.before["entropy"]
            metrics = metrics | {
                "entropy_change/previous_predicted": self.before["predicted"],
                "entropy_change/previous_realised": realised,
            }
        self.before = {}
        if "entropy_change/predicted" in metrics:
            predicted = metrics["entropy_change/predicted"]
            self.before = {"entropy": metrics["entropy"], "predicted": predicted}
        self.step, self.unwritten, self._random_state = self.step + 1, metrics, None
        return metrics

    def count_signal(self, collected: Collected) -> None:
        """Count steps without signal: after too many in a row the task is `solved`, or
        NoSignalError is raised.
        """
        config = self.config
        self.steps_without_signal = 0 if collected.signal else self.steps_without_signal + 1
        if self.steps_without_signal >= MAX_STEPS_WITHOUT_SIGNAL:
            if sentence := solved(collected.groups, config.rollout):
                self.solved = sentence
                return
            raise NoSignalError(
                f"no group had a learning signal for {MAX_STEPS_WITHOUT_SIGNAL} steps in a row "
                f"({seen_rewards(config, collected.groups)}); check "
                f"scoring.reward={config.scoring.reward!r} and data.prompt_data's difficulty"
            )

    def count_nonfinite(self, error: NonFiniteError | None) -> None:
        """Count steps in a row without an update, each for its `error`; a step without error
        resets the count. NonFiniteError after train.max_nonfinite_steps in a row.
        """
        if error is None:
            self.nonfinite = 0
            return
        self.nonfinite, most = self.nonfinite + 1, self.config.train.max_nonfinite_steps
        self.alarms.suspect("nonfinite", error.rollout)
        if self.topology.is_first:
            print(f"step {self.step + 1}: no update: {error}", file=sys.stderr, flush=True)
        if self.nonfinite >= most:
            raise NonFiniteError(
                f"{self.nonfinite} steps in a row were not finite "
                f"(train.max_nonfinite_steps={most}): {error}"
            ) from error

    @contextmanager
    def lines(self) -> Iterator[Callable[[dict[str, float]], None]]:
        """A function that writes a step's metrics: into the logbook and on the terminal on the
        first rank, and to the alarms.
        """
        directory, total = self.directory, self.config.train.num_rollout
        first = self.topology.is_first
        with (
            open_logbook(self.config.run, self.written, enabled=first) as logbook,
            training(directory.name, total, completed=self.step, enabled=first) as live,
        ):
            if first and not self.has_next:
                run_directory.say_complete(directory, self.step, total)
            elif first:
                kept = BestEffort("the report lacks this start")
                kept(lambda: record_start(directory, self.topology.world_size))

            def write(metrics: dict[str, float]) -> None:
                if logbook:
                    logbook.write(self.step, metrics)
                live.step(metrics | {"step": self.step})
                self.alarms.watch(self.step, metrics)

            yield write

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint. Collective."""
        states = self.topology.gather(self._random_state or random_state())
        kept = {name: getattr(self, name) for name in _SAVED}
        return kept | {"alarms": self.alarms.state(), "random_states": states}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        for name in _SAVED:
            setattr(self, name, state[name])
        self.alarms.load_state(state["alarms"])
        restore_random_state(state["random_states"], self.topology.rank)


class SavedRun:
    """The checkpoints of a run: model, optimizer and schedule, and the state of the loop. Every
    method is collective.
    """

    def __init__(
        self,
        progress: Progress,
        actor: Actor,
        learner: Learner,
        collector: RolloutBuffer,
        load: str = LATEST,
    ) -> None:
        self.progress, self.learner, self.collector, self.load = progress, learner, collector, load
        directory = progress.directory / "checkpoints"
        self.checkpoints = Checkpoints(actor, directory, actor.config.run)

    def save_due(self, metrics: Mapping[str, float]) -> None:
        """Save where run.save_interval asks for it; finish a save in the background. `metrics`: of
        the last step.
        """
        self.checkpoints.poll()
        self.checkpoints.note(self.progress.step, metrics)
        if self.checkpoints.due(self.progress.step):
            with heartbeat.phase("save"):
                self.checkpoints.save(self.progress.step, self._state())

    def save_last(self) -> None:
        """Save the last step, unless it is saved already. UserError: it could not be written."""
        with heartbeat.phase("save"):
            self.checkpoints.save_last(self.progress.step, self._state)

    def resume(self) -> None:
        """Restore the checkpoint that `load` asks for, if there is any."""
        newest = self.checkpoints.find(self.load)
        if newest is not None:
            state = self.checkpoints.load(newest)
            self.learner.resume(state["loss_state"], newest)
            self.collector.load_state(state["collector"])
            self.progress.load_state(state)
        self.progress.alarms.forget_after(self.progress.written)

    def _state(self) -> dict[str, Any]:
        loop = {"loss_state": self.learner.state, "collector": self.collector.state()}
        return loop | self.progress.state()


def random_state() -> dict[str, Any]:
    """The random state of a rank: Python, numpy, torch (CPU and GPU) and Megatron's own generators.

    Rollouts and shuffles draw from seeds of their own; this serves whatever else may sample
    (dropout, a user's reward). Plain containers and tensors, as a checkpoint can hold them."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 (what others draw from)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": _tracker().get_states(),
    }


def restore_random_state(states: list[dict[str, Any]], rank: int) -> None:
    """This rank's state of a run on as many ranks;
    on another number of ranks every one keeps its fresh seeds.
    """
    if len(states) != torch.distributed.get_world_size():
        return
    state = states[rank]
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    _tracker().set_states(state["megatron"])


def _tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()
