"""ReMax: a greedy rollout next to the trained ones; its reward is their baseline."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Rollout
from megatron_stare.rollout.engine import Request, SamplingParams
from tests.collect.test_rollout_buffer_stream import ONE_OFF, rows_of_a_stopped_run
from tests.collect.test_rollout_worker import Patient, prompts, said, worker_of
from tests.rewards import even_characters
from tests.small_run import rows_of, small_config

REMAX = "scoring.advantage=remax"


class Noting(Patient):
    """Notes also whether each request is greedy."""

    def __init__(self) -> None:
        super().__init__()
        self.greedy: dict[tuple[int, ...], bool] = {}

    def submit(self, requests: Sequence[Request], params: Any) -> list[Future[Rollout]]:
        self.greedy |= {request.seed[2:]: params.greedy for request in requests}
        return super().submit(requests, params)


@pytest.mark.parametrize(("greedy", "baseline"), [("4", 1.0), ("wrong", 0.0), ("exit", None)])
def test_the_greedy_rollout_is_judged_and_not_trained(greedy: str, baseline: float | None) -> None:
    engine = Noting()
    with worker_of(engine, REMAX) as worker:
        (future,) = worker.start(prompts(3))
        assert engine.greedy == {(3, 0): False, (3, 1): False, (3, 2): True}
        engine.finish((3, 2), said(greedy))
        engine.finish((3, 0), said("4"))
        assert not future.done()
        engine.finish((3, 1), said("wrong"))
        group = future.result(timeout=120)
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0]
    assert [rollout.baseline for rollout in group.rollouts] == [baseline] * 2


def test_without_remax_nothing_is_sampled_greedily() -> None:
    engine = Noting()
    with worker_of(engine) as worker:
        worker.start(prompts(3))
        assert engine.greedy == {(3, 0): False, (3, 1): False}
        worker.stop()


def test_a_run_learns_from_the_difference_to_the_greedy_response(
    tmp_path: Path, topology: Topology
) -> None:
    """One rollout a prompt is enough: it has signal where the greedy one has another reward."""
    options = (REMAX, "rollout.n_samples_per_prompt=1", "rollout.dynamic_sampling_metric=reward")
    run = Trainer(small_config(tmp_path, *options, "train.num_rollout=1"), topology)
    step, checked = run.learner.step, []

    def seen(groups: Sequence[Group], *others: Any) -> Any:
        params = SamplingParams(0.0, 1.0, run.config.rollout.rollout_max_response_len)
        asked = [Request(group.prompt.token_ids, (9, n)) for n, group in enumerate(groups)]
        futures = run.engine.submit(asked, params)
        run.engine.wait(futures)
        for group, future in zip(groups, futures, strict=True):
            (rollout,) = group.rollouts
            assert rollout.baseline == even_characters(future.result().text, "", {})
            assert rollout.reward != rollout.baseline
            checked.append(rollout.baseline)
        return step(groups, *others)

    run.learner.step = seen  # type: ignore[method-assign]
    assert run.run(Interrupt())
    (row,) = rows_of(run.config)
    assert len(checked) == 4 and row["grad_norm"] > 0
    assert 0.0 <= row["baseline_reward"] <= 1.0


def test_a_stopped_run_repeats_an_uninterrupted_one(tmp_path: Path, topology: Topology) -> None:
    """A checkpoint has the baselines of groups that wait, and of prompts under way."""
    rows = rows_of_a_stopped_run(tmp_path, topology, 2, REMAX, ONE_OFF)
    assert all("baseline_reward" in row for row in rows)
