"""The process group in which rank 0 of the trainer broadcasts weights to its servers' ranks.

It stands beside the trainer's own world and is no part of it: rank 0 is the trainer, then follow
the ranks of every server in turn. Both sides meet in a store that the trainer opens; the key
prefixes are those that torch.distributed's own group creation uses on the servers' side.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import socket
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.config import EngineError
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.server import Server

Answers = Sequence["concurrent.futures.Future[Any]"]


class UpdateGroup:
    """A group of this process and the servers' ranks, joined on construction.
    EngineError where that fails.
    """

    def __init__(
        self,
        pool: SGLangPool,
        servers: Sequence[Server],
        backend: str,
        address: str,
        timeout: float,
    ) -> None:
        self.pool, self.servers, self.timeout = pool, list(servers), timeout
        self.incarnations = [server.starts for server in servers]
        self.has_sent = False
        self.name = f"weights-{uuid.uuid4().hex[:8]}"
        limit = datetime.timedelta(seconds=timeout)
        size = 1 + sum(server.info.ranks for server in servers if server.info)
        # Kept: the servers lose their group with it.
        self._store = dist.TCPStore(
            address, 0, size, is_master=True, timeout=limit, wait_for_workers=False
        )
        offset, answers = 1, []
        for server in servers:
            body = {
                "master_address": address,
                "master_port": self._store.port,
                "rank_offset": offset,
                "world_size": size,
                "group_name": self.name,
                "backend": backend,
            }
            answers.append(
                pool.run(
                    server.client.call("POST", "/init_weights_update_group", body, timeout=timeout)
                )
            )
            assert server.info is not None, "a server that answers was admitted"
            offset += server.info.ranks
        joined = _beside(lambda: self._join(size, backend, limit))
        until(joined.done, answers, timeout)
        self._group = joined.result()
        for answer in answers:
            answer.result()

    def serves(self, servers: Sequence[Server]) -> bool:
        """Whether the group holds just these servers, none of them restarted since."""
        return self.servers == list(servers) and self.incarnations == [
            server.starts for server in servers
        ]

    def broadcast(self, tensor: Tensor, answers: Answers) -> concurrent.futures.Future[None]:
        """Begin to send the tensor to every server; `answers` are their requests in flight. Done
        once the tensor may be written to again; `until` says how to wait for it.
        """

        def whole() -> None:
            work = self._group.broadcast([tensor])
            until(work.is_completed, answers, self.timeout)
            work.wait()
            self.has_sent = True

        # The first over NCCL makes the connections, and waits for whoever does not come.
        return _beside(whole)

    def close(self) -> None:
        """Have the servers that still live forget the group."""
        body = {"group_name": self.name}
        for server in self.servers:
            self.pool.run(server.client.call("POST", "/destroy_weights_update_group", body))

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


def _beside[T](work: Callable[[], T]) -> concurrent.futures.Future[T]:
    """What `work` returns or raises, in a thread of its own: it may wait for servers forever."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # each thread has one of its own
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def until(done: Callable[[], bool], answers: Answers, timeout: float) -> None:
    """Wait until `done`. Raises the first answer that failed,
    and EngineError after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    pause = 1e-4
    while not done():
        for answer in answers:
            if answer.done() and answer.exception() is not None:
                answer.result()
        if time.monotonic() > deadline:
            raise EngineError(
                f"a weight update was not done in {timeout:g} s (sglang.sync_timeout)"
            )
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)


def address_for(urls: Sequence[str]) -> str:
    """The address under which the servers reach this machine:
    loopback where all of them are on it.
    """
    hosts = [urllib.parse.urlsplit(url).hostname or "127.0.0.1" for url in urls]
    if all(host in ("127.0.0.1", "localhost", "::1") for host in hosts):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        far = next(host for host in hosts if host not in ("127.0.0.1", "localhost", "::1"))
        probe.connect((far, 9))  # sends nothing: it only asks which way a packet would go
        return str(probe.getsockname()[0])
