"""A pool of SGLang servers as the engine of every rank: rank 0 talks to the servers, all ranks take
part.

Requests are submitted on rank 0. All ranks gather the weights; rank 0 sends them to the servers.
While rank 0 waits for servers, it sends the other ranks a message every few seconds: wait, send the
weights (to a server that restarted during a rollout), done, or the error that ends the run. So no
rank blocks in a collective for longer, and all ranks end together.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_stare.config import Config, EngineError, SGLangConfig, UserError
from megatron_stare.policy.adapters import AdaptedWeights
from megatron_stare.policy.build import read_hf_config
from megatron_stare.policy.huggingface.files import copy_companions
from megatron_stare.policy.huggingface.fp8_weights import (
    EncodedWeights,
    encoded_matrices,
    quantization_config,
)
from megatron_stare.policy.huggingface.peft_files import peft_config
from megatron_stare.policy.huggingface.weights import HFWeights
from megatron_stare.policy.model_state import is_distributed
from megatron_stare.policy.topology import Topology, agreed, release_workspaces
from megatron_stare.records import Rollout
from megatron_stare.reporting import heartbeat
from megatron_stare.rollout.engine import Limits, Request, SamplingParams, still_open, stop_ids
from megatron_stare.rollout.sglang.answers import Prefill
from megatron_stare.rollout.sglang.health import CACHES, WEIGHTS
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.server import Model, Server, read_config
from megatron_stare.rollout.sglang.weights import WeightMismatch
from megatron_stare.sync.broadcast import BroadcastTransport
from megatron_stare.sync.delta.transport import RelayTransport
from megatron_stare.sync.disk import DiskTransport
from megatron_stare.sync.tensors import TensorTransport, by_value, givers_of, with_handles
from megatron_stare.sync.weight_sync import Transport, WeightBucket, WeightSync, in_buckets

HEARTBEAT_SECONDS = 10.0
POLL_SECONDS = 0.02
LOOK_SECONDS = 0.2  # between two checks of the servers while rollouts are in flight
# Attempts of an update whose servers fail during it, and of one after which a server holds other
# weights than it was sent: a fault of the network explains that once, not twice. Any other failure
# is raised at once.
SYNC_ATTEMPTS, MISMATCH_ATTEMPTS = 5, 2
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

Message = Literal["wait", "send", "done"]


class ServedEngine:
    """Implements rollout.engine.Engine. The servers start on construction; the first
    `load_weights` waits for them. Colocated servers have started when the construction ends, and
    have released their memory, in which the trainer is built.
    """

    def __init__(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, topology: Topology
    ) -> None:
        self.topology, self.version, self.sources = topology, -1, 1
        self.colocated = config.sglang.colocated
        self._hands_out = self.colocated and config.sglang.transport == "tensor"
        self._bucket_bytes = config.sglang.sync_bucket_mib << 20
        self.pool: SGLangPool | None = None
        self._weights: Iterable[tuple[str, Tensor]] = ()
        self._progress: object = None  # at the last look
        self._encoded = encoded_matrices(config, read_hf_config(config.policy.hf_checkpoint))
        self._adapted: AdaptedWeights | None = None  # where servers apply adapters
        self._on_first(lambda: self._start(config, tokenizer))
        if self.colocated:
            try:
                self._serve([])
                self.release_memory()
            except BaseException:
                self.close()
                raise

    def _start(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        directory = Path(config.run.dir)
        model = served_model(config, tokenizer)
        write_start(model)
        kept = config.rollout.cache_over_versions == "kept"
        self.pool = SGLangPool(config.sglang, model, directory / "servers", keeps_cache=kept)
        self._sync = make_sync(self.pool, config.sglang, model.directory, directory / "weights")
        self._started = self.pool.start()

    @property
    def limits(self) -> Limits:
        """Those of all servers; on rank 0."""
        self._started.result()
        return self._pool().limits

    def submit(
        self, requests: Sequence[Request], params: SamplingParams
    ) -> list[concurrent.futures.Future[Rollout]]:
        """Rank 0 only: the pool's futures. A refused request becomes an error of the futures, so
        that all ranks raise it in `wait`.
        """
        assert self.pool is not None, "requests are submitted on rank 0"
        self._started.result()  # the servers' limits are not known before
        try:
            return self.pool.submit(requests, params)
        except (UserError, ValueError) as error:
            refused: concurrent.futures.Future[Rollout] = concurrent.futures.Future()
            refused.set_exception(error)
            return [refused] * len(requests)

    def wait(self, futures: Sequence[concurrent.futures.Future[Any]]) -> None:
        """Rank 0 waits; meanwhile all ranks send the weights to servers that restarted."""
        try:
            self._serve(futures)
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send the weights to every server that answers; a later one gets them in `wait`.
        Collective.
        """
        if isinstance(weights, AdaptedWeights):
            self._adapted, weights = weights, weights.base
        if isinstance(weights, HFWeights):
            weights = dataclasses.replace(weights, onto_first=not self._hands_out)
        if self._encoded:
            weights = EncodedWeights(weights, self._encoded)
        self._weights, self.version = weights, version
        if self.pool is not None:
            self.pool.expect(version)
            self.pool.interrupt()
        self.resume_memory(WEIGHTS)
        self._serve(None)
        self.resume_memory(CACHES)

    def release_memory(self) -> None:
        """Every server of a colocated run releases its GPU memory until the next weights.
        Collective.
        """
        if self.colocated:
            self._on_first(lambda: self._pool().release_memory())

    def resume_memory(self, tags: tuple[str, ...] = WEIGHTS + CACHES) -> None:
        """Every server of a colocated run takes its memory for `tags` again. Collective."""
        if self.colocated:
            # All ranks release theirs before any server takes it.
            agreed(self.topology, release_workspaces)
            self._on_first(lambda: self._pool().resume_memory(tags))

    def _pool(self) -> SGLangPool:
        assert self.pool is not None, "only rank 0 has a pool"
        return self.pool

    def abort(self, requests: Sequence[Request] | None = None) -> None:
        """End these requests, or all."""
        if self.pool is not None:
            self.pool.abort(requests)

    def counts(self) -> dict[str, float]:
        """Counts of the pool and the last sync; empty except on rank 0."""
        return {} if self.pool is None else self.pool.counts() | self._sync.metrics()

    def prefill(self, sequences: Sequence[numpy.ndarray]) -> dict[str, list[Prefill]]:
        """Each server's log-probs of these ids (SGLangPool.prefill); {} except on rank 0."""
        return {} if self.pool is None else self.pool.prefill(sequences).result()

    def wrong_weights(self) -> str:
        """The first tensor that a server holds with other values than it was sent; "" if there is
        none. Collective.
        """
        if self.pool is None:
            for _ in self._weights:  # the first rank gathers them from all
                pass
        return self._on_first(
            lambda: self._sync.differing(self._weights, self._pool().admission.current())
        )

    def close(self) -> None:
        """End the launched servers."""
        if self.pool is not None:
            self.pool.close()

    def _serve(self, futures: Sequence[concurrent.futures.Future[Any]] | None) -> None:
        """Follow rank 0's messages until the futures are done on all ranks; for None, until the
        servers that answer hold the weights.
        """
        attempt = 1
        while True:
            with heartbeat.waiting():
                messages = agreed(self.topology, lambda: self._say(futures))
            if messages[0] == "send":
                attempt += not self._send(attempt)
            elif all(message == "done" for message in messages):
                return

    def _say(self, futures: Sequence[concurrent.futures.Future[Any]] | None) -> Message:
        """This rank's message, after some seconds at most."""
        if self.pool is None:
            return "done"  # requests belong to rank 0
        deadline = time.monotonic() + HEARTBEAT_SECONDS
        while time.monotonic() < deadline:
            if not self._started.done():
                concurrent.futures.wait([self._started], timeout=POLL_SECONDS)
                heartbeat.moved()  # sglang.start_timeout bounds it
                continue
            self._started.result()
            futures = None if futures is None else still_open(futures)
            self._note_progress(len(futures or ()))
            if futures == []:
                return "done"
            if self.pool.failure is not None:
                raise EngineError(str(self.pool.failure)) from self.pool.failure
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

    def _note_progress(self, left: int) -> None:
        """Feed the watchdog where something came: a part of an answer, a group, a server's new
        state. While no server answers, sglang.start_timeout and sglang.max_restarts bound the wait.
        """
        pool = self._pool()
        servers = [(server.state, server.weights) for server in pool.servers]
        progress = (pool.requests.progress, left, servers)
        if progress != self._progress or not pool.admission.alive():
            self._progress = progress
            heartbeat.moved()

    def _send(self, attempt: int) -> bool:
        """Send the weights to the servers that answer and lack them. False: one failed meanwhile,
        or holds other weights than it was sent. Collective.
        """
        servers = None if self.pool is None else self.pool.admission.without_weights()
        if self._adapted is None:
            return self._send_weights(servers, attempt)
        baseless = servers and [server for server in servers if not server.has_base]
        lacks = self._on_first(lambda: bool(baseless))
        if lacks and not self._send_weights(baseless, attempt):
            return False
        return self._send_adapters(self._adapted.adapters(), servers, attempt)

    def _send_adapters(
        self, tensors: list[tuple[str, Tensor]], servers: list[Server] | None, attempt: int
    ) -> bool:
        """Send the adapters alone. Collective; the result as of `_send`."""
        failure = None
        if self.pool is not None and servers is not None:
            try:
                self._sync.send_adapters(tensors, by_value(tensors), servers)
            except Exception as error:
                failure = error
                self.pool.probe()
        return self._judged(failure, attempt)

    def _send_weights(self, servers: list[Server] | None, attempt: int) -> bool:
        """Send all weights. Collective; the result as of `_send`."""
        if self._hands_out:
            givers = givers_of(self.topology, servers)
            buckets = with_handles(self._weights, self._bucket_bytes, givers, self.topology)
        else:
            buckets = in_buckets(self._weights, self._bucket_bytes)
        failure, gathering = None, list[Exception]()  # the failure, if it was in gathering

        def gathered() -> Iterator[WeightBucket]:
            try:
                yield from buckets
            except Exception as error:
                gathering.append(error)
                raise

        stream = gathered()
        if self.pool is not None and servers is not None:
            try:
                encoding = self._weights if isinstance(self._weights, EncodedWeights) else None
                self._sync.send(stream, servers, encoding)
            except Exception as error:
                if gathering:  # the other ranks wait in its collectives, and not in `judge`
                    raise
                failure = error
                self.pool.probe()
        for _ in stream:  # the other ranks send their shards to the end of the stream
            pass
        return self._judged(failure, attempt)

    def _judged(self, failure: Exception | None, attempt: int) -> bool:
        """Whether rank 0's sync succeeded, on every rank; its failure is raised after the last
        attempt that it allows.
        """

        def judge() -> bool:
            attempts = SYNC_ATTEMPTS if isinstance(failure, RuntimeError) else 1
            attempts = MISMATCH_ATTEMPTS if isinstance(failure, WeightMismatch) else attempts
            if failure is not None and attempt >= attempts:
                raise failure
            if isinstance(failure, WeightMismatch):
                self._pool().note_corrupt_sync(failure)
            return failure is None

        return self._on_first(judge)

    def _on_first[T](self, work: Callable[[], T]) -> T:
        """The result of `work` on rank 0, on every rank; its error likewise."""
        first = self.topology.is_first
        return agreed(self.topology, lambda: work() if first else None)[0]  # type: ignore[return-value]


