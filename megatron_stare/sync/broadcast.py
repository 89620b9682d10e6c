"""Weights by broadcast (sglang.sync_method=broadcast): rank 0 of the trainer and all ranks of its
servers form a process group, over NCCL or gloo.

The group is separate from the trainer's own: rank 0 is the trainer, then come the ranks of each
server. All meet in a store that the trainer opens; the key prefixes are those that
torch.distributed's group creation uses on the servers' side.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.config import EngineError, SGLangConfig, UserError
from megatron_stare.rollout.sglang.access import address_towards, is_loopback
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.process import own_nccl_version, servers_nccl
from megatron_stare.rollout.sglang.server import Server
from megatron_stare.rollout.sglang.weights import results
from megatron_stare.sync.weight_sync import (
    NamedTensors,
    Transport,
    WeightBucket,
    clear_frames,
    flattened,
)

log = logging.getLogger(__name__)

# The first tensor over a new NCCL group decides within this time whether NCCL connects to its
# servers; the abort of a group is waited for as long.
FIRST_SECONDS = ABORT_SECONDS = 30.0
Answers = Mapping[str, "Future[Any]"]  # by the server's address


class UpdateGroup:
    """A process group of this process and the servers' ranks, joined on construction. EngineError:
    it could not be formed.
    """

    def __init__(
        self,
        pool: SGLangPool,
        servers: Sequence[Server],
        backend: str,
        address: str,
        timeout: float,
    ) -> None:
        self.pool, self.servers = pool, list(servers)
        self.attempts = [server.starts for server in servers]
        self.name = f"weights-{uuid.uuid4().hex[:8]}"
        limit = datetime.timedelta(seconds=timeout)
        size = 1 + sum(server.info.ranks for server in servers if server.info)
        # The store must outlive the group: without it the servers lose their group.
        self._store = dist.TCPStore(
            address, 0, size, is_master=True, timeout=limit, wait_for_workers=False
        )
        offset, answers = 1, dict[str, Future[Any]]()
        for server in servers:
            body = {
                "master_address": address,
                "master_port": self._store.port,
                "rank_offset": offset,
                "world_size": size,
                "group_name": self.name,
                "backend": backend,
            }
            answers[server.client.url] = pool.run(
                server.client.call("POST", "/init_weights_update_group", body, timeout=timeout)
            )
            assert server.info is not None, "a server that answers was admitted"
            offset += server.info.ranks
        joined = _in_thread(self._join, size, backend, limit)
        wait_for(joined.done, answers, timeout, "forming the process group for weights")
        self._group: Any = joined.result()
        results(list(answers.values()), timeout)

    def serves(self, servers: Sequence[Server]) -> bool:
        """Whether the group has exactly these servers, none of them restarted since."""
        attempts = [server.starts for server in servers]
        return self.servers == list(servers) and self.attempts == attempts

    def broadcast(self, tensor: Tensor, answers: Answers, timeout: float) -> Future[None]:
        """Start to send the tensor to every server; `answers` are their requests in flight. Done
        when the tensor may be overwritten; `wait_for` says how to wait for it.
        """
        # NCCL connects at the first broadcast, which blocks until every rank has come.
        return _in_thread(_broadcast, self._group, tensor, answers, timeout)

    def close(self) -> None:
        """Have the servers that are alive leave the group, and abort this process's part of it: a
        broadcast to a dead server never ends, and holds its bucket.
        """
        body = {"group_name": self.name}
        for server in self.servers:
            self.pool.run(server.client.call("POST", "/destroy_weights_update_group", body))
        group, self._group = self._group, None
        aborted = _in_thread(group.abort)
        try:
            aborted.result(ABORT_SECONDS)
        except Exception as error:
            log.warning(
                "the process group for weights was not aborted in %g s (%s); its memory stays taken"
                " until its broadcast ends",
                ABORT_SECONDS,
                str(error) or type(error).__name__,
            )

    def _join(self, size: int, backend: str, limit: datetime.timedelta) -> Any:
        device = "cuda" if backend == "nccl" else "cpu"
        store: Any = self._store
        for prefix in (self.name, f"{self.name}/", f"{device}/"):
            store = dist.PrefixStore(prefix, store)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            return dist.ProcessGroupNCCL(store, 0, size, options)
        return dist.ProcessGroupGloo(store, 0, size, limit)


class InflightBucket(NamedTuple):
    """A bucket that is being sent, and the servers' answers."""

    group: UpdateGroup
    sent: Future[None]
    answers: Answers
    timeout: float


