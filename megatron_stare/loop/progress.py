"""A run's progress, and the limits of steps without an update in a row."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron_stare.collect.rollout_buffer import Collected, solved
from megatron_stare.config import (
    Config,
    EngineError,
    NonFiniteError,
    NoSignalError,
    RunAlarm,
    UserError,
)
from megatron_stare.loop.alarms import Alarms
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group
from megatron_stare.reporting import heartbeat

# Errors that end a run; every rank raises them, so that all can save together.
FATAL = (UserError, RunAlarm, FloatingPointError, EngineError)
# After this many steps in a row without signal the run ends: data or reward must be at fault.
MAX_STEPS_WITHOUT_SIGNAL = 20


@dataclass
class Progress:
    """The loop's part of a checkpoint, next to the learner's and the collector's state."""

    alarms: Alarms
    step: int = 0
    steps_without_signal: int = 0
    nonfinite: int = 0  # steps in a row whose statistics or gradient were not finite
    # Metrics of a trained step that the logbook lacks: its evaluation, or sending its weights to
    # the engine, was interrupted.
    unwritten: dict[str, float] = field(default_factory=dict)
    solved: str = ""  # why nothing is left to learn
    # Entropy of the last step that was measured, and its predicted change.
    before: dict[str, float] = field(default_factory=dict)
    _random_state: dict[str, Any] | None = None  # at the start of the current step

    @property
    def written(self) -> int:
        """The last step whose line was written."""
        return self.step - bool(self.unwritten)

    def has_next(self, total: int) -> bool:
        """There is a step to take or a line to write, and neither an alarm nor a solved task ends
        the run.
        """
        left = self.step < total or bool(self.unwritten)
        return left and not self.alarms.stopping and not self.solved

    def start_step(self) -> None:
        """Keep the random state: an unfinished step is repeated from it."""
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

    def count_signal(self, collected: Collected, config: Config) -> None:
        """After too many steps in a row without signal the task is `solved`, or else NoSignalError
        is raised.
        """
        self.steps_without_signal = 0 if collected.signal else self.steps_without_signal + 1
        if self.steps_without_signal >= MAX_STEPS_WITHOUT_SIGNAL:
            if sentence := solved(collected.groups, config.rollout):
                self.solved = sentence
                return
            raise NoSignalError(
                f"no group had differing rewards for {MAX_STEPS_WITHOUT_SIGNAL} steps in a row, so "
                f"there is nothing to learn from; check scoring.reward={config.scoring.reward!r} "
                "and data.prompt_data's difficulty"
            )

    def count_nonfinite(
        self, error: NonFiniteError | None, config: Config, *, printed: bool
    ) -> None:
        """Count steps in a row without an update, each for its `error`; a step without error
        resets the count. NonFiniteError after train.max_nonfinite_steps in a row.
        """
        if error is None:
            self.nonfinite = 0
            return
        self.nonfinite += 1
        self.alarms.suspect("nonfinite", error.rollout)
        if printed:
            print(f"step {self.step + 1}: no update: {error}", file=sys.stderr, flush=True)
        if self.nonfinite >= config.train.max_nonfinite_steps:
            raise NonFiniteError(
                f"{self.nonfinite} steps in a row were not finite "
                f"(train.max_nonfinite_steps={config.train.max_nonfinite_steps}): {error}"
            ) from error

    def state(self, topology: Topology) -> dict[str, Any]:
        """For a checkpoint. Collective."""
        return {
            "step": self.step,
            "steps_without_signal": self.steps_without_signal,
            "nonfinite": self.nonfinite,
            "unwritten": self.unwritten,
            "before": self.before,
            "alarms": self.alarms.state(),
            "random_states": topology.gather(self._random_state or random_state()),
        }

    def load_state(self, state: dict[str, Any], topology: Topology) -> None:
        """Restore what `state` returned."""
        self.step = state["step"]
        self.steps_without_signal = state["steps_without_signal"]
        self.nonfinite = state["nonfinite"]
        self.unwritten = state["unwritten"]
        self.before = state["before"]
        self.alarms.load_state(state["alarms"])
        restore_random_state(state["random_states"], topology.rank)


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
