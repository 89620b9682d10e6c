"""When NCCL is given up for gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_stare.loop.sync.parts import Part
from megatron_stare.loop.sync.weight_sync import Broadcast
from megatron_stare.rollout.engine import EngineError
from tests.rollout.sglang.idle import idle_pool, tiny_model


class Refusing:
    """A group of which NCCL says what it says of two versions, before or behind a first success."""

    name = "refusing"

    def __init__(self, has_sent: bool) -> None:
        self.has_sent, self.closed = has_sent, False

    def serves(self, servers: Any) -> bool:
        return True

    def broadcast(self, tensor: torch.Tensor, answers: Any) -> None:
        raise dist.DistBackendError("NCCL error: invalid usage\nMismatched NCCL version detected")

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("has_sent", [False, True])
def test_a_first_broadcast_that_nccl_refuses_leaves_it_for_gloo(
    has_sent: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A later one failed because a server died: the next group is NCCL's again."""
    with idle_pool(tiny_model(tmp_path / "model"), tmp_path / "logs") as pool:
        transport = Broadcast(pool, pool.settings)
        group = transport.group = Refusing(has_sent)  # type: ignore[assignment]
        with pytest.raises(EngineError, match="over NCCL failed"):
            transport.send(Part([("a", torch.ones(2))]), [], None)
        assert group.closed and transport.group is None
        assert transport._nccl_works() is has_sent
    assert ("over gloo, by way of host memory: NCCL failed" in caplog.text) is not has_sent
