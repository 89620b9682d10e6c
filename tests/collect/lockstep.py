"""An embedded engine that decodes in step with its dispatcher, so that a test of what is in flight
when does not depend on which thread the machine runs first.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

from megatron_stare.collect.dispatcher import PromptDispatcher
from megatron_stare.collect.rollout_buffer import RolloutBuffer
from megatron_stare.loop.trainer import Trainer
from megatron_stare.rollout.embedded import EmbeddedEngine

TOKENS_BEYOND = 3
PATIENCE_S = 300.0  # of a deadlock, not of a busy machine


class Gate(threading.Event):
    """Stands before every token of the engine, as its event `_replacing`, which it asks for each.

    A token is decoded once the dispatcher has taken in all that was finished before it. From the
    moment a batch is full, TOKENS_BEYOND more are decoded, so that sequences stand in the middle;
    then none until the dispatcher has stopped or is asked for the next batch. Its answer says that
    a batch is full: the trainer may take the groups before the gate looks at them.
    """

    def __init__(self, engine: EmbeddedEngine, dispatcher: PromptDispatcher) -> None:
        super().__init__()
        self.engine, self.dispatcher = engine, dispatcher
        self.full: Future[None] | None = None  # the answer that was counted from
        self.beyond = self.tokens = 0
        self.opened = False  # True once the run has ended: no dispatcher answers the engine then

    def is_set(self) -> bool:
        """Wait until the next token may be decoded; then whether the weights are being replaced."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._may_go():
            assert time.monotonic() < deadline, "the dispatcher never caught up with the engine"
            time.sleep(1e-3)
        self.tokens += 1
        return super().is_set()

    def _may_go(self) -> bool:
        worker = self.dispatcher.worker
        with self.dispatcher._lock, worker._lock:
            entries = list(worker._open.values())
            known = sum(len(entry.in_flight) for entry in entries)
            pending = (
                known != len(self.engine._live) + len(self.engine._waiting)
                or bool(worker._judging)
                or len(entries) != len(self.dispatcher._begun)
                or any(len(entry.finished) == worker.samples for entry in entries)
                # new weights, whose step has not yet dropped what is too old for them: counted
                # as ready now, it could be missing from a batch that was called full
                or self.dispatcher.step != self.engine.version
            )
            if self.opened or self.dispatcher.limit == 0:
                return True
            if pending:
                return False
            answer = self.dispatcher._enough
            if not answer.done():
                return True
            if answer is not self.full:
                self.full, self.beyond = answer, 0
            self.beyond += 1
            return self.beyond <= TOKENS_BEYOND


def in_step(run: Trainer) -> Trainer:
    """The run, its engine's tokens gated; the end of the run checks that they were."""
    collector, engine = run.collector, run.engine
    assert isinstance(collector, RolloutBuffer) and collector.dispatcher is not None
    assert isinstance(engine, EmbeddedEngine)
    gate = Gate(engine, collector.dispatcher)
    engine._replacing, close = gate, engine.close

    def checked() -> None:
        gate.opened = True
        close()
        assert gate.tokens, "no token passed the gate"

    engine.close = checked  # type: ignore[method-assign]
    return run
