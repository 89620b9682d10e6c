"""From the Megatron model to SGLang servers:
weights streamed by HF name in buckets, never a second full copy.

Four ways, one order: begin, every bucket, end, compare checksums.

    broadcast  one flat tensor per bucket, over NCCL or gloo, to all servers at once
    tensor     each bucket in the HTTP request itself, by value or as a handle to shared GPU memory:
               needs no group
    disk       safetensors in a directory that the servers see too
    delta      what changed since the last sync, to mirrors beside the servers (delta/)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.config import EngineError, SGLangConfig
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.process import nccl_version, server_command
from megatron_stare.rollout.sglang.server import Server
from megatron_stare.rollout.sglang.weights import Expected, Layout, WeightMismatch, results
from megatron_stare.sync.changes import Sample
from megatron_stare.sync.delta.transport import ThroughMirrors
from megatron_stare.sync.disk import ThroughDisk
from megatron_stare.sync.parts import Part
from megatron_stare.sync.tensor_transport import (
    Bucket,
    encoded,
    flattened,
    pickled,
    table_of,
)
from megatron_stare.sync.transport import Transport
from megatron_stare.sync.update_group import UpdateGroup, address_for, until

log = logging.getLogger(__name__)


class WeightSync:
    """Sends a whole stream of weights to servers of the pool and verifies what arrived.
    Runs on rank 0.
    """

    def __init__(
        self, pool: SGLangPool, settings: SGLangConfig, hf_checkpoint: str, directory: Path
    ) -> None:
        self.pool, self.settings = pool, settings
        transports: dict[str, Callable[[], Transport]] = {
            "broadcast": lambda: Broadcast(pool, settings),
            "tensor": lambda: ThroughHttp(pool, settings),
            "disk": lambda: ThroughDisk(pool, settings, hf_checkpoint, directory),
            "delta": lambda: ThroughMirrors(pool, settings, hf_checkpoint),
        }
        self.transport = transports[settings.sync_method]()
        self._sample = None if self.transport.counts_changes else Sample()

    def send(self, parts: Iterable[Part], servers: Sequence[Server]) -> None:
        """Replace these servers' weights by the stream, under the tag that the pool expects.

        EngineError or ServerFault: a server failed; WeightMismatch: it holds something else now.
        """
        for server in servers:
            server.updating = True
        try:
            self._send(parts, servers)
        except Exception as error:
            self.transport.abandon(error)
            raise
        finally:
            for server in servers:
                server.updating = False
        self.pool.note_loaded(servers)

    def metrics(self) -> dict[str, float]:
        """changed_fraction, once there were two versions, and what the transport has to say."""
        sampled = self._sample.fraction.metrics() if self._sample else {}
        return sampled | self.transport.metrics()

    def differing(self, weights: Iterable[tuple[str, Tensor]], servers: Sequence[Server]) -> str:
        """Which tensor a server holds other than these, or nothing. EngineError: none tells."""
        expected = self._expected(servers)
        for named in weights:
            _hash([named], list(expected.values()))
        try:
            self._check(expected, servers)
        except WeightMismatch as mismatch:
            return str(mismatch)
        return ""

    def _send(self, parts: Iterable[Part], servers: Sequence[Server]) -> None:
        expected = self._expected(servers) if self.settings.verify_weights else {}
        if self.transport.session:
            self._all(servers, lambda server: server.client.begin_update())
        with ThreadPoolExecutor(1, thread_name_prefix="checksums") as beside:
            for part in parts:
                noted = beside.submit(self._note, part.bucket, list(expected.values()))
                self.transport.send(part, servers, self.pool.tag if part.last else None)
                noted.result()
                del part  # not kept while the next one is gathered
        self.transport.settle()
        if self._sample:
            self._sample.end(self.pool.tag)
        if self.transport.session:
            self._all(servers, lambda server: server.client.end_update())
        if self.settings.verify_weights:
            self._check(expected, servers)

    def _check(self, expected: dict[Layout, Expected], servers: Sequence[Server]) -> None:
        timeout = self.settings.sync_timeout
        answers = self._all(servers, lambda server: server.client.checksums(timeout))
        for server, ranks in zip(servers, answers, strict=True):
            expected[server.layout].check(server.client.url, ranks)

    def _note(self, bucket: Bucket, expected: Sequence[Expected]) -> None:
        """Look at the bucket, and hash it, which takes about as long as sending it, meanwhile."""
        if self._sample:
            self._sample.note(bucket)
        _hash(bucket, expected)

    def _expected(self, servers: Sequence[Server]) -> dict[Layout, Expected]:
        config = self.pool.model.config
        heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
        experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        return {server.layout: Expected(server.layout, heads, experts) for server in servers}

    def _all(self, servers: Sequence[Server], work: Any) -> list[Any]:
        """The same request to every server at once; their answers in order."""
        return results([self.pool.run(work(server)) for server in servers])


def _hash(bucket: Bucket, expected: Sequence[Expected]) -> None:
    for name, tensor in bucket:
        for sums in expected:
            sums.add(name, tensor)


class UnderWay(NamedTuple):
    """A bucket that is being sent, and the servers' answers about it."""

    group: UpdateGroup
    sent: Future[None]
    answers: Sequence[Future[Any]]


