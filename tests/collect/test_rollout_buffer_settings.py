"""A run that is resumed with other settings of sampling trains no rollout of the earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.collect.sampling_settings import sampling_digest
from megatron_stare.config import Config, override
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group
from tests.collect.test_rollout_buffer_replay import UEC
from tests.collect.test_rollout_buffer_stream import stop_after
from tests.small_run import rows_of, small_config

WAYS = {
    "ahead": ("rollout.asynchrony=one_step_off", "rollout.dynamic_sampling=false"),
    "stream": ("rollout.asynchrony=fully_async", "rollout.max_staleness=2"),
    "rounds": ("rollout.over_sampling_batch_size=11", "rollout.max_staleness=2"),
    "single rollouts": UEC,
}
HALF = 2


def trained(config: Config, topology: Topology, stops: bool = False) -> list[list[Group]]:
    """The groups of each step of a run, which ends after its first checkpoint if `stops`."""
    run, found = Trainer(config, topology), list[list[Group]]()
    step = run.learner.step

    def noting(groups: Sequence[Group], *others: Any) -> Any:
        found.append(list(groups))
        return step(groups, *others)

    run.learner.step = noting  # type: ignore[method-assign]
    if stops:
        run.saved.checkpoints.save = stop_after(run.saved.checkpoints.save)  # type: ignore[method-assign]
        with pytest.raises(InterruptedError):
            run.run(Interrupt())
    else:
        assert run.run(Interrupt())
    return found


@pytest.mark.parametrize(
    ("way", "change"),
    [
        *((way, "rollout.rollout_temperature=0.7") for way in WAYS),
        ("ahead", "scoring.advantage=remax"),
    ],
)
def test_stored_groups_of_other_settings_are_sampled_again(
    way: str, change: str, tmp_path: Path, topology: Topology
) -> None:
    options = (*WAYS[way], f"train.num_rollout={2 * HALF}", f"run.save_interval={HALF}")
    trained(small_config(tmp_path, *options), topology, stops=True)
    other = small_config(tmp_path, *options, change)
    steps = trained(other, topology)
    assert len(steps) == HALF
    seen = {rollout.sampling for groups in steps for group in groups for rollout in group.rollouts}
    assert seen == {sampling_digest(other)}
    assert rows_of(other)[-1]["changed_rollouts_dropped"] > 0


def test_another_agent_and_another_tool_limit_are_other_settings() -> None:
    agents = [["agents.function=a.b.first"], ["agents.function=a.b.other"]]
    tools = ["tools.environment=calculator"]
    options = [[], tools, [*tools, "tools.max_turns=3"], *agents]
    assert len({sampling_digest(override(Config(), each)) for each in options}) == 5
    elsewhere = override(Config(), [*agents[0], "agents.hosts=5", "agents.port=30001"])
    assert sampling_digest(elsewhere) == sampling_digest(override(Config(), agents[0]))


def test_a_batch_that_was_sampled_ahead_is_too_old_for_a_run_on_policy(
    tmp_path: Path, topology: Topology
) -> None:
    options = (*WAYS["ahead"], f"train.num_rollout={2 * HALF}", f"run.save_interval={HALF}")
    trained(small_config(tmp_path, *options), topology, stops=True)
    other = small_config(tmp_path, *options, "rollout.asynchrony=on_policy")
    for step, groups in enumerate(trained(other, topology), HALF):
        assert {one.oldest_version for group in groups for one in group.rollouts} == {step}
    assert [row.get("stale_groups_dropped") for row in rows_of(other)] == [0, 0, 4, 0]


@pytest.mark.parametrize("way", ["ahead", "rounds"])
def test_stored_groups_of_another_size_are_sampled_again(
    way: str, tmp_path: Path, topology: Topology
) -> None:
    options = (*WAYS[way], f"train.num_rollout={2 * HALF}", f"run.save_interval={HALF}")
    before = trained(small_config(tmp_path, *options), topology, stops=True)
    more = small_config(tmp_path, *options, "rollout.n_samples_per_prompt=6")
    after = trained(more, topology)
    assert {len(group.rollouts) for groups in before for group in groups} == {4}
    assert {len(group.rollouts) for groups in after for group in groups} == {6}
    drawn = [group.prompt.index for groups in (*before, *after) for group in groups]
    assert len(drawn) == len(set(drawn))
    assert way != "ahead" or drawn == list(range(len(drawn))), "no prompt is left out"