class BroadcastTransport(Transport):
    """One flat tensor for each bucket, to all servers at once. The group is formed again when a
    server joined, left or restarted.

    NCCL joins processes of one version only, and servers have a torch, and so an NCCL, of their
    own. Where the versions are known to differ, gloo is used, with a warning: buckets then pass
    through host memory. A new NCCL group sends its smallest tensor first, alone; where that fails
    or does not arrive in FIRST_SECONDS, gloo takes over too. If the last group's first tensor
    arrived, that takes two failures in a row, because a server's death explains one.
    """

    def __init__(self, pool: SGLangPool, settings: SGLangConfig) -> None:
        self.pool, self.settings = pool, settings
        self.group: UpdateGroup | None = None
        self.inflight: InflightBucket | None = None
        # Host memory is kept: a fresh page costs as much as the copy into it. GPU memory is not
        # kept: training needs it. One buffer is filled while the other is sent.
        self.buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        # why NCCL is not used; "" if it is; None: not known yet
        self.refusal: str | None = None
        self._nccl_worked = False  # the first tensor of the last group arrived

    def send(self, bucket: WeightBucket, servers: Sequence[Server], tag: str | None) -> None:
        """Ask every server to receive, and start to broadcast the bucket.

        The bucket is sent and loaded while the next one is gathered: rank 0 receives shards and
        sends buckets at the same time.
        """
        tensors = bucket.tensors
        on_gpu = tensors[0][1].is_cuda and all(server.layout.on_gpu for server in servers)
        if on_gpu and self._nccl_works():
            self.wait()  # first: the GPU has no room for a third bucket
            if self.group is None or not self.group.serves(servers):
                tensors = self._send_first(tensors, servers, tag)
            if tensors:
                self._start(tensors, flattened(tensors), servers, tag, "nccl")
        else:
            flat = flattened(tensors, self._buffer(sum(value.nbytes for _, value in tensors)))
            self.wait()
            self._start(tensors, flat, servers, tag, "gloo")

    def _send_first(
        self, tensors: NamedTensors, servers: Sequence[Server], tag: str | None
    ) -> NamedTensors:
        """Send the smallest tensor alone over a new NCCL group; returns the others. NCCL is refused
        where it does not arrive.
        """
        smallest = min(tensors, key=lambda named: named[1].nbytes)
        others = [named for named in tensors if named is not smallest]
        worked, self._nccl_worked = self._nccl_worked, False
        try:
            last = None if others else tag
            self._start([smallest], flattened([smallest]), servers, last, "nccl", FIRST_SECONDS)
            self.wait()
        except Exception as error:
            if not worked:
                self._refuse(
                    f"the first tensor did not arrive over NCCL ({_first_line(error)}); "
                    f"{nccl_versions(servers_nccl(self.settings), own_nccl_version())}"
                )
            raise
        self._nccl_worked = True
        return others

    def _start(
        self,
        tensors: NamedTensors,
        flat: Tensor,
        servers: Sequence[Server],
        tag: str | None,
        backend: str,
        timeout: float | None = None,
    ) -> None:
        """Start to broadcast the tensors, whose bytes are `flat`."""
        group = self._group(servers, backend)
        body = {
            "names": [name for name, _ in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            "flush_cache": tag is not None and not self.pool.keeps_cache,
            "weight_version": tag,
            "selector": "target",
        }
        path, timeout = "/update_weights_from_distributed", timeout or self.settings.sync_timeout
        answers = {
            server.client.url: self.pool.run(server.client.update_weights(path, body, timeout))
            for server in servers
        }
        sent = group.broadcast(flat, answers, timeout)
        self.inflight = InflightBucket(group, sent, answers, timeout)

    def wait(self) -> None:
        """Wait until the last bucket is sent, and the servers have loaded it."""
        last, self.inflight = self.inflight, None
        if last is None:
            return
        try:
            wait_for(last.sent.done, last.answers, last.timeout, "a broadcast of weights")
            last.sent.result()
            results(list(last.answers.values()), last.timeout)
        except BaseException as error:
            self._close()  # the group's members disagree about the next operation
            if not isinstance(error, dist.DistBackendError):
                raise
            raise EngineError(
                f"rank 0's broadcast of weights over NCCL to {', '.join(last.answers)} failed "
                f"({_first_line(error)}); see the servers' logs, or set sglang.sync_method=disk"
            ) from error

    def abandon(self, error: Exception) -> None:
        """A bucket in flight is left to its group, which is not used again."""
        if self.inflight is not None:
            self.inflight = None
            self._close()

    def _nccl_works(self) -> bool:
        """Whether to try NCCL: the Python that launches servers is asked once."""
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

    def _close(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.close()

    def _buffer(self, size: int) -> Tensor:
        """Host memory without a bucket in flight."""
        self.buffers.reverse()
        if self.buffers[0].numel() < size:
            self.buffers[0] = torch.empty(size, dtype=torch.uint8)
        return self.buffers[0]

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
    """The difference between the servers' NCCL and this process's; empty if there is none, or it is
    not known: attached servers do not report it, and only sglang.python names their Python.
    """
    theirs, ours = servers_nccl(settings), own_nccl_version()
    return "" if theirs in (None, ours) else nccl_versions(theirs, ours)


def nccl_versions(theirs: tuple[int, ...] | None, ours: tuple[int, ...]) -> str:
    """The servers' and this process's version of NCCL."""
    known = f"the trainer has NCCL {'.'.join(map(str, ours))}"
    if theirs is None:
        return f"{known}, the servers' is not known (sglang.python names theirs)"
    return f"{known}, the servers' Python has {'.'.join(map(str, theirs))}"


def wait_for(done: Callable[[], bool], answers: Answers, timeout: float, what: str) -> None:
    """Wait until `done`. Raises the failure of a server's answer; EngineError after `timeout`
    seconds, with the servers that have not answered.
    """
    deadline = time.monotonic() + timeout
    pause = 1e-4
    while not done():
        for answer in answers.values():
            if answer.done() and answer.exception() is not None:
                answer.result()
        if time.monotonic() > deadline:
            silent = [url for url, answer in answers.items() if not answer.done()]
            who = f"no answer from {', '.join(silent)}" if silent else "every server has answered"
            raise EngineError(
                f"rank 0: {what} was not done in {timeout:g} s (sglang.sync_timeout): {who}; see "
                "the servers' logs, or raise sglang.sync_timeout"
            )
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)


def address_for(urls: Sequence[str]) -> str:
    """The address under which the servers reach this machine; loopback if all are on it. UserError:
    there is no way to one of them.
    """
    hosts = [urllib.parse.urlsplit(url).hostname or "127.0.0.1" for url in urls]
    far = next((host for host in hosts if not is_loopback(host)), None)
    if far is None:
        return "127.0.0.1"
    if not (address := address_towards(far)):
        raise UserError(
            f"no route leads from this machine to the server at {far}; correct sglang.urls, or set "
            "sglang.master_address to the address at which servers reach this trainer"
        )
    return address


def _broadcast(group: Any, tensor: Tensor, answers: Answers, timeout: float) -> None:
    work = group.broadcast([tensor])
    wait_for(work.is_completed, answers, timeout, "a broadcast of weights")
    work.wait()


def _in_thread[T](work: Callable[..., T], *arguments: Any) -> Future[T]:
    """The result of `work` in a thread of its own, because servers may block it forever. After an
    error nothing holds the arguments: `work` is not a closure, because the frames in a traceback
    keep their functions.
    """
    outcome: Future[T] = Future()
    given = [arguments]
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # each thread has its own current device
            outcome.set_result(work(*given.pop()))
        except BaseException as error:
            clear_frames(error)
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
