"""rollout.cache_over_versions=kept: new weights leave requests in flight their prefix cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_stare.config import Config, EngineError, UserError, override
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Rollout
from megatron_stare.rollout.engine import Request, State
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.process import ServerProcess
from megatron_stare.sync.served_engine import make_sync
from tests.collect.test_rollout_buffer_stream import assert_none_is_doubled, trained_groups
from tests.rollout.sglang.idle import idle_pool, sample_all, send_weights, tiny_model
from tests.rollout.sglang.test_sglang_asynchrony import SLOW_ROLLOUTS, run_of
from tests.rollout.sglang.world import (
    LONG,
    TOLERANCE,
    assert_sampled_from,
    attached,
    make_model,
    requests,
    sync,
)
from tests.small_run import rows_of

KEPT = (
    *("rollout.engine=sglang", "rollout.asynchrony=fully_async"),
    *("rollout.cache_over_versions=kept", "mismatch.correction=token_tis"),
)


def loaded(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def sampling(pool: SGLangPool, asked: Sequence[Request]) -> Future[list[Rollout]]:
    """The rollouts of requests; the server works on at least half of them at once."""
    future, client = sample_all(pool, asked, LONG), pool.servers[0].client
    deadline = time.monotonic() + 60
    while pool.run(client.running()).result() < len(asked) // 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    return future


@torch.no_grad()
def newer_tokens(
    old: PreTrainedModel, new: PreTrainedModel, request: Request, rollout: Rollout
) -> int:
    """The number of last tokens that the new weights sampled on the cache of the old ones. Fails if
    the log-probs are not those of such a change at any token.
    """
    prompt, ids = request.prompt_ids.tolist(), rollout.response_ids.tolist()

    def chosen(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        return torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]

    theirs = torch.tensor(rollout.logprobs)
    before = chosen(old(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1], ids)
    other = ((theirs - before).abs() > TOLERANCE).nonzero()
    if not len(other):
        return 0
    first = int(other[0])
    # The last token of the old weights is read by the new ones; a request that came to the server
    # after the update is read by them alone.
    known, cache = prompt + ids[:first], None
    begin = len(known) - 1 if first else 0
    if first:
        cache = old(torch.tensor([known[:-1]]), use_cache=True).past_key_values
    read = torch.tensor([known[begin:] + ids[first:-1]])
    logits = new(read, past_key_values=cache).logits[0, len(known) - 1 - begin :]
    torch.testing.assert_close(theirs[first:], chosen(logits, ids[first:]), atol=TOLERANCE, rtol=0)
    return len(ids) - first if first else 0


@pytest.mark.sglang
@pytest.mark.parametrize("method", ["tensor", "broadcast", "disk"])
def test_requests_in_flight_keep_their_cache_and_later_ones_do_not_see_it(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, method: str
):
    other, asked = make_model(tmp_path / "other", "qwen2", seed=9), requests(16)
    old, new = loaded(checkpoint), loaded(other)
    with attached([server.url], checkpoint, tmp_path, keeps_cache=True, sync_method=method) as pool:
        future = sampling(pool, asked)
        sync(pool, other, 1, tmp_path)
        in_flight = pool.servers[0].in_flight
        rollouts = future.result(timeout=400)
        again = requests(16)  # the same prompts, whose prefixes are in the cache of version 0
        later = sample_all(pool, again, LONG).result(timeout=400)
        counts = pool.counts()
    assert in_flight > 0 == counts["engine_interrupted"] == counts["engine_fault_garbage"]
    assert {version for rollout in rollouts for version in rollout.versions} == {0}
    newer = [newer_tokens(old, new, *pair) for pair in zip(asked, rollouts, strict=True)]
    assert sum(newer) > 0
    # A server that samples one token ahead counts that one as the new weights'.
    assert sum(newer) <= counts["engine_mixed_cache_tokens"] <= sum(newer) + len(asked)
    assert {version for rollout in later for version in rollout.versions} == {1}
    assert_sampled_from(other, again, later)


@pytest.mark.sglang
def test_requests_never_see_half_of_an_update(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An update fails before its end: nothing is sampled until the next one has succeeded."""
    other, asked = make_model(tmp_path / "other", "qwen2", seed=9), requests(16)
    weights = load_file(other / "model.safetensors")

    def fail() -> None:
        raise EngineError("the network is down")

    with attached([server.url], checkpoint, tmp_path, keeps_cache=True) as pool:
        future = sampling(pool, asked)
        pool.expect(1)
        sender = make_sync(pool, pool.settings, str(checkpoint), tmp_path / "weights")
        with monkeypatch.context() as patch:
            patch.setattr(sender.transport, "wait", fail)
            with pytest.raises(EngineError, match="network is down"):
                send_weights(sender, weights.items(), pool.servers)
        pool.probe()
        held = pool.servers[0].in_flight
        assert pool.servers[0].state is State.PAUSED and held > 0
        time.sleep(1.0)
        assert pool.servers[0].in_flight == held
        assert pool.admission.without_weights() == pool.servers
        send_weights(sender, weights.items(), pool.servers)
        assert pool.servers[0].state is State.READY
        rollouts = future.result(timeout=400)
    old, new = loaded(checkpoint), loaded(other)
    assert sum(newer_tokens(old, new, *pair) > 0 for pair in zip(asked, rollouts, strict=True))