class Broadcast(Transport):
    """One group of the trainer and all servers;
    made again where a server joined, left or restarted.

    NCCL joins processes of one version alone, and servers bring torch, and with it NCCL, of their
    own. Where the versions are known to differ, or NCCL fails at its first broadcast, gloo takes
    over, with a warning: buckets then go by way of host memory.
    """

    def __init__(self, pool: SGLangPool, settings: SGLangConfig) -> None:
        self.pool, self.settings = pool, settings
        self.group: UpdateGroup | None = None
        self.under_way: UnderWay | None = None
        # Host memory is kept: a fresh page costs as much as the copy into it. GPU memory is not,
        # training wants it. One is filled while the other is sent.
        self.rooms = [torch.empty(0, dtype=torch.uint8)] * 2
        self.refusal: str | None = None  # why NCCL is not used; "" once it is; None: not known yet

    def _nccl_works(self) -> bool:
        """Whether to try NCCL: asked of the Python that launches servers, once."""
        if self.refusal is None:
            self._refuse(other_nccl(self.settings))
        return not self.refusal

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        if reason:
            log.warning(
                "weights are broadcast over gloo, by way of host memory: %s. Install one version of"
                " nvidia-nccl in both environments, or set sglang.sync_method",
                reason,
            )

    def send(self, part: Part, servers: Sequence[Server], tag: str | None) -> None:
        """Ask every server to receive, and begin to broadcast the bucket's bytes end to end.

        They are sent and loaded while the next bucket is gathered: rank 0 takes in shards and gives
        out buckets at the same time.
        """
        bucket = part.bucket
        on_gpu = bucket[0][1].is_cuda and all(server.layout.on_gpu for server in servers)
        on_gpu = on_gpu and self._nccl_works()
        if on_gpu:
            self.settle()  # first: no third bucket's bytes shall lie in the GPU's memory
            flat = flattened(bucket)
        else:
            flat = flattened(bucket, self._room(sum(value.nbytes for _, value in bucket)))
            self.settle()
        group = self._group(servers, "nccl" if on_gpu else "gloo")
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            "flush_cache": tag is not None,
            "weight_version": tag,
        }
        path, timeout = "/update_weights_from_distributed", self.settings.sync_timeout
        answers = [
            self.pool.run(server.client.update_weights(path, body, timeout)) for server in servers
        ]
        self.under_way = UnderWay(group, group.broadcast(flat, answers), answers)

    def settle(self) -> None:
        """Wait until the last bucket is sent, and the servers have loaded it."""
        last, self.under_way = self.under_way, None
        if last is None:
            return
        with self._closed_on_failure():
            try:
                until(last.sent.done, last.answers, self.settings.sync_timeout)
                last.sent.result()
            except dist.DistBackendError as error:
                if not last.group.has_sent:  # else the versions agree, and a server has died
                    self._refuse(f"NCCL failed ({str(error).splitlines()[0]})")
                raise EngineError("a broadcast of weights over NCCL failed") from error
            results(last.answers)

    def abandon(self, error: Exception) -> None:
        """A bucket that is still on its way is left to a group that is not used again."""
        if self.under_way is not None:
            self.under_way = None
            self._close()

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._close()  # its members no longer agree on what comes next
            raise

    def _close(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.close()

    def _room(self, size: int) -> Tensor:
        """Host memory that no bucket under way lies in."""
        self.rooms.reverse()
        if self.rooms[0].numel() < size:
            self.rooms[0] = torch.empty(size, dtype=torch.uint8)
        return self.rooms[0]

    def _group(self, servers: Sequence[Server], backend: str) -> UpdateGroup:
        if self.group is None or not self.group.serves(servers):
            self._close()
            address = self.settings.master_address or address_for(
                [server.client.url for server in servers]
            )
            self.group = UpdateGroup(
                self.pool, servers, backend, address, self.settings.sync_timeout
            )
        return self.group


def other_nccl(settings: SGLangConfig) -> str:
    """How the NCCL of launched servers differs from this process's; empty where it does not, or
    where theirs is not known: attached servers do not tell.
    """
    if settings.urls or settings.router_url:
        return ""
    theirs, ours = nccl_version(server_command(settings)), torch.cuda.nccl.version()
    if theirs is None or theirs == ours:
        return ""
    said = (".".join(map(str, version)) for version in (ours, theirs))
    return "the trainer has NCCL {}, the servers' Python has {}".format(*said)


class ThroughHttp(Transport):
    """One pickle per tensor-parallel rank, of which each takes its own: what the trainer's
    ranks hand out, or the bucket by value, which for a large model is slow to send.

    A handle (CUDA IPC) has a server map the trainer's memory and copy from it; nothing goes over
    the wire but a table of names. A server must see the GPU whose memory it is given. No server has
    opened one in a test yet.
    """

    def __init__(self, pool: SGLangPool, settings: SGLangConfig) -> None:
        self.pool, self.settings = pool, settings

    def send(self, part: Part, servers: Sequence[Server], tag: str | None) -> None:
        """Deliver the bucket; returns when every server has copied it."""
        path, timeout = "/update_weights_from_tensor", self.settings.sync_timeout
        contents = part.contents
        if not contents:
            value = encoded(pickled(flattened(part.bucket), table_of(part.bucket)))
            contents = [[value] * server.layout.tensor_size for server in servers]
        answers = []
        for server, of_ranks in zip(servers, contents, strict=True):
            body = {
                "serialized_named_tensors": of_ranks,
                "load_format": "flattened_bucket",
                "flush_cache": tag is not None,
                "weight_version": tag,
            }
            answers.append(self.pool.run(server.client.update_weights(path, body, timeout)))
        results(answers)
