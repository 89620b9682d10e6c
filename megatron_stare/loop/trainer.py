"""The training loop: collect rollouts, learn from them, sync weights, evaluate, checkpoint."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from megatron_stare.collect.rollout_buffer import RolloutBuffer
from megatron_stare.config import Config, TaskSolved
from megatron_stare.loop import assemble, run_directory
from megatron_stare.loop.interrupt import Interrupt, Interrupted
from megatron_stare.loop.learn import Learner
from megatron_stare.loop.metrics import Stopwatch, gpu_metrics
from megatron_stare.loop.prepare import target_of
from megatron_stare.loop.progress import FATAL, Progress, SavedRun
from megatron_stare.loop.record import Recorder
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.checkpoints.names import LATEST
from megatron_stare.policy.huggingface.shape import shape_of
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.heartbeat import phase


class Trainer:
    """One run: everything it needs, built once; `run` trains to the end or to an interrupt."""

    actor: Actor
    collector: RolloutBuffer
    learner: Learner

    def __init__(self, config: Config, topology: Topology, load: str = LATEST) -> None:
        self.config, self.topology, self.directory = config, topology, Path(config.run.dir)
        parts = assemble.assemble(config, topology)
        self.actor, self.engine, self.collector, self.evaluator, self.judge, self.learner = parts
        self.progress = Progress(config, topology, target_of(config, self.learner.objective))
        self.recorder, self.interrupt = Recorder(config, topology), Interrupt()
        self.saved = SavedRun(self.progress, self.actor, self.learner, self.collector, load)

    @property
    def step(self) -> int:
        """Rollout batches trained."""
        return self.progress.step

    def run(self, interrupt: Interrupt) -> bool:
        """Train to train.num_rollout steps, from the newest checkpoint if any. True: complete."""
        self.interrupt = interrupt
        with closing(self.judge), closing(self.engine), closing(self.collector):
            with phase("resume"):
                self.saved.resume()
                if self.topology.is_first:
                    run_directory.claim(self.config)
                    run_directory.reopen(self.directory)
                self._sync()
                self.learner.start(self.step)
            with self.progress.lines() as write:
                while self.progress.has_next:
                    try:
                        metrics = self._step()
                    except Interrupted:
                        break
                    write(metrics)
                    self.saved.save_due(metrics)
                self.saved.save_last()
            return self.progress.end()

    def _step(self) -> dict[str, float]:
        """The metrics of one step and, where it is due, of its evaluation. An error that ends the
        run saves the last good step first. Interrupted: there is no line to write.
        """
        self.interrupt.check()
        try:
            metrics = self.progress.unwritten or self.train_step()
            if self.evaluator.due(self.step):
                self.progress.unwritten, watch = metrics, Stopwatch()
                self.collector.prefetch(self.step)
                with watch("evaluate"), self.interrupt.ending(self.evaluator.stop):
                    metrics = metrics | self.evaluator.evaluate(self.step)
                metrics = watch.added_to(metrics)
        except TaskSolved as solved:
            self.progress.solved = str(solved)
            raise Interrupted from None
        except FATAL:
            self.interrupt.check()
            self.saved.save_last()
            raise
        self.progress.unwritten = {}
        return metrics

    def train_step(self) -> dict[str, float]:
        """One step: collect, record, learn, finish, sync. Interrupted: before its updates."""
        start = self.evaluator.evaluate_start(self.step, self.interrupt)
        watch = Stopwatch()
        self.progress.start_step()
        with watch("rollout"), self.interrupt.ending(self.collector.stop):
            collected = self.collector.collect(self.step)
            self.engine.release_memory()
        with watch("record"):
            self.recorder.write(self.step + 1, collected, self.actor)
        self.interrupt.check()
        batch = (collected.groups, self.step, collected.signal)
        result = self.learner.step(*batch, watch, self.interrupt.check)
        self.progress.count_nonfinite(result.error)
        metrics = start | {"skipped": float(not collected.signal)}
        metrics |= collected.metrics | result.metrics
        metrics = self.progress.end_step(metrics, collected.groups)
        with watch("wait"), self.interrupt.ending(self.collector.stop):
            self.collector.finish_step(metrics, result.old_logprobs)
        with watch("sync"):
            self._sync()
        self.progress.count_signal(collected)
        seconds, shape = watch.seconds(), shape_of(self.actor.hf)
        used = gpu_metrics(self.topology, shape, collected.groups, seconds, result.passes)
        return metrics | self.engine.counts() | seconds | used

    def _sync(self) -> None:
        """Send the weights of this step to the engine."""
        self.actor.make_room()
        self.engine.load_weights(self.actor.served_weights(), self.step)
