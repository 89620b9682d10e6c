"""Weight sync from the Megatron model to SGLang servers: weights streamed by HF name in buckets,
without a second full copy in memory.

Every transport has one order: start the update, send every bucket, finish, compare checksums.

    broadcast  one flat tensor per bucket, over NCCL or gloo, to all servers at once (broadcast.py)
    tensor     each bucket in the HTTP request, by value or as a handle to shared GPU memory
               (tensors.py)
    disk       safetensors in a directory that the servers read (disk.py)
    delta      the changes since the last sync, to weight relays near the servers (delta/)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_stare.config import SGLangConfig
from megatron_stare.policy.huggingface.fp8_weights import DecodedWeights, EncodedWeights
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.server import Server
from megatron_stare.rollout.sglang.weights import (
    Expected,
    ServerLayout,
    WeightMismatch,
    bytes_of,
    delta_sections,
    fused_parts,
    precise_weights,
    results,
)
from megatron_stare.sync.broadcast import BroadcastTransport
from megatron_stare.sync.changes import ChangeSampler
from megatron_stare.sync.delta.transport import RelayTransport
from megatron_stare.sync.disk import DiskTransport
from megatron_stare.sync.tensors import TensorTransport, encoded, pickled
from megatron_stare.sync.transport import (
    NamedTensors,
    Transport,
    WeightBucket,
    clear_frames,
    flattened,
    table_of,
)
from megatron_stare.system import digest


class SyncSeconds(dict[str, float]):
    """Seconds that rank 0 waits for each part of one sync."""

    def __call__[T](self, part: str, work: Callable[..., T], *arguments: Any) -> T:
        """The result of work(*arguments), whose seconds are added to the part's."""
        begin = time.perf_counter()
        try:
            return work(*arguments)
        finally:
            self[part] = self.get(part, 0.0) + time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        """sync_seconds_<part>."""
        return {f"sync_seconds_{part}": seconds for part, seconds in self.items()}


@contextlib.contextmanager
def _updating(servers: Sequence[Server]) -> Iterator[None]:
    """A context in which these servers load weights, and may be silent."""
    for server in servers:
        server.updating = True
    try:
        yield
    finally:
        for server in servers:
            server.updating = False


