"""scoring.advantage=dcpo in whole runs: what a prompt's earlier visits gave, in every buffer, and
after a stop."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from megatron_stare.config import Config, ScoringConfig, UserError
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.scoring.advantages import PromptHistory, with_advantages
from tests.collect.test_rollout_buffer_stream import (
    CONTINUE,
    ONE_OFF,
    OVER,
    rows_of_a_stopped_run,
    trained_groups,
)
from tests.small_run import small_config

DCPO = ("scoring.advantage=dcpo", "rollout.dynamic_sampling=false")


def judged(reward: float) -> Rollout:
    return Rollout((1,), (0.0,), (1,), status="completed", weight_version=0, reward=reward)


def on_few_prompts(directory: Path, *options: str) -> Config:
    """Four prompts, which every step sees again."""
    config = small_config(directory, *DCPO, *options)
    rows = [{"prompt": f"{n}+1=", "label": str(n + 1)} for n in range(4)]
    (directory / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config


@pytest.mark.parametrize(
    "options", [(), (ONE_OFF,), (CONTINUE, OVER)], ids=["rounds", "one off", "stream"]
)
def test_advantages_are_those_of_all_visits(options, tmp_path: Path, topology: Topology) -> None:
    run = Trainer(on_few_prompts(tmp_path, *options, "train.num_rollout=4"), topology)
    visits: dict[str, tuple[int, float, float]] = {}
    differ = 0
    for groups in trained_groups(run):
        for group in groups:
            rewards = [rollout.reward for rollout in group.rollouts]
            seen, mean, variance = visits.get(group.prompt.label, (0, 0.0, 0.0))
            mu, sd = statistics.mean(rewards), statistics.stdev(rewards)
            between = seen / (seen + 1) * (mu - mean) ** 2
            variance = (seen * variance + sd**2 + between) / (seen + 1)
            mean, seen = (seen * mean + mu) / (seen + 1), seen + 1
            visits[group.prompt.label] = (seen, mean, variance)
            for rollout in group.rollouts:
                now = (rollout.reward - mu) / sd if sd else 0.0
                ever = (rollout.reward - mean) / variance**0.5 if variance else 0.0
                mixed = ((seen - 1) * now + ever, (seen - 1) * ever + now)
                assert rollout.advantage == pytest.approx(min(mixed, key=abs) / seen, abs=1e-9)
                differ += abs(rollout.advantage - now) > 0.01
    assert differ > 4, "an earlier visit counts"
    assert sum(seen for seen, *_ in visits.values()) == 16
    assert {round(row[0]) for row in run.collector.history.values()} == {4}


@pytest.mark.parametrize("options", [(), (ONE_OFF,)], ids=["rounds", "one off"])
def test_a_stopped_run_repeats_an_uninterrupted_one(
    options, tmp_path: Path, topology: Topology
) -> None:
    on_few_prompts(tmp_path)
    rows_of_a_stopped_run(tmp_path, topology, 2, *DCPO, *options)


@pytest.mark.parametrize("options", [(), (CONTINUE, OVER)], ids=["rounds", "stream"])
def test_an_unfinished_step_is_not_a_visit(options, tmp_path: Path, topology: Topology) -> None:
    run = Trainer(on_few_prompts(tmp_path, *options), topology)
    run.train_step()
    before = run.collector.state()["history"]
    run.collector.collect(1)
    assert run.collector.state()["history"] == before
    run.collector.finish_step({}, [])
    after = run.collector.state()["history"]
    assert after != before and sum(row[0] for row in after.values()) == 8.0
    other = Trainer(on_few_prompts(tmp_path, *options, f"run.dir={tmp_path}/other"), topology)
    other.collector.load_state(run.collector.state())
    assert other.collector.history == after


def test_a_prompt_is_the_same_in_every_epoch_and_twice_in_a_batch() -> None:
    """Another label is another prompt; the second group of a batch sees the first."""
    prompts = [Prompt(0, (1, 2), "a"), Prompt(8, (1, 2), "b"), Prompt(7, (1, 2), "a")]
    rewards = [(1.0, 0.0), (1.0, 1.0), (1.0, 1.0)]
    groups = [
        Group(prompt, tuple(judged(value) for value in pair))
        for prompt, pair in zip(prompts, rewards, strict=True)
    ]
    history = PromptHistory()
    found = with_advantages(groups, ScoringConfig(advantage="dcpo"), history)
    keys = [group.prompt_key for group in groups]
    assert history[keys[0]][0] == 2 and history[keys[1]] == (1.0, 1.0, 0.0)
    assert keys[0] == keys[2] and set(history) == set(keys)
    values = [[one.advantage for one in group.rollouts] for group in found]
    assert values[:2] == [[pytest.approx(0.5**0.5), pytest.approx(-(0.5**0.5))], [0.0, 0.0]]
    # N = 0; P = (1 - 3/4) / sqrt((1/2 + 1/2 x 1/4) / 2), and both mixtures are P / 2.
    assert values[2] == [pytest.approx(0.25 / (0.625 / 2) ** 0.5 / 2)] * 2


def test_resampling_methods_are_refused(tmp_path: Path, topology: Topology) -> None:
    options = ("rollout.resampling.method=aepo", "rollout.resampling.target_entropy=1")
    with pytest.raises(UserError, match=r"scoring\.advantage=dcpo remembers the batch"):
        Trainer(on_few_prompts(tmp_path, *options), topology)
