"""Buckets that are broadcast while the next is gathered, and when NCCL is given up for gloo."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.config import EngineError
from megatron_stare.rollout.sglang.client import ServerFault
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.process import own_nccl_version
from megatron_stare.sync import broadcast
from megatron_stare.sync.broadcast import BroadcastTransport, InflightBucket, UpdateGroup
from megatron_stare.sync.served_engine import make_sync
from megatron_stare.sync.weight_sync import WeightBucket, in_buckets
from tests.rollout.sglang.idle import idle_pool, send_weights, tiny_model

LENGTH = 1 << 18  # of a tensor that fills a bucket: 1 MiB
SMALL: dict[str, Any] = {"sync_bucket_mib": 1, "verify_weights": False}


class Group:
    """One whose servers take a bucket when the test says so."""

    name = "group"

    def __init__(self) -> None:
        self.sent: list[tuple[Tensor, Future[None]]] = []
        self.closed = False

    def serves(self, servers: Any) -> bool:
        return not self.closed

    def broadcast(self, tensor: Tensor, answers: Any, timeout: float) -> Future[None]:
        self.sent.append((tensor, Future()))
        return self.sent[-1][1]

    def close(self) -> None:
        self.closed = True


class Stuck:
    """A process group whose broadcast never ends, because a server died."""

    def __init__(self) -> None:
        self.aborted, self.may_abort = 0, threading.Event()
        self.may_abort.set()

    def broadcast(self, tensors: list[Tensor]) -> Stuck:
        self.tensors = tensors  # as NCCL holds them
        return self

    def is_completed(self) -> bool:
        return False

    def abort(self) -> None:
        self.may_abort.wait()
        self.aborted += 1


def update_group(pool: SGLangPool, members: Any) -> UpdateGroup:
    """The group of all servers of the pool, over these members."""
    group = object.__new__(UpdateGroup)
    group.pool, group.servers = pool, []
    group.name, group.attempts, group._group = "group", [], members
    return group


def test_buckets_hold_the_stream_in_order_and_mark_the_last() -> None:
    stream = [(str(n), torch.zeros(n + 1)) for n in range(9)]
    parts = list(in_buckets(iter(stream), 40))
    assert [name for part, *_ in parts for name, _ in part] == [name for name, _ in stream]
    assert [last for _, last, _ in parts] == [False] * (len(parts) - 1) + [True]
    assert all(
        len(part) == 1 or sum(tensor.nbytes for _, tensor in part) <= 40 for part, *_ in parts
    )
    assert [len(part) for part, *_ in parts] == [4, 1, 1, 1, 1, 1]


def test_a_bucket_is_sent_while_the_next_is_gathered_and_none_is_kept(tmp_path: Path) -> None:
    """Each of the tensors fills a bucket, which goes when the next one has come: when the third is
    asked for, the first is on its way and only in the buffer that it is sent from.
    """
    group, values, freed = Group(), [], []

    def gathered() -> Iterator[tuple[str, Tensor]]:
        last: list[Any] = []
        for number in range(5):
            if number >= 2:
                content, sent = group.sent[-1]
                assert len(group.sent) == number - 1 and not sent.done()
                freed.append(last[-2]() is None)
                values.append(content.view(torch.float32)[:LENGTH].unique().tolist())
                sent.set_result(None)
            tensor = torch.full((LENGTH,), float(number))
            last.append(weakref.ref(tensor))
            yield f"w{number}", tensor
            del tensor
        group.sent[-1][1].set_result(None)  # the last but one; the last one goes at the end

    model = tiny_model(tmp_path / "model")
    with idle_pool(model, tmp_path / "logs", **SMALL, sync_timeout=1.0) as pool:
        sync = make_sync(pool, pool.settings, "", tmp_path / "weights")
        transport = sync.transport
        assert isinstance(transport, BroadcastTransport)
        transport.group = group  # type: ignore[assignment]
        with pytest.raises(EngineError, match=r"not done in 1 s \(sglang.sync_timeout\)"):
            send_weights(sync, gathered(), [])
        assert group.closed and transport.inflight is None and transport.group is None
    assert values == [[0.0], [1.0], [2.0]] and all(freed)
    assert [content.view(torch.float32)[0].item() for content, _ in group.sent[-2:]] == [3.0, 4.0]


def test_weights_that_end_early_leave_no_bucket_to_the_next_ones(tmp_path: Path) -> None:
    def gathered() -> Iterator[tuple[str, Tensor]]:
        for number in range(2):
            yield f"w{number}", torch.ones(LENGTH)
        raise RuntimeError("a rank died")

    with idle_pool(tiny_model(tmp_path / "model"), tmp_path / "logs", **SMALL) as pool:
        sync = make_sync(pool, pool.settings, "", tmp_path / "weights")
        group = sync.transport.group = Group()  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="a rank died"):
            send_weights(sync, gathered(), [])
        assert len(group.sent) == 1 and group.closed
        assert sync.transport.inflight is None  # type: ignore[attr-defined]


def test_a_server_that_dies_in_mid_broadcast_leaves_neither_its_bucket_nor_the_group(
    tmp_path: Path,
) -> None:
    """Both are free without the cyclic collector, while the error is kept; the group is aborted."""
    with idle_pool(tiny_model(tmp_path / "model"), tmp_path / "logs", **SMALL) as pool:
        sync = make_sync(pool, pool.settings, "", tmp_path / "weights")
        transport, members, bucket = sync.transport, Stuck(), torch.ones(LENGTH)
        assert isinstance(transport, BroadcastTransport)
        group = transport.group = update_group(pool, members)
        died: Future[Any] = Future()
        answers = {"http://dies": died}
        sent = group.broadcast(bucket, answers, 600.0)
        transport.inflight = InflightBucket(group, sent, answers, 600.0)
        freed = [weakref.ref(each) for each in (bucket, group, members)]
        failure: Exception | None = None
        gc.disable()
        try:
            del bucket, group, members, sent, answers
            died.set_exception(ServerFault("connection", "ConnectionResetError"))
            try:
                send_weights(sync, [("w", torch.ones(1))], [])
            except ServerFault as error:
                failure = error
            wait_until(lambda: all(ref() is None for ref in freed))
        finally:
            gc.enable()
        assert failure is not None and transport.group is None


def test_the_wait_for_an_abort_is_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "ABORT_SECONDS", 0.01)
    members = Stuck()
    members.may_abort.clear()
    with idle_pool(tiny_model(tmp_path / "model"), tmp_path / "logs") as pool:
        update_group(pool, members).close()
        assert not members.aborted and "was not aborted in 0.01 s" in caplog.text
        members.may_abort.set()
        wait_until(lambda: members.aborted == 1)


NCCL_FAULTS: dict[str, tuple[Exception | None, str]] = {
    "rank 0": (dist.DistBackendError("NCCL error: invalid usage\nMismatched"), "invalid usage"),
    "a server": (ServerFault("status", "status 400: NCCL error", status=400), "NCCL error"),
    "a crash": (ServerFault("connection", "ConnectionResetError"), "ConnectionResetError"),
    "silence": (None, "not done in 0.02 s"),
}


@pytest.mark.parametrize("fault", NCCL_FAULTS)
@pytest.mark.parametrize("stage", ["forming", "first tensor", "later"])
def test_a_failure_before_the_first_nccl_tensor_falls_back_to_gloo(
    stage: str,
    fault: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later failure is the death of a server: the next group is NCCL's again."""
    raised, said = NCCL_FAULTS[fault]
    group, backends = Group(), list[str]()

    def formed(pool: Any, servers: Any, backend: str, *_: Any) -> Group:
        backends.append(backend)
        if stage == "forming" and backend == "nccl":
            raise raised or EngineError("forming the group was not done in 0.02 s")
        return Group() if backend == "gloo" else group

    monkeypatch.setattr(broadcast, "UpdateGroup", formed)
    monkeypatch.setattr(broadcast, "FIRST_SECONDS", 0.02 if fault == "silence" else 60.0)
    with idle_pool(
        tiny_model(tmp_path / "model"), tmp_path / "logs", sync_timeout=0.02, python="/no/python"
    ) as pool:
        transport = BroadcastTransport(pool, pool.settings)
        transport.refusal = ""  # the versions are not known
        broadcasts = group.broadcast
        sizes = list[int]()

        def answered(tensor: Tensor, answers: Any, timeout: float) -> Future[None]:
            sizes.append(tensor.numel())
            found = broadcasts(tensor, answers, timeout)
            failing = len(group.sent) == (1 if stage == "first tensor" else 2)
            if not failing:
                found.set_result(None)
            elif raised:
                found.set_exception(raised)
            return found

        group.broadcast = answered  # type: ignore[method-assign]
        weights = [("a", torch.ones(4)), ("b", torch.ones(1)), ("c", torch.ones(2))]
        on_gpu = [(name, OnGPU(tensor)) for name, tensor in weights]

        def send() -> None:
            transport.send(WeightBucket(on_gpu), [], None)  # type: ignore[arg-type]
            transport.wait()

        with pytest.raises(RuntimeError, match=said):
            send()
        if stage != "forming":
            assert group.closed and transport.group is None
            assert sizes == ([4] if stage == "first tensor" else [4, 24])
        refused = stage != "later"
        assert transport._nccl_works() is not refused
        if refused:
            transport.send(WeightBucket(on_gpu), [], None)  # type: ignore[arg-type]
            assert backends == ["nccl", "gloo"]
            assert said in caplog.text and "over gloo, by way of host memory" in caplog.text
            assert "the trainer has NCCL" in caplog.text and "the servers' is not" in caplog.text


