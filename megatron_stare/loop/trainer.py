"""The training loop, readable as one sentence:
rollout, judge, score, plan, update, sync, evaluate, checkpoint.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from megatron_stare.config import Config, NoSignalError, UserError
from megatron_stare.loop import assemble, random_state, run_directory
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.learn import Learner
from megatron_stare.loop.metrics import Stopwatch
from megatron_stare.losses import find_objective
from megatron_stare.policy.checkpoints.checkpoints import LATEST, Checkpoints
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.logbook import Logbook, progress

# Steps in a row without any signal before the run gives up: the data or the reward is at fault by
# then.
MAX_STEPS_WITHOUT_SIGNAL = 20


class Trainer:
    """One run: everything it needs, built once; `run` trains to the end or to an interrupt."""

    def __init__(self, config: Config, topology: Topology, load: str = LATEST) -> None:
        self.config, self.topology, self.load = config, topology, load
        self.directory = Path(config.run.dir)
        if topology.is_first:
            run_directory.claim(config)
        # an unknown name is refused before anything is loaded
        objective = find_objective(config.loss.name)
        parts = assemble.assemble(config, topology)
        self.actor, self.engine, self.collector, self.evaluator, self.judge = parts
        self.step = 0
        self.learner = Learner(config, objective, self.actor, topology)
        self.checkpoints = Checkpoints(self.actor, self.directory / "checkpoints", config.run)
        self.steps_without_signal = 0

    def run(self, interrupt: Interrupt) -> bool:
        """Train up to train.num_rollout steps, from the run's newest checkpoint if it has one.
        True when complete.
        """
        first, total = self.topology.is_first, self.config.train.num_rollout
        lock = run_directory.locked(self.directory) if first else contextlib.nullcontext()
        closing = contextlib.closing
        with lock, closing(self.judge), closing(self.engine), closing(self.collector):
            self._resume()
            return self._train(interrupt, total, first)

    def _train(self, interrupt: Interrupt, total: int, first: bool) -> bool:
        with (
            self._logbook() as logbook,
            progress(self.directory.name, total, completed=self.step, enabled=first) as bar,
        ):
            while self.step < total and not interrupt.asked():
                metrics = self._step_or_save()
                if logbook:
                    logbook.write(self.step, metrics)
                bar.advance(
                    1, **{key: metrics[key] for key in ("entropy", "reward") if key in metrics}
                )
                self.checkpoints.poll()
                if self._checkpoint_due():
                    self._save()
            self._save_last()
        return self.step >= total

    def _step_or_save(self) -> dict[str, float]:
        try:
            return self.train_step()
        except NoSignalError:
            self._save_last()
            raise

    def train_step(self) -> dict[str, float]:
        """One rollout batch: the sentence of the module's first line."""
        watch = Stopwatch()
        with watch("rollout"):
            collected = self.collector.collect(self.step)
            self.engine.release_memory()
        metrics = collected.metrics | self.learner.step(
            collected.groups, self.step, collected.signal, watch
        )
        self.step += 1
        with watch("settle"):
            self.collector.settle()
        with watch("sync"):
            self.engine.load_weights(self.actor.weights(), self.step)
        if self.evaluator.due(self.step):
            self.collector.begin(self.step)
            with watch("evaluate"):
                metrics |= self.evaluator.evaluate()
        self._note_signal(collected.signal)
        return (
            metrics
            | {"skipped": float(not collected.signal)}
            | self.engine.counts()
            | watch.seconds()
        )

    def _note_signal(self, signal: bool) -> None:
        self.steps_without_signal = 0 if signal else self.steps_without_signal + 1
        if self.steps_without_signal >= MAX_STEPS_WITHOUT_SIGNAL:
            raise NoSignalError(
                f"no group had differing rewards for {MAX_STEPS_WITHOUT_SIGNAL} steps in a row, so "
                "there is nothing to learn from; check "
                f"scoring.reward={self.config.scoring.reward!r} and data.prompt_data's difficulty"
            )

    def _save_last(self) -> None:
        """What a run must leave behind to go on from. UserError: it could not be written."""
        self.checkpoints.finish()
        if self.step and self.checkpoints.saved != self.step:
            self._save()
            self.checkpoints.finish()
        if self.checkpoints.failure:
            raise UserError(
                f"the last checkpoint was not written ({self.checkpoints.failure}); make room and "
                "go on"
            )

    def _checkpoint_due(self) -> bool:
        interval = self.config.run.save_interval
        return interval > 0 and self.step % interval == 0

    def _save(self) -> None:
        state = {
            "step": self.step,
            "loss_state": self.learner.state,
            "steps_without_signal": self.steps_without_signal,
            "collector": self.collector.state(),
            "random_states": self.topology.gather(random_state.capture()),
        }
        self.checkpoints.save(self.step, state)

    def _resume(self) -> None:
        newest = self.checkpoints.find(self.load)
        if newest is not None:
            state = self.checkpoints.load(newest)
            self.step, self.learner.state = state["step"], state["loss_state"]
            self.steps_without_signal = state["steps_without_signal"]
            self.collector.load_state(state["collector"])
            random_state.restore(state["random_states"], self.topology.rank)
        self.engine.load_weights(self.actor.weights(), self.step)

    def _logbook(self) -> contextlib.AbstractContextManager[Logbook | None]:
        if not self.topology.is_first:
            return contextlib.nullcontext()
        return Logbook(
            self.directory, resume_from_step=self.step, tensorboard=self.config.run.tensorboard
        )
