"""A pool of SGLang servers as the engine of every rank:
rank 0 talks to the servers, all ranks take part.

The ranks' requests are gathered on rank 0 and the rollouts handed back; weights leave all ranks
together and rank 0 for the servers. While rank 0 waits for servers it tells the others every few
seconds what should be done: wait on, send the weights (to a server that started again in the middle
of a rollout), or stop with the error it met. So no rank ever hangs in a collective for longer than
that, and none is left behind.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_stare.config import Config, EngineError, UserError
from megatron_stare.policy.huggingface.weights import HFWeights
from megatron_stare.policy.model_state import is_distributed
from megatron_stare.policy.topology import Topology, agreed, release_workspaces
from megatron_stare.records import Rollout
from megatron_stare.reporting import heartbeat
from megatron_stare.rollout.engine import Request, SamplingParams, still_open
from megatron_stare.rollout.sglang.answers import Prefill
from megatron_stare.rollout.sglang.memory import CACHES, WEIGHTS
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.server import Model, read_config
from megatron_stare.rollout.sglang.weights import WeightMismatch
from megatron_stare.rollout.stops import stop_ids
from megatron_stare.sync.announcement import (
    Announcer,
    WorkerClients,
)
from megatron_stare.sync.tensors import givers_of, with_handles
from megatron_stare.sync.transport import in_buckets
from megatron_stare.sync.weight_sync import WeightSync

HEARTBEAT_SECONDS = 10.0
POLL_SECONDS = 0.02
LOOK_SECONDS = 0.2  # at the servers, while rollouts are waited for
# On servers that keep failing in the middle of an update, and on those that then hold other weights
# than were sent: one fault on the way may do that, the same again is nothing that passes.
SYNC_ATTEMPTS, MISMATCH_ATTEMPTS = 5, 2
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

Word = Literal["wait", "send", "done"]


class ServedEngine:
    """Implements rollout.engine.Engine.
    The servers start on construction, and are waited for at the first weights.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        topology: Topology,
        workers: WorkerClients | None = None,
    ) -> None:
        """`workers`: processes that send requests to the same servers, and learn their state."""
        self.topology, self.version, self.sources = topology, -1, 1
        self.colocated = config.sglang.colocated
        self._hands_out = self.colocated and config.sglang.sync_method == "tensor"
        self._bucket_bytes = config.sglang.sync_bucket_mib << 20
        self.pool: SGLangPool | None = None
        self._announcer: Announcer | None = None
        self._weights: Iterable[tuple[str, Tensor]] = ()
        self._on_first(lambda: self._begin(config, tokenizer, workers))

    def _begin(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, workers: WorkerClients | None
    ) -> None:
        directory = Path(config.run.dir)
        self.pool = SGLangPool(
            config.sglang, served_model(config, tokenizer), directory / "servers"
        )
        self._sync = WeightSync(
            self.pool, config.sglang, config.policy.hf_checkpoint, directory / "weights"
        )
        self._started = self.pool.start()
        self._announcer = Announcer(self.pool, workers) if workers else None

    def submit(
        self, requests: Sequence[Request], params: SamplingParams
    ) -> list[concurrent.futures.Future[Rollout]]:
        """Rank 0 only: the pool's futures.
        A refusal becomes their error, so that all ranks hear of it in `wait`.
        """
        assert self.pool is not None, "requests are submitted on rank 0"
        self._started.result()  # what the servers can serve is not known before
        try:
            return self.pool.submit(requests, params)
        except (UserError, ValueError) as error:
            refused: concurrent.futures.Future[Rollout] = concurrent.futures.Future()
            refused.set_exception(error)
            return [refused] * len(requests)

    def wait(self, futures: Sequence[concurrent.futures.Future[Any]]) -> None:
        """Rank 0 waits; all ranks bring the weights to a server that asks for them meanwhile."""
        try:
            self._serve(futures)
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send the weights to every server that answers;
        one that comes later gets them then. Collective.
        """
        if isinstance(weights, HFWeights):
            weights = dataclasses.replace(weights, onto_first=not self._hands_out)
        self._weights, self.version = weights, version
        if self.pool is not None:
            self.pool.expect(version)
            self.pool.interrupt()
            self._announce()
        self._resume_memory(WEIGHTS)
        self._serve(None)
        self._resume_memory(CACHES)
        self._announce()

    def release_memory(self) -> None:
        """With sglang.colocated, have every server give its GPU memory
        back until the next weights. Collective.
        """
        if self.colocated:
            self._on_first(lambda: self._pool().release_memory())

    def _resume_memory(self, tags: tuple[str, ...]) -> None:
        if self.colocated:
            # Of all ranks, before any server takes the room that it leaves.
            agreed(self.topology, release_workspaces)
            self._on_first(lambda: self._pool().resume_memory(tags))

    def _pool(self) -> SGLangPool:
        assert self.pool is not None, "only rank 0 has a pool"
        return self.pool

    def _announce(self) -> None:
        """Other processes hear at once what the pool knows."""
        if self._announcer is not None:
            self._announcer.now()

    def abort(self, requests: Sequence[Request] | None = None) -> None:
        """End these requests, or all."""
        if self.pool is not None:
            self.pool.abort(requests)

    def counts(self) -> dict[str, float]:
        """The pool's, those of the other processes, and the last sync's; empty but on rank 0."""
        if self.pool is None:
            return {}
        counts = self.pool.counts() if self._announcer is None else self._announcer.counts()
        return counts | self._sync.metrics()

    def prefill(self, sequences: Sequence[numpy.ndarray]) -> dict[str, list[Prefill]]:
        """What each server says of these ids (SGLangPool.prefill); on rank 0, {} elsewhere."""
        return {} if self.pool is None else self.pool.prefill(sequences).result()

    def wrong_weights(self) -> str:
        """Which tensor a server holds other than the weights that it was sent; nothing where all
        are the same. Collective.
        """
        words: list[str] = []

        def look() -> None:
            servers = [
                one for one in self._pool().admission.alive() if one.weights == self._pool().tag
            ]
            words.append(self._sync.differing(self._weights, servers))

        if self.pool is None:
            for _ in self._weights:  # the first rank gathers them from all
                pass
        self._on_first(look)
        return self.topology.gather("".join(words))[0]

    def close(self) -> None:
        """End the launched servers."""
        if self._announcer is not None:
            self._announcer.close()
        if self.pool is not None:
            self.pool.close()

    def _serve(self, futures: Sequence[concurrent.futures.Future[Any]] | None) -> None:
        """Until these are done on all ranks (for None:
        until the servers that answer hold the weights), do what is due.
        """
        attempt = 1
        while True:
            words = agreed(self.topology, lambda: self._say(futures))
            heartbeat.moved()  # servers are looked after by the pool, with time-outs of their own
            if words[0] == "send":
                attempt += not self._send(attempt)
            elif all(word == "done" for word in words):
                return

    def _say(self, futures: Sequence[concurrent.futures.Future[Any]] | None) -> Word:
        """What this rank has to say now, or in a while."""
        if self.pool is not None:
            return self._next_word(futures)
        return "done"  # requests and worker processes belong to rank 0

    def _next_word(self, futures: Sequence[concurrent.futures.Future[Any]] | None) -> Word:
        """What all ranks must do now, or in a while; rank 0 only."""
        assert self.pool is not None
        deadline = time.monotonic() + HEARTBEAT_SECONDS
        while time.monotonic() < deadline:
            if not self._started.done():
                concurrent.futures.wait([self._started], timeout=POLL_SECONDS)
                continue
            self._started.result()
            futures = None if futures is None else still_open(futures)
            if futures == []:
                return "done"
            if self.pool.failure is not None:
                raise EngineError(str(self.pool.failure)) from self.pool.failure
            if not self.pool.admission.up_to_date():
                self._announce()  # who is idle now
            if self.pool.admission.without_weights():
                return "send"
            if futures is None and self.pool.admission.up_to_date():
                return "done"
            if futures:
                concurrent.futures.wait(
                    futures, timeout=LOOK_SECONDS, return_when=concurrent.futures.FIRST_EXCEPTION
                )
            else:
                time.sleep(POLL_SECONDS)
        return "wait"

    def _send(self, attempt: int) -> bool:
        """Bring the servers that answer up to date. False: one failed in between, or holds other
        weights than it was sent. Collective.
        """
        servers = None if self.pool is None else self.pool.admission.without_weights()
        if self._hands_out:
            givers = givers_of(self.topology, servers)
            buckets = with_handles(self._weights, self._bucket_bytes, givers, self.topology)
        else:
            buckets = in_buckets(self._weights, self._bucket_bytes)
        failure: Exception | None = None
        if self.pool is not None and servers is not None:
            try:
                self._sync.send(buckets, servers)
                self._announce()
            except Exception as error:
                failure = error
                self.pool.probe()
        for _ in buckets:  # the other ranks send their shards to the end of the stream
            pass

        def judge() -> bool:
            if failure is not None and attempt >= _attempts(failure):
                raise failure
            if isinstance(failure, WeightMismatch):
                self._pool().note_corrupt_sync(failure)
            return failure is None

        return self._on_first(judge)

    def _on_first[T](self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, on every rank; what it raises, likewise."""
        first = self.topology.is_first
        return agreed(self.topology, lambda: work() if first else None)[0]  # type: ignore[return-value]


def served_model(config: Config, tokenizer: PreTrainedTokenizerBase) -> Model:
    """What the servers of this run must hold."""
    checkpoint = config.policy.hf_checkpoint
    if is_distributed(checkpoint):
        raise UserError(
            f"policy.hf_checkpoint={checkpoint} is a Megatron checkpoint, from which no SGLang "
            "server can start; convert megatron-to-hf first, or set rollout.engine=embedded"
        )
    dtype, stops = _DTYPES[config.policy.dtype], stop_ids(checkpoint, tokenizer)
    routed = config.policy.routing_replay == "rollout"
    return Model(checkpoint, dtype, tokenizer, stops, read_config(checkpoint), routed)


def _attempts(failure: Exception) -> int:
    """How often weights are sent where it fails like this; once where no death of a server and no
    fault on the way explains it.
    """
    if isinstance(failure, WeightMismatch):
        return MISMATCH_ATTEMPTS
    return SYNC_ATTEMPTS if isinstance(failure, RuntimeError) else 1
