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
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy
import torch
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
    results,
)
from megatron_stare.sync.delta.encoding import Words, words_of
from megatron_stare.system import digest

NamedTensors = list[tuple[str, Tensor]]
# Of tensors with more elements than ALL_UP_TO every 61st is compared: 61 is prime, so that the rows
# of a matrix are compared in different columns. This keeps a copy of 2 % of the weights.
ALL_UP_TO, STEP = 1 << 16, 61


class WeightBucket(NamedTuple):
    """Some of the weights. `contents`: for each server, one string for each of its tensor-parallel
    ranks, sent in place of the tensors; empty if the trainer's ranks share no memory with servers.
    """

    tensors: NamedTensors
    last: bool = False
    contents: Sequence[Sequence[str]] = ()


class Transport:
    """One way of sending buckets to servers.

    `session`: the servers must know where an update begins and ends. `counts_changes`: the
    transport itself measures the fraction of the weights that changed.
    """

    session = True
    counts_changes = False

    def send(self, bucket: WeightBucket, servers: Sequence[Server], tag: str | None) -> None:
        """Deliver one bucket to all the servers. `tag`, the name of the weights, comes with the
        last bucket.
        """
        raise NotImplementedError

    def wait(self) -> None:
        """Return when the servers have loaded all buckets; raises their failure. Nothing to do if
        `send` waits.
        """

    def abandon(self, error: Exception) -> None:
        """The stream of weights ended with this error, or arrived wrong. Another stream follows."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the last sync."""
        return {}


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of the ended functions in an error's traceback, and in those of its
    causes: a caller that keeps the error must not keep a bucket with it.
    """
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__


def in_buckets(weights: Iterable[tuple[str, Tensor]], size_bytes: int) -> Iterator[WeightBucket]:
    """The weights in buckets of up to `size_bytes`, or of one larger tensor. Keeps no bucket."""
    tensors: NamedTensors = []
    filled = 0
    for name, tensor in weights:
        if tensors and filled + tensor.nbytes > size_bytes:
            yield WeightBucket(tensors)
            tensors, filled = [], 0
        tensors.append((name, tensor))
        filled += tensor.nbytes
    yield WeightBucket(tensors, last=True)


def flattened(tensors: NamedTensors, room: Tensor | None = None) -> Tensor:
    """The tensors' bytes, concatenated [uint8]: on their own device, or at the start of `room`."""
    parts = [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in tensors]
    if room is None:
        return torch.cat(parts)
    room = room[: sum(part.numel() for part in parts)]
    for place, part in zip(room.split([part.numel() for part in parts]), parts, strict=True):
        place.copy_(part)
    return room


class ChangedFraction:
    """The fraction of the weights that differ from one version to the next, in the precision that
    servers get; None before the second version. At a learning rate of 1e-6 most steps are smaller
    than half the distance between two neighbours in bf16.

    A version may be sent several times, and not always to its end: changes add up until one stream
    is whole.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._tag = ""

    def end(self, tag: str, changed: float, elements: float) -> None:
        """A stream of the weights `tag` is whole: `changed` of its elements differ from the last
        whole stream.
        """
        if self._tag and tag != self._tag and elements:
            self.value = changed / elements
        self._tag = tag

    def metrics(self) -> dict[str, float]:
        """changed_fraction, if there is one."""
        return {} if self.value is None else {"changed_fraction": self.value}


class ChangeSampler:
    """Estimates the fraction from a sample of the elements: all of a small tensor."""

    def __init__(self) -> None:
        self.fraction = ChangedFraction()
        self._samples: dict[str, Words] = {}
        self._elements: dict[str, int] = {}
        self._changed = 0.0

    def note(self, tensors: NamedTensors) -> None:
        """Compare the tensors with their last values, if there are any."""
        for name, tensor in tensors:
            count = tensor.numel()
            sample = words_of(tensor.detach().reshape(-1)[:: STEP if count > ALL_UP_TO else 1])
            before = self._samples.get(name)
            self._elements[name] = count
            if before is not None:
                share = float(numpy.count_nonzero(sample != before)) / len(sample)
                self._changed += share * count
            self._samples[name] = sample.copy()

    def end(self, tag: str) -> None:
        """All tensors of the weights `tag` were noted."""
        self.fraction.end(tag, self._changed, sum(self._elements.values()))
        self._changed = 0.0


class SyncSeconds(dict[str, float]):
    """Seconds that rank 0 waits for each part of one sync."""

    def __call__[T](self, part: str, work: Callable[..., T], *arguments: Any) -> T:
        """The result of work(*arguments), whose seconds are added to the part's."""
        begin = time.perf_counter()
        try:
            return work(*arguments)
        finally:
            self[part] = self.get(part, 0.0) + time.perf_counter() - begin


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
    """Sends a stream of weights to servers of the pool and verifies what arrived. On rank 0."""

    def __init__(self, pool: SGLangPool, settings: SGLangConfig, transport: Transport) -> None:
        self.pool, self.settings, self.transport = pool, settings, transport
        self._seconds = SyncSeconds()  # of the last sync
        samples = not transport.counts_changes and not pool.model.adapters
        self._changes = ChangeSampler() if samples else None
        self._base_seconds = SyncSeconds()  # of a base that waits for its adapters

    def send(
        self,
        buckets: Iterable[WeightBucket],
        servers: Sequence[Server],
        encoding: EncodedWeights | None = None,
    ) -> None:
        """Replace these servers' weights by the stream, under the tag that the pool expects; where
        servers apply adapters, the stream is their base. `encoding`: what encodes it on the way.

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

    def send_adapters(self, tensors: NamedTensors, value: str, servers: Sequence[Server]) -> None:
        """Replace the adapters of these servers, which hold the base, under the tag that the pool
        expects. `value`: the tensors as a server reads them. EngineError or ServerFault: a server
        failed.
        """
        parts, settings = self._base_seconds, self.settings
        self._base_seconds = SyncSeconds()
        content: dict[str, Any] = {"config_dict": dict(self.pool.model.adapters)}
        if settings.verify_weights:  # a server that got others ends
            sums = {name: parts("hash", digest, bytes_of(each)) for name, each in tensors}
            content["expected_checksums"] = sums

        def load(server: Server) -> Coroutine[Any, Any, None]:
            of_ranks = [value] * server.layout.tensor_size
            rest = {"load_format": "flattened_bucket", "serialized_named_tensors": of_ranks}
            return server.client.load_adapters(self.pool.tag, content | rest, settings.sync_timeout)

        with _updating(servers):
            parts("send", self._all, servers, load)
        self._ended(parts, servers)

    def _ended(self, parts: SyncSeconds, servers: Sequence[Server]) -> None:
        self._seconds = parts
        self.pool.note_loaded(servers)

    def metrics(self) -> dict[str, float]:
        """changed_fraction, from the second version on, the transport's metrics, and the seconds of
        the last sync by part.
        """
        sampled = self._changes.fraction.metrics() if self._changes else {}
        seconds = {f"sync_seconds_{part}": value for part, value in self._seconds.items()}
        return sampled | self.transport.metrics() | seconds

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
        return {server.layout: Expected(server.layout, config) for server in servers}

    def _all(self, servers: Sequence[Server], work: Any) -> list[Any]:
        """The answers of all servers, asked at once, in order."""
        answers = [self.pool.run(work(server)) for server in servers]
        return results(answers, self.settings.sync_timeout)