def make_sync(pool: SGLangPool, settings: SGLangConfig, model: str, directory: Path) -> WeightSync:
    """The sync to the pool's servers over the transport of the settings. `model`: the directory
    that they start from; `directory`: for weights that go by way of a disk.
    """
    transports: dict[str, Callable[[], Transport]] = {
        "broadcast": lambda: BroadcastTransport(pool, settings),
        "tensor": lambda: TensorTransport(pool, settings),
        "disk": lambda: DiskTransport(pool, settings, model, directory),
        "delta": lambda: RelayTransport(pool, settings, model),
    }
    return WeightSync(pool, settings, transports[settings.transport]())


def served_model(config: Config, tokenizer: PreTrainedTokenizerBase) -> Model:
    """The model that the servers of this run must hold."""
    checkpoint = config.policy.hf_checkpoint
    if is_distributed(checkpoint):
        raise UserError(
            f"policy.hf_checkpoint={checkpoint} is a Megatron checkpoint, from which no SGLang "
            "server can start; convert megatron-to-hf first, or set rollout.engine=embedded"
        )
    content, hf, start = read_config(checkpoint), read_hf_config(checkpoint), ""
    encoded = encoded_matrices(config, hf)
    if encoded:
        start = str(Path(config.run.dir) / "servers" / "fp8_model")
        hf = read_hf_config(checkpoint)
        content = content | {"quantization_config": quantization_config(hf, encoded)}
    elif "quantization_config" in content and not (config.sglang.urls or config.sglang.router_url):
        raise UserError(
            f"policy.hf_checkpoint={checkpoint} holds quantised weights, and so would the servers "
            f"that start from it, but sglang.weights={config.sglang.weights} sends them others; "
            "convert it hf-to-megatron and back, which gives bf16, or set sglang.weights=fp8"
        )
    adapters: dict[str, Any] = {}
    if config.adapters.apart:
        adapters = peft_config(hf, config.adapters, checkpoint)
    return Model(
        checkpoint,
        _DTYPES[config.policy.dtype],
        tokenizer,
        stop_ids(checkpoint, tokenizer),
        content,
        routed_experts=config.policy.routing_replay == "rollout",
        fp32_logits=config.policy.fp32_logits and config.policy.dtype != "fp32",
        encoded=encoded,
        start=start,
        adapters=adapters,
    )


def write_start(model: Model) -> None:
    """The directory that FP8 servers start from: everything but weights."""
    if not model.encoded:
        return
    directory = Path(model.directory)
    directory.mkdir(parents=True, exist_ok=True)
    copy_companions(Path(model.hf_checkpoint), directory)
    (directory / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
