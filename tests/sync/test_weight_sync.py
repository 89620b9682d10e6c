"""Buckets that are broadcast while the next is gathered, and when NCCL is given up for gloo."""

from __future__ import annotations

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
from megatron_stare.sync.broadcast import BroadcastTransport
from megatron_stare.sync.transport import WeightBucket
from megatron_stare.sync.weight_sync import WeightSync
from tests.rollout.sglang.idle import idle_pool, send_weights, tiny_model

LENGTH = 1 << 18  # of a tensor that fills a bucket: 1 MiB
SMALL: dict[str, Any] = {"sync_bucket_mib": 1, "verify_weights": False}


class Group:
    """One whose servers take a bucket when the test says so."""

    name, has_sent = "group", True

    def __init__(self) -> None:
        self.sent: list[tuple[Tensor, Future[None]]] = []
        self.closed = False

    def serves(self, servers: Any) -> bool:
        return not self.closed

    def broadcast(self, tensor: Tensor, answers: Any) -> Future[None]:
        self.sent.append((tensor, Future()))
        return self.sent[-1][1]

    def close(self) -> None:
        self.closed = True


class Refusing(Group):
    """NCCL says of it what it says of two versions, before or behind a first success."""

    def __init__(self, has_sent: bool) -> None:
        super().__init__()
        self.has_sent = has_sent  # type: ignore[misc]

    def broadcast(self, tensor: Tensor, answers: Any) -> Future[None]:
        found = super().broadcast(tensor, answers)
        reason = "NCCL error: invalid usage\nMismatched NCCL version detected"
        found.set_exception(dist.DistBackendError(reason))
        return found


def test_a_bucket_is_on_its_way_while_the_next_is_gathered_and_none_is_kept(tmp_path: Path) -> None:
    """Each of the tensors fills a bucket, which goes when the next one has come: when the third is
    asked for, the first is on its way and in nobody's memory but the room that it is sent from.
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
        sync = WeightSync(pool, pool.settings, "", tmp_path / "weights")
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
        sync = WeightSync(pool, pool.settings, "", tmp_path / "weights")
        group = sync.transport.group = Group()  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="a rank died"):
            send_weights(sync, gathered(), [])
        assert len(group.sent) == 1 and group.closed
        assert sync.transport.inflight is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("has_sent", [False, True])
def test_a_first_broadcast_that_nccl_refuses_leaves_it_for_gloo(
    has_sent: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A later one failed because a server died: the next group is NCCL's again."""
    with idle_pool(tiny_model(tmp_path / "model"), tmp_path / "logs") as pool:
        transport = BroadcastTransport(pool, pool.settings)
        group = transport.group = Refusing(has_sent)  # type: ignore[assignment]
        transport.send(WeightBucket([("a", torch.ones(2))]), [], None)
        with pytest.raises(EngineError, match=r"over NCCL to .* failed"):
            transport.wait()
        assert group.closed and transport.group is None
        assert transport._nccl_works() is has_sent
    assert ("over gloo, by way of host memory: NCCL failed" in caplog.text) is not has_sent
