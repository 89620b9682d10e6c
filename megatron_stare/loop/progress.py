"""How far a run is, and when it has gone wrong too often to go on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_stare.config import (
    Config,
    EngineError,
    NonFiniteError,
    NoSignalError,
    RunAlarm,
    UserError,
)
from megatron_stare.loop import random_state
from megatron_stare.loop.alarms import Alarms
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group
from megatron_stare.reporting import heartbeat

# What ends a run, raised on every rank alike, so that all can save together.
FATAL = (UserError, RunAlarm, FloatingPointError, EngineError)
# Steps in a row without any signal before the run gives up: the data or the reward is at fault by
# then.
MAX_STEPS_WITHOUT_SIGNAL = 20


@dataclass
class Progress:
    """What a checkpoint keeps of the loop, beside the learner's and the collector's state.

    `unwritten` are the metrics of a trained step whose line is not in the logbook yet: its
    evaluation, or the weights' way to the engine, was interrupted. `before` is the entropy of the
    last step that was measured, and the change that was predicted of it.
    """

    alarms: Alarms
    step: int = 0
    steps_without_signal: int = 0
    nonfinite: int = 0  # steps in a row whose statistics or gradient were not finite
    unwritten: dict[str, float] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)
    _random_state: dict[str, Any] | None = None  # of before the step under way

    @property
    def written(self) -> int:
        """The last step whose line was written: one that is not belongs to the step that the
        checkpoint holds.
        """
        return self.step - bool(self.unwritten)

    def goes_on(self, total: int) -> bool:
        """Whether there is a step to take or a line to write, and no alarm ends the run."""
        return (self.step < total or bool(self.unwritten)) and not self.alarms.stopping

    def begin_step(self) -> None:
        """Keep the random state: a step that is not finished is taken again from it."""
        heartbeat.start_step(self.step + 1)
        self._random_state = random_state.capture()

    def end_step(self, metrics: dict[str, float], groups: Sequence[Group]) -> dict[str, float]:
        """The weights are those of the next version now. Returns the metrics, and beside them what
        the alarms see in the groups, and what was predicted of the last step and came of it, on
        other prompts, in this one.
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

    def note_signal(self, signal: bool, config: Config) -> None:
        """NoSignalError after too many steps in a row without any."""
        self.steps_without_signal = 0 if signal else self.steps_without_signal + 1
        if self.steps_without_signal >= MAX_STEPS_WITHOUT_SIGNAL:
            raise NoSignalError(
                f"no group had differing rewards for {MAX_STEPS_WITHOUT_SIGNAL} steps in a row, so "
                f"there is nothing to learn from; check scoring.reward={config.scoring.reward!r} "
                "and data.prompt_data's difficulty"
            )

    def note_nonfinite(self, error: NonFiniteError, config: Config, *, told: bool) -> None:
        """Count a step without an update, and say so if `told`; NonFiniteError after
        train.max_nonfinite_steps in a row.
        """
        self.nonfinite += 1
        self.alarms.suspect("nonfinite", error.rollout)
        if told:
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
            "random_states": topology.gather(self._random_state or random_state.capture()),
        }

    def load_state(self, state: dict[str, Any], topology: Topology) -> None:
        """What `state` gave; version 0.1.0 kept neither `nonfinite` nor `unwritten`."""
        self.step, self.steps_without_signal = state["step"], state["steps_without_signal"]
        self.nonfinite, self.unwritten = state.get("nonfinite", 0), state.get("unwritten", {})
        self.before = state.get("before", {})
        self.alarms.load_state(state.get("alarms", {}))
        random_state.restore(state["random_states"], topology.rank)