@pytest.mark.sglang
def test_a_run_with_kept_caches_trains(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, topology: Topology
):
    options = ("rollout.max_staleness=2", "train.num_rollout=5", "sglang.max_concurrency=1")
    run = run_of(tmp_path, server, checkpoint, topology, *KEPT, *SLOW_ROLLOUTS, *options)
    steps = trained_groups(run)
    assert_none_is_doubled(steps, run.config)
    rows = rows_of(run.config)
    assert all(row["staleness_max"] <= 2 for row in rows)
    assert all(row.get("logprob_diff_max", 0) < TOLERANCE for row in rows)
    assert rows[-1]["engine_mixed_cache_tokens"] > 0 == rows[-1]["engine_interrupted"]
    assert rows[-1]["engine_fault_garbage"] == 0


def test_a_server_with_requests_in_flight_can_be_sent_weights(tmp_path: Path):
    with idle_pool(tiny_model(tmp_path / "model"), tmp_path) as pool:
        pool.servers[0].in_flight = 3
        pool.expect(2)
        assert pool.admission.without_weights() == pool.servers[1:]
        pool.admission.keeps_cache = True
        assert pool.admission.without_weights() == pool.servers


def test_only_newer_weights_of_this_run_may_arrive_in_flight(tmp_path: Path):
    with idle_pool(tiny_model(tmp_path / "model"), tmp_path) as pool:
        newer, admission = pool.tag, pool.admission
        assert not admission.came_meanwhile(newer, 0)
        admission.keeps_cache = True
        assert admission.came_meanwhile(newer, 0)
        for tag in (newer.replace("-1", "-0"), "another-1", "default", ""):
            assert not admission.came_meanwhile(tag, 0), tag


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("rollout.engine=embedded",), r"needs rollout\.engine=sglang"),
        (("rollout.asynchrony=one_step_off",), r"needs rollout\.asynchrony=fully_async"),
        (("sglang.router_url=http://router:1",), r"not possible with sglang\.router_url"),
        (("sglang.sync_method=delta",), r"not possible with sglang\.sync_method=delta"),
        (("mismatch.correction=none",), r"mismatch\.old_policy=auto takes their log-probs"),
        (
            ("mismatch.correction=none", "mismatch.old_policy=rollout"),
            r"mismatch\.old_policy=rollout takes their log-probs",
        ),
    ],
)
def test_settings_that_exclude_kept_caches_are_refused(settings: tuple[str, ...], words: str):
    with pytest.raises(UserError, match=words):
        override(Config(), [*KEPT, *settings])
    override(Config(), [*KEPT, "mismatch.correction=none", "mismatch.old_policy=trainer"])