def test_one_failure_does_not_refuse_nccl_where_it_worked_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that died before the first tensor explains it, and all later syncs would be slow."""
    died = ServerFault("connection", "ConnectionResetError")
    outcomes: list[Exception | None] = [None, died, None, died, died]

    class Taken(Group):
        def broadcast(self, tensor: Tensor, answers: Any, timeout: float) -> Future[None]:
            found = super().broadcast(tensor, answers, timeout)
            found.set_result(None)
            return found

    def formed(*_: Any) -> Group:
        if outcome := outcomes.pop(0):
            raise outcome
        return Taken()

    monkeypatch.setattr(broadcast, "UpdateGroup", formed)
    model = tiny_model(tmp_path / "model")
    with idle_pool(model, tmp_path / "logs", python="/no/python") as pool:
        transport = BroadcastTransport(pool, pool.settings)
        transport.refusal = ""  # the versions are not known
        bucket = WeightBucket([(name, OnGPU(torch.ones(2))) for name in "ab"])
        works = list[bool]()
        while outcomes:
            transport.group = None  # a server restarted
            failing = pytest.raises(ServerFault) if outcomes[0] else contextlib.nullcontext()
            with failing:
                transport.send(bucket, [], None)
                transport.wait()
            works.append(transport._nccl_works())
    assert works == [True, True, True, True, False]


class OnGPU(Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type, tensor: Tensor) -> Any:
        return tensor.as_subclass(OnGPU)


def test_both_nccl_versions_are_named_where_the_servers_python_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Attached servers included, before anything is sent. To ask takes an import of torch."""
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(f"#!/bin/sh\necho asked >> {asked}\necho 2 0 1\n")
    python.chmod(0o755)
    settings = {"python": str(python)}
    with idle_pool(tiny_model(tmp_path / "model"), tmp_path / "logs", **settings) as pool:
        assert not BroadcastTransport(pool, pool.settings)._nccl_works()
    own = ".".join(map(str, own_nccl_version()))
    assert f"the trainer has NCCL {own}, the servers' Python has 2.0.1" in caplog.text
    assert asked.read_text() == "asked\n", "once"


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
