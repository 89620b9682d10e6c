"""Everything that goes wrong between a pool and its servers, for real:
nothing is lost, doubled or believed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_stare.config import EngineError
from megatron_stare.policy.topology import Topology
from megatron_stare.rollout.engine import State, generate
from megatron_stare.rollout.sglang.process import ServerProcess
from tests.rollout.sglang.idle import sample_all
from tests.rollout.sglang.proxy import Proxy
from tests.rollout.sglang.world import (
    PLAIN,
    assert_sampled_from,
    attached,
    engine_for,
    make_model,
    requests,
)

pytestmark = pytest.mark.sglang


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Put `value` at a dotted place of an answer, None: take it away. -1 is the last:
    an answer may be one token.
    """

    def apply(answer: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        node: Any = answer
        for part in parents:
            node = node[int(part) if isinstance(node, list) else part]
        if value is None:
            node.pop(int(last) if isinstance(node, list) else last)
        else:
            node[int(last) if isinstance(node, list) else last] = value

    return apply


FAULTS: dict[str, tuple[int | str | Callable[[dict[str, Any]], None], str]] = {
    "500": (500, "status"),
    "503": (503, "status"),
    "no json": ("garbage", "garbage"),
    "reset": ("reset", "connection"),
    "hung": ("hang", "timeout"),
    "no ids": (change("output_ids", None), "garbage"),
    "an id too few": (change("output_ids.-1", None), "garbage"),
    "a log-prob too few": (change("meta_info.output_token_logprobs.-1", None), "garbage"),
    "foreign id": (change("output_ids.-1", 100_000), "garbage"),
    "infinite": (change("meta_info.output_token_logprobs.-1", [-math.inf, 0, None]), "garbage"),
    "not a number": (change("meta_info.output_token_logprobs.-1.0", math.nan), "garbage"),
    "positive": (change("meta_info.output_token_logprobs.-1.0", 0.5), "garbage"),
    "unknown end": (change("meta_info.finish_reason.type", "tired"), "garbage"),
    "aborted unasked": (change("meta_info.finish_reason.type", "abort"), "status"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_answer_is_counted_and_asked_for_again(
    name: str, proxy: Proxy, checkpoint: Path, tmp_path: Path
):
    fault, kind = FAULTS[name]
    # Short only where the fault is that nothing comes: a busy machine is not a fault.
    with attached(
        [proxy.url], checkpoint, tmp_path, queue_timeout=15.0 if name == "hung" else 60.0
    ) as pool:
        proxy.faults["/generate"] = [fault] * 2
        asked = requests(12)
        rollouts = sample_all(pool, asked, PLAIN).result(timeout=120)
        assert_sampled_from(checkpoint, asked, rollouts)
        expected = {f"engine_fault_{kind}": 2.0}
        if name == "aborted unasked":  # what it had is kept
            expected["engine_continued"] = 2.0
        assert {key: count for key, count in pool.counts().items() if count} == expected


def test_a_server_with_only_faulty_answers_ends_the_run(
    proxy: Proxy, checkpoint: Path, tmp_path: Path
):
    with attached([proxy.url], checkpoint, tmp_path, max_attempts=3) as pool:
        proxy.faults["/generate"] = [500] * 100
        with pytest.raises(
            EngineError, match=r"3 faulty answers \(sglang.max_attempts\).*status 500"
        ):
            sample_all(pool, requests(2), PLAIN).result(timeout=60)


def test_a_server_that_only_knows_the_older_names_is_served(
    proxy: Proxy, checkpoint: Path, tmp_path: Path
):
    proxy.faults = {
        path: [404] * 10_000 for path in ("/server_info", "/model_info", "/ready", "/tokenize")
    }
    with attached([proxy.url], checkpoint, tmp_path) as pool:
        asked = requests(4)
        assert_sampled_from(checkpoint, asked, sample_all(pool, asked, PLAIN).result())
        pool.probe()
        assert [server.state for server in pool.servers] == [State.READY]
    assert proxy.seen["/get_server_info"] and proxy.seen["/get_model_info"]


def test_weights_that_another_run_replaced_are_sent_again(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, topology: Topology
):
    engine = engine_for(checkpoint, tmp_path, topology, f"sglang.urls=[{server.url}]")
    engine.load_weights(load_file(checkpoint / "model.safetensors").items(), 3)
    with attached([server.url], make_model(tmp_path / "other", "qwen2", seed=9), tmp_path):
        pass
    asked = requests(8)
    assert_sampled_from(checkpoint, asked, generate(engine, asked, PLAIN))
    assert 1 <= engine.counts()["engine_fault_garbage"] <= 8
    engine.close()
