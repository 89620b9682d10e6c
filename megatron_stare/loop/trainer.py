"""The training loop: collect rollouts, learn from them, sync weights, evaluate, checkpoint."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from megatron_stare.config import Config, TaskSolved
from megatron_stare.loop import assemble, run_directory
from megatron_stare.loop.alarms import Alarms
from megatron_stare.loop.interrupt import Interrupt, Interrupted
from megatron_stare.loop.metrics import Stopwatch, gpu_metrics
from megatron_stare.loop.prepare import target_of
from megatron_stare.loop.progress import FATAL, Progress
from megatron_stare.loop.recording.record import Recorder
from megatron_stare.policy.checkpoints.checkpoints import LATEST, Checkpoints
from megatron_stare.policy.huggingface.shape import shape_of
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.heartbeat import phase
from megatron_stare.reporting.live import training
from megatron_stare.reporting.logbook import open_logbook


class Trainer:
    """One run: everything it needs, built once; `run` trains to the end or to an interrupt."""

    def __init__(self, config: Config, topology: Topology, load: str = LATEST) -> None:
        self.config, self.topology, self.load = config, topology, load
        self.directory = Path(config.run.dir)
        if topology.is_first:
            run_directory.claim(config)
        parts = assemble.assemble(config, topology)
        self.actor, self.engine, self.collector, self.evaluator, self.judge, self.learner = parts
        target = target_of(config, self.learner.objective)
        self.shape = shape_of(self.actor.hf)
        self.progress = Progress(Alarms(config, topology, target))
        self.recorder, self.interrupt = Recorder(config, topology), Interrupt()
        self.checkpoints = Checkpoints(self.actor, self.directory / "checkpoints", config.run)

    @property
    def step(self) -> int:
        """Rollout batches trained."""
        return self.progress.step

    def run(self, interrupt: Interrupt) -> bool:
        """Train to train.num_rollout steps, from the newest checkpoint if any. True: complete."""
        first, self.interrupt = self.topology.is_first, interrupt
        lock = run_directory.locked(self.directory) if first else nullcontext()
        with lock, closing(self.judge), closing(self.engine), closing(self.collector):
            if first:
                run_directory.reopen(self.directory)
            with phase("resume"):
                self._resume()
            return self._train(self.config.train.num_rollout, self.directory.name, first)

    def _train(self, total: int, name: str, first: bool) -> bool:
        with (
            open_logbook(self.config.run, self.progress.written, enabled=first) as logbook,
            training(name, total, completed=self.step, enabled=first) as live,
        ):
            if first and not self.progress.has_next(total):
                run_directory.say_complete(self.directory, self.step, total)
            while self.progress.has_next(total):
                try:
                    metrics = self._step()
                except Interrupted:
                    break
                except TaskSolved as solved:
                    self.progress.solved = str(solved)
                    break
                if logbook:
                    logbook.write(self.step, metrics)
                live.step(metrics | {"step": self.step})
                self.progress.alarms.watch(self.step, metrics)
                self.checkpoints.poll()
                if self.checkpoints.due(self.step):
                    with phase("save"):
                        self.checkpoints.save(self.step, self._state())
            self._save_last()
        self.progress.alarms.end()
        if self.progress.solved and first:
            run_directory.end_solved(self.directory, self.progress.solved, self.step)
        complete = self.step >= total or bool(self.progress.solved)
        return complete and not self.progress.unwritten

    def _step(self) -> dict[str, float]:
        """The metrics of one step and, where it is due, of its evaluation. An error that ends the
        run saves the last good step first. Interrupted: there is no line to write.
        """
        self.interrupt.check()
        try:
            metrics = self.progress.unwritten or self.train_step()
            if self.evaluator.due(self.step):
                metrics = self._evaluated(metrics)
        except TaskSolved:
            raise
        except FATAL:
            self.interrupt.check()
            self._save_last()
            raise
        self.progress.unwritten = {}
        return metrics

    def train_step(self) -> dict[str, float]:
        """One step: collect, record, learn, finish, sync. Interrupted: before its updates."""
        watch = Stopwatch()
        self.progress.start_step()
        with watch("rollout"), self.interrupt.ending(self.collector.stop):
            collected = self.collector.collect(self.step)
            self.engine.release_memory()
        with watch("record"):
            self.recorder.write(self.step + 1, collected, self.actor)
        self.interrupt.check()
        batch = (collected.groups, self.step, collected.signal)
        result = self.learner.step(*batch, watch, self.interrupt.asked)
        if result.skipped == "interrupted":
            raise Interrupted
        self.progress.count_nonfinite(result.error, self.config, printed=self.topology.is_first)
        metrics = collected.metrics | result.metrics | {"skipped": float(not collected.signal)}
        metrics = self.progress.end_step(metrics, collected.groups)
        with watch("wait"), self.interrupt.ending(self.collector.stop):
            self.collector.finish_step(metrics, result.old_logprobs)
        with watch("sync"):
            self.actor.make_room()
            self.engine.load_weights(self.actor.weights(), self.step)
        self.progress.count_signal(collected, self.config)
        seconds, updates = watch.seconds(), 0 if result.skipped else self.config.train.epochs
        used = gpu_metrics(self.topology, self.shape, collected.groups, seconds, updates)
        return metrics | self.engine.counts() | seconds | used

    def _evaluated(self, metrics: dict[str, float]) -> dict[str, float]:
        """The step's metrics and those of an evaluation of its weights."""
        self.progress.unwritten, watch = metrics, Stopwatch()
        self.collector.prefetch(self.step)
        with watch("evaluate"), self.interrupt.ending(self.evaluator.stop):
            metrics = metrics | self.evaluator.evaluate()
        return watch.added_to(metrics)

    def _save_last(self) -> None:
        with phase("save"):
            self.checkpoints.save_last(self.step, self._state)

    def _state(self) -> dict[str, Any]:
        loop = {"loss_state": self.learner.state, "collector": self.collector.state()}
        return loop | self.progress.state(self.topology)

    def _resume(self) -> None:
        newest = self.checkpoints.find(self.load)
        if newest is not None:
            state = self.checkpoints.load(newest)
            self.learner.state = state["loss_state"]
            self.collector.load_state(state["collector"])
            self.progress.load_state(state, self.topology)
        self.progress.alarms.forget_after(self.progress.written)
        self.actor.make_room()
        self.engine.load_weights(self.actor.weights(), self.step)
        self.learner.start(self.step)