class WeightSync:
    """Sends a whole stream of weights to servers of the pool and verifies what arrived.
    Runs on rank 0.
    """

    def __init__(
        self, pool: SGLangPool, settings: SGLangConfig, model: str, directory: Path
    ) -> None:
        self.pool, self.settings = pool, settings
        transports: dict[str, Callable[[], Transport]] = {
            "broadcast": lambda: BroadcastTransport(pool, settings),
            "tensor": lambda: TensorTransport(pool, settings),
            "disk": lambda: DiskTransport(pool, settings, model, directory),
            "delta": lambda: RelayTransport(pool, settings, model),
        }
        self.transport = transports[settings.transport]()
        self._seconds: dict[str, float] = {}
        samples = not self.transport.counts_changes and not pool.model.adapters
        self._changes = ChangeSampler() if samples else None
        self._base_seconds = SyncSeconds()  # of a base that waits for its adapters

    def send(
        self,
        buckets: Iterable[WeightBucket],
        servers: Sequence[Server],
        encoding: EncodedWeights | None = None,
    ) -> None:
        """Replace these servers' weights by the stream, under the tag that the pool expects; where
        servers apply adapters, the stream is their base.
        `encoding`: what encodes them on the way.

        EngineError or ServerFault: a server failed; WeightMismatch: it holds other weights now. A
        server with a kept cache then stays paused: its requests must see no half of an update.
        """
        with _updating(servers):
            try:
                if self.pool.keeps_cache:  # requests in flight stay where they are
                    self._all(servers, lambda server: server.client.pause())
                begin = encoding.seconds if encoding else 0.0
                parts = self._send(buckets, servers)
                if encoding:  # a part of the wait for the next bucket
                    parts["encode"] = encoding.seconds - begin
                    parts["gather"] -= parts["encode"]
                if self.pool.keeps_cache:
                    self._all(servers, lambda server: server.resume())
            except Exception as error:
                self.transport.abandon(error)
                clear_frames(error)
                raise
        if self.pool.model.adapters:
            self._base_seconds = parts
            for server in servers:
                server.has_base = True
        else:
            self._ended(parts, servers)

    def send_adapters(self, tensors: NamedTensors, servers: Sequence[Server]) -> None:
        """Replace the adapters of these servers, which hold the base, under the tag that the pool
        expects. EngineError or ServerFault: a server failed.
        """
        parts, settings = self._base_seconds, self.settings
        self._base_seconds = SyncSeconds()
        content: dict[str, Any] = {"config_dict": dict(self.pool.model.adapters)}
        if settings.verify_weights:  # a server that got others ends
            sums = {name: parts("hash", digest, bytes_of(each)) for name, each in tensors}
            content["expected_checksums"] = sums
        value = encoded(pickled(flattened(tensors), table_of(tensors)))

        def load(server: Server) -> Coroutine[Any, Any, None]:
            of_ranks = [value] * server.layout.tensor_size
            rest = {"load_format": "flattened_bucket", "serialized_named_tensors": of_ranks}
            return server.client.load_adapters(self.pool.tag, content | rest, settings.sync_timeout)

        with _updating(servers):
            parts("send", self._all, servers, load)
        self._ended(parts, servers)

    def _ended(self, parts: SyncSeconds, servers: Sequence[Server]) -> None:
        self._seconds = parts.metrics()
        self.pool.note_loaded(servers)

    def metrics(self) -> dict[str, float]:
        """changed_fraction, from the second version on, the transport's metrics, and the seconds of
        the last sync by part.
        """
        sampled = self._changes.fraction.metrics() if self._changes else {}
        return sampled | self.transport.metrics() | self._seconds

    def differing(self, weights: Iterable[tuple[str, Tensor]], servers: Sequence[Server]) -> str:
        """The first tensor that a server holds with other values; "" if there is none. EngineError:
        a server computes no checksums.
        """
        expected = self._expected(servers)
        for name, tensor in DecodedWeights().decode_part(weights):
            for sums in expected.values():
                sums.add(name, tensor)
        try:
            self._check(expected, servers)
        except WeightMismatch as mismatch:
            return str(mismatch)
        return ""

    def _send(self, buckets: Iterable[WeightBucket], servers: Sequence[Server]) -> SyncSeconds:
        expected = self._expected(servers) if self.settings.verify_weights else {}
        if self.transport.session:
            self._all(servers, lambda server: server.client.start_update())
        parts, stream = SyncSeconds(), iter(buckets)
        decoded = DecodedWeights()
        with ThreadPoolExecutor(1, thread_name_prefix="checksums") as thread:
            while (bucket := parts("gather", next, stream, None)) is not None:
                noted = thread.submit(self._note, bucket.tensors, decoded, list(expected.values()))
                tag = self.pool.tag if bucket.last else None
                parts("send", self.transport.send, bucket, servers, tag)
                parts("hash", noted.result)
                del bucket  # its memory is free while the next one is gathered
        parts("load", self.transport.wait)
        if self._changes:
            self._changes.end(self.pool.tag)
        if self.transport.session:
            self._all(servers, lambda server: server.client.end_update())
        if self.settings.verify_weights:
            parts("verify", self._check, expected, servers)
        return parts

    def _check(self, expected: dict[ServerLayout, Expected], servers: Sequence[Server]) -> None:
        timeout = self.settings.sync_timeout
        answers = self._all(servers, lambda server: server.client.checksums(timeout))
        for server, ranks in zip(servers, answers, strict=True):
            expected[server.layout].check(server.client.url, ranks)

    def _note(
        self, tensors: NamedTensors, decoded: DecodedWeights, expected: Sequence[Expected]
    ) -> None:
        """Sample and hash a bucket while it is sent: hashing takes about as long as sending."""
        if self._changes:
            self._changes.note(tensors)
        if expected:
            for name, tensor in decoded.decode_part(tensors):
                for sums in expected:
                    sums.add(name, tensor)

    def _expected(self, servers: Sequence[Server]) -> dict[ServerLayout, Expected]:
        config = self.pool.model.config
        heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next((int(config[name]) for name in names if config.get(name)), 0)
        own = (fused_parts(config), precise_weights(config), delta_sections(config))
        rest = (heads, experts, *own)
        return {server.layout: Expected(server.layout, *rest) for server in servers}

    def _all(self, servers: Sequence[Server], work: Any) -> list[Any]:
        """The answers of all servers, asked at once, in order."""
        answers = [self.pool.run(work(server)) for server in servers]
        return results(answers, self.settings.sync_timeout)
