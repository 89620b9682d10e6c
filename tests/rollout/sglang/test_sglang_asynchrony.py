"""New weights reach rollouts in flight on a real server:
nothing is lost, and every token knows what sampled it.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from megatron_stare.rollout.engine import Request
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.process import ServerProcess
from tests.collect.test_rollout_buffer_stream import assert_none_is_doubled, trained_groups
from tests.rollout.sglang.idle import sample_all
from tests.rollout.sglang.world import (
    LONG,
    TOLERANCE,
    VERIFY,
    assert_sampled_from,
    make_model,
    requests,
    sync,
)
from tests.small_run import rows_of, small_config

pytestmark = pytest.mark.sglang

# Two rollouts at a time last longer than a training step of this model, on a quiet machine and on
# a busy one: new weights and the end of a round find rollouts in flight.
SLOW_ROLLOUTS = ("rollout.rollout_max_response_len=60", "sglang.max_concurrency=2")


def logprobs(checkpoint: Path, request: Request, ids: tuple[int, ...]) -> torch.Tensor:
    """The log-probs of every response token, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*request.prompt_ids, *ids]])).logits[
            0, len(request.prompt_ids) - 1 : -1
        ]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def test_rollouts_in_flight_continue_under_new_weights(
    pool: SGLangPool, checkpoint: Path, tmp_path: Path
):
    other = make_model(tmp_path / "other", "qwen2", seed=9)
    asked = requests(16)
    future = sample_all(pool, asked, LONG)
    time.sleep(0.3)
    pool.expect(1)
    pool.interrupt()
    deadline = time.monotonic() + 60
    while not pool.admission.without_weights() and time.monotonic() < deadline:
        time.sleep(0.01)
    sync(pool, other, 1, tmp_path)
    rollouts = future.result(timeout=120)
    mixed = [number for number, rollout in enumerate(rollouts) if set(rollout.versions) == {0, 1}]
    assert 0 < len(mixed) <= pool.counts()["engine_interrupted"]
    for number in mixed[:6]:
        request, rollout = asked[number], rollouts[number]
        early = torch.tensor([version == 0 for version in rollout.versions])
        assert list(rollout.versions) == sorted(rollout.versions) and rollout.status != "aborted"
        assert rollout.text == pool.model.tokenizer.decode(
            rollout.response_ids, skip_special_tokens=True
        )
        old, new = (logprobs(path, request, rollout.response_ids) for path in (checkpoint, other))
        expected, wrong = torch.where(early, old, new), torch.where(early, new, old)
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=TOLERANCE, rtol=0)
        assert (expected - wrong).abs().max() > 100 * TOLERANCE, "the two policies are distinct"
    again = requests(8, seed=5)
    assert_sampled_from(other, again, sample_all(pool, again, LONG).result(timeout=120))


def run_of(
    directory: Path, server: ServerProcess, checkpoint: Path, topology: Topology, *options: str
) -> Trainer:
    attached = (
        "rollout.engine=sglang",
        f"sglang.urls=[{server.url}]",
        f"policy.hf_checkpoint={checkpoint}",
        VERIFY,
    )
    room = ("rollout.rollout_max_response_len=40", "policy.max_tokens_per_gpu=400")
    return Trainer(small_config(directory, *attached, *room, *options), topology)


def test_a_fully_asynchronous_run_trains(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, topology: Topology
):
    # The server is slower than the trainer, which always waits for it: all new weights find a
    # rollout in flight.
    slow = (*SLOW_ROLLOUTS, "sglang.max_concurrency=1")
    options = ("rollout.asynchrony=fully_async", "rollout.max_staleness=2", "train.num_rollout=6")
    run = run_of(tmp_path, server, checkpoint, topology, *options, *slow)
    steps = trained_groups(run)
    assert_none_is_doubled(steps, run.config)
    rows = rows_of(run.config)
    assert all(row["staleness_max"] <= 2 for row in rows)
    assert any(row["staleness_mean"] > 0 for row in rows)  # a batch of fresh groups may be the last
    assert all(row.get("logprob_diff_max", 0) < TOLERANCE for row in rows)
    assert rows[-1]["engine_interrupted"] > 0 == rows[-1]["engine_fault_garbage"]
    rollouts = [rollout for groups in steps for group in groups for rollout in group.rollouts]
    mixed = sum(len(set(rollout.versions)) > 1 for rollout in rollouts)
    assert mixed > 0, "interrupted rollouts are continued before the prompts that wait"


def test_the_long_tail_is_ended_on_the_server(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, topology: Topology
):
    options = (
        "rollout.long_tail=continue",
        "rollout.over_sampling_batch_size=9",
        "train.num_rollout=5",
    )
    run = run_of(tmp_path, server, checkpoint, topology, *options, *SLOW_ROLLOUTS)
    steps = trained_groups(run)
    assert_none_is_doubled(steps, run.config)
    rows = rows_of(run.config)
    assert rows[-1]["engine_aborted"] > 0 == rows[-1]["engine_interrupted"]
    assert all(row.get("logprob_diff_max", 0) < TOLERANCE for row in rows)
    rollouts = [rollout for groups in steps for group in groups for rollout in group.rollouts]
    assert any(len(set(rollout.versions)) > 1 for rollout in rollouts), "parts were continued"


def test_a_run_one_step_off_trains(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, topology: Topology
):
    run = run_of(
        tmp_path,
        server,
        checkpoint,
        topology,
        "rollout.asynchrony=one_step_off",
        "train.num_rollout=4",
    )
    for step, groups in enumerate(trained_groups(run)):
        versions = {
            version
            for group in groups
            for rollout in group.rollouts
            for version in rollout.versions
        }
        assert versions == {max(0, step - 1)}
    assert rows_of(run.config)[-1]["engine_interrupted"] == 0
