"""A failure on one rank fails on all of them, in the same way, so that they can save together."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_stare.config import Config, EngineError, NoSignalError, UserError
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import agreed
from tests.distributed import run_distributed

FAILURES = {
    "user": UserError("fix it"),
    "signal": NoSignalError("none"),
    "engine": EngineError("dead"),
    "other": KeyError("gone"),
}


def agree(rank: int, world_size: int) -> dict[str, Any]:
    topology = topologies.start(Config().policy)
    found: dict[str, Any] = {"values": agreed(topology, lambda: rank * 10)}
    for name, failure in FAILURES.items():

        def work(failure: Exception = failure) -> int:
            if rank == 1:
                raise failure
            return rank

        try:
            agreed(topology, work)
        except Exception as error:
            found[name] = (type(error).__name__, str(error))
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_distributed(agree, 2)


def test_every_rank_has_every_value(ranks: list[dict[str, Any]]) -> None:
    assert [rank["values"] for rank in ranks] == [[0, 10], [0, 10]]


def test_every_rank_raises_alike(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["user"] == ("UserError", "fix it")
        assert rank["signal"] == ("NoSignalError", "none")
        assert rank["engine"][0] == "EngineError" and "dead" in rank["engine"][1]
        assert rank["other"] == ("EngineError", "rank 1: KeyError: 'gone'")
