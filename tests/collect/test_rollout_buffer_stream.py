"""One step off and fully asynchronous:
what is sampled when, by which weights, and that none is lost or doubled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.collect.journal import Frame, read_frames
from megatron_stare.config import Config, UserError, override
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group
from megatron_stare.reporting.logbook import read_metrics
from tests.collect.lockstep import in_step
from tests.distributed import run_distributed
from tests.forked import train
from tests.small_run import rows_of, small_config

ONE_OFF = "rollout.asynchrony=one_step_off"
FULLY = "rollout.asynchrony=fully_async"
GATHER, EVERY_GROUP = "rollout.long_tail=gather", "rollout.dynamic_sampling=false"
CONTINUE = "rollout.long_tail=continue"
OVER = "rollout.over_sampling_batch_size=7"
SMALL = (OVER, "rollout.rollout_batch_size=4")


def trained_groups(run: Trainer) -> list[Sequence[Group]]:
    """Runs it to its end; the groups of every step."""
    seen: list[Sequence[Group]] = []
    step: Callable[..., Any] = run.learner.step

    def recorded(groups: Sequence[Group], *others: Any) -> dict[str, float]:
        seen.append(groups)
        return step(groups, *others)

    run.learner.step = recorded  # type: ignore[method-assign]
    assert run.run(Interrupt())
    return seen


def assert_none_is_doubled(steps: Sequence[Sequence[Group]], config: Config) -> None:
    """Every prompt's draw is trained on once at most, with all its rollouts,
    all different in what they were asked.
    """
    drawn = [group.prompt.index for groups in steps for group in groups]
    assert len(drawn) == len(set(drawn)) == len(steps) * config.rollout.rollout_batch_size
    for groups in steps:
        assert all(len(group.rollouts) == config.rollout.n_samples_per_prompt for group in groups)


def test_one_step_off_samples_each_batch_with_the_weights_before(
    tmp_path: Path, topology: Topology
):
    run = Trainer(small_config(tmp_path, ONE_OFF, "train.num_rollout=5"), topology)
    steps = trained_groups(run)
    assert_none_is_doubled(steps, run.config)
    for step, groups in enumerate(steps):
        versions = {
            version
            for group in groups
            for rollout in group.rollouts
            for version in rollout.versions
        }
        assert versions == {max(0, step - 1)}
    rows = rows_of(run.config)
    assert [row["stale_token_fraction"] for row in rows] == [0, 1, 1, 1, 1]
    assert [row["staleness_mean"] for row in rows] == [0, 1, 1, 1, 1]
    assert rows[0]["logprob_diff_max"] < 1e-4 and "logprob_diff_max" not in rows[1]


def test_one_step_off_repeats_itself_after_a_stop(tmp_path: Path, topology: Topology):
    rows_of_a_stopped_run(tmp_path, topology, 3, ONE_OFF)


def rows_of_a_stopped_run(
    directory: Path, topology: Topology, half: int, *options: str
) -> list[dict[str, Any]]:
    """The metrics of a run that stops and resumes equal those of an uninterrupted one."""
    options = (*options, f"train.num_rollout={2 * half}")
    whole = small_config(directory, *options, f"run.dir={directory}/whole")
    assert Trainer(whole, topology).run(Interrupt())
    saved = (f"run.save_interval={half}", f"run.dir={directory}/parts")
    parts = small_config(directory, *options, *saved)
    stopped = Trainer(parts, topology)
    stopped.saved.checkpoints.save = stop_after(stopped.saved.checkpoints.save)  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        stopped.run(Interrupt())
    assert len(rows_of(parts)) == half
    assert Trainer(parts, topology).run(Interrupt())
    assert rows_of(parts) == rows_of(whole)
    return rows_of(parts)


@pytest.mark.parametrize(
    "asynchrony", ["on_policy", pytest.param("one_step_off", marks=pytest.mark.slow)]
)
def test_with_servers_the_next_round_is_sampled_during_an_evaluation(
    asynchrony: str, tmp_path: Path, topology: Topology
):
    options = (
        f"rollout.asynchrony={asynchrony}",
        "run.save_interval=1",
        "evaluation.eval_interval=1",
        "evaluation.n_samples_per_eval_prompt=1",
    )
    options += (
        "rollout.dynamic_sampling=false",
    )  # every group is trained on, so that one that is lost is missed
    problems = f"evaluation.eval_data.same={tmp_path}/problems.jsonl"
    drawn: list[list[int]] = []
    for steps in (3, 6):
        run = Trainer(
            small_config(tmp_path, *options, problems, f"train.num_rollout={steps}"), topology
        )
        # as it would do with servers
        run.collector.config = override(run.config, ["rollout.engine=sglang"])
        in_round: list[bool] = []
        evaluate = run.evaluator.evaluate

        def recorded(
            step: int, run: Trainer = run, in_round: list[bool] = in_round, evaluate: Any = evaluate
        ) -> dict[str, float]:
            in_round.append(run.collector._round is not None)
            return evaluate(step)

        run.evaluator.evaluate = recorded  # type: ignore[method-assign, assignment]
        for groups in trained_groups(run):
            versions = {
                version
                for group in groups
                for rollout in group.rollouts
                for version in rollout.versions
            }
            late = asynchrony == "one_step_off" and len(drawn) not in (0, 3)
            assert versions == {len(drawn) - late}
            drawn.append([group.prompt.index for group in groups])
        # the run's last rounds are under way or done by then
        last = 2 if asynchrony == "one_step_off" else 1
        assert in_round == [True] * (len(in_round) - last) + [False] * last
    together = [index for groups in drawn for index in groups]
    assert together == list(range(24)), (
        "a round that was under way at the end is drawn again, none twice"
    )


def stop_after(save: Callable[..., None]) -> Callable[..., None]:
    """Saves, then ends the run as a kill would."""

    def saved(*arguments: Any) -> None:
        save(*arguments)
        raise InterruptedError

    return saved


def test_fully_asynchronous_rollouts_know_the_weights_of_every_token(
    tmp_path: Path, topology: Topology
):
    # Two rollouts at a time: what is in flight when the weights come is never a whole batch.
    options = ("train.num_rollout=12", "rollout.max_staleness=2", "rollout.engine_batch_size=2")
    run = in_step(Trainer(small_config(tmp_path, FULLY, *options), topology))
    steps = trained_groups(run)
    assert_none_is_doubled(steps, run.config)
    for step, groups in enumerate(steps):
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            assert list(rollout.versions) == sorted(rollout.versions)
            assert step - 2 <= rollout.oldest_version <= rollout.weight_version <= step
    rollouts = [rollout for groups in steps for group in groups for rollout in group.rollouts]
    assert any(len(set(rollout.versions)) > 1 for rollout in rollouts), (
        "weights reached rollouts in flight"
    )
    rows = rows_of(run.config)
    assert all(row["staleness_max"] <= 2 for row in rows) and any(
        row["staleness_mean"] > 0 for row in rows
    )
    assert all(row.get("logprob_diff_max", 0) < 1e-4 for row in rows), (
        "current tokens are the current policy's"
    )
    assert any("logprob_diff_max" in row for row in rows)


@pytest.mark.parametrize("tail", ["continue", "restart"])
def test_the_long_tail_is_stopped_and_sampled_in_the_next_step(
    tail: str, tmp_path: Path, topology: Topology
):
    options = (
        "train.num_rollout=6",
        f"rollout.long_tail={tail}",
        "rollout.engine_batch_size=8",
    )
    run = in_step(Trainer(small_config(tmp_path, OVER, *options), topology))
    steps = trained_groups(run)
    assert_none_is_doubled(steps, run.config)
    rows = rows_of(run.config)
    assert all(row["open_prompts"] > 0 for row in rows), "some were ended"
    assert all(row["staleness_max"] <= 1 for row in rows)
    rollouts = [rollout for groups in steps for group in groups for rollout in group.rollouts]
    assert any(len(set(rollout.versions)) > 1 for rollout in rollouts) == (tail == "continue"), (
        "parts were continued, or not"
    )
    assert sum(row["staleness_mean"] for row in rows) > 0, (
        "what was finished of an ended group was kept"
    )
    assert all(row.get("logprob_diff_max", 0) < 1e-4 for row in rows)


def test_a_gathered_tail_is_sampled_whole_by_one_version_in_a_round_of_its_own(
    tmp_path: Path, topology: Topology
):
    """Without dynamic sampling every drawn prompt is trained once, or waits in the tail."""
    options = ("train.num_rollout=9", GATHER, OVER, EVERY_GROUP, "rollout.engine_batch_size=8")
    run = in_step(Trainer(small_config(tmp_path, *options), topology))
    dispatcher, positions = run.collector.dispatcher, list[int]()
    assert dispatcher is not None
    set_step = dispatcher.set_step

    def recorded(*arguments: int) -> None:
        positions.append(dispatcher.stream.position)
        set_step(*arguments)

    dispatcher.set_step = recorded  # type: ignore[method-assign]
    steps = trained_groups(run)
    assert_none_is_doubled(steps, run.config)
    rows = rows_of(run.config)
    long = [step for step, row in enumerate(rows) if row["long_round"]]
    assert long and long[0] > 0 and len(long) < len(rows)
    for step, groups in enumerate(steps):
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        assert {version for each in rollouts for version in each.versions} == {step}
        earlier = [group.prompt.index < positions[step] for group in groups]
        assert earlier == [step in long] * len(groups), "a long round has prompts of the tail"
    position, tail, _ = dispatcher.state()
    trained = [group.prompt.index for groups in steps for group in groups]
    assert sorted([*trained, *tail]) == list(range(position))
    assert rows[-1]["open_prompts"] == len(tail)
    assert all(row["staleness_max"] == row["stale_groups_dropped"] == 0 for row in rows)
    assert all(row["logprob_diff_max"] < 1e-4 for row in rows)


def test_a_stopped_run_keeps_its_tail(tmp_path: Path, topology: Topology):
    """The stopped rollouts depend on timing: no prompt is lost or doubled."""
    options = (GATHER, OVER, EVERY_GROUP)
    trained: list[int] = []
    for steps in (4, 8):
        run = Trainer(small_config(tmp_path, *options, f"train.num_rollout={steps}"), topology)
        for groups in trained_groups(run):
            trained += [group.prompt.index for group in groups]
        assert run.collector.dispatcher is not None
        position, tail, _ = run.collector.dispatcher.state()
        assert sorted([*trained, *tail]) == list(range(position))
    rows = rows_of(run.config)
    assert len(rows) == 8 and all(row["staleness_max"] == 0 for row in rows)
    assert any(row["long_round"] for row in rows)


def stream_on_two_ranks(rank: int, world_size: int, directory: str) -> list[dict[str, float]]:
    """The metrics of each step of this rank: three steps, a stop, and three more from the
    checkpoint.
    """
    seen: list[dict[str, float]] = []
    for steps in (3, 6):
        options = (FULLY, "rollout.max_staleness=2", f"train.num_rollout={steps}")
        config = small_config(Path(directory), *options)
        run = Trainer(config, topologies.start(config.policy))
        step = run.train_step

        def recorded(step: Callable[[], dict[str, float]] = step) -> dict[str, float]:
            seen.append(step())
            return seen[-1]

        run.train_step = recorded  # type: ignore[method-assign]
        assert run.run(Interrupt())
    return seen


@pytest.mark.slow
def test_every_rank_trains_on_the_rollouts_of_rank_0(tmp_path: Path):
    small_config(tmp_path)
    first, second = run_distributed(stream_on_two_ranks, 2, str(tmp_path))
    assert len(first) == len(second) == 6
    for one, other in zip(first, second, strict=True):
        for key in ("loss", "entropy", "reward", "staleness_mean", "grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=1e-6), key
    assert all(row.get("logprob_diff_max", 0) < 1e-4 for row in first)


def keys_of(journal: Path) -> list[tuple[int, int]]:
    """(prompt, number) of every rollout that was ever finished."""
    files = [file.read_bytes() for file in sorted(journal.glob("*.frames"))]
    found = [each for content in files for each in read_frames(content)]
    return [tuple(each.extra["key"]) for each in found if isinstance(each, Frame)]


@pytest.mark.slow
def test_a_killed_asynchronous_run_loses_no_finished_rollout(tmp_path: Path):
    options = ("train.num_rollout=40", "run.save_interval=100", "rollout.max_staleness=10")
    config = small_config(tmp_path, FULLY, *options)
    metrics, journal = Path(config.run.dir) / "metrics.jsonl", Path(config.run.dir) / "rollouts"
    child = train(config)
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and len(read_metrics(metrics)) >= 4):
        assert child.code is None and time.monotonic() < deadline, child.output
        time.sleep(0.01)
    child.kill()
    finished = keys_of(journal)
    assert len(finished) > 4 * 16
    again = train(override(config, ["train.num_rollout=8"]))
    assert again.wait(120) == 0, again.output
    rows = read_metrics(metrics)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[0]["journal_rollouts"] >= 16, "the first batch was there already"
    keys = keys_of(journal)
    assert len(keys) == len(set(keys)) >= len(finished), (
        "nothing that was finished was sampled again"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((FULLY, "rollout.max_staleness=0"), "rollout.max_staleness=0 drops"),
        ((FULLY, GATHER, OVER), "no step waits for the long tail"),
        ((GATHER,), "needs rollout.over_sampling_batch_size=0 above rollout_batch_size=64"),
        ((GATHER, *SMALL, "rollout.max_staleness=1"), "allows older ones; set it to 0"),
        (
            (CONTINUE, *SMALL, "rollout.max_staleness=0"),
            "long_tail=restart or gather",
        ),
        (("rollout.asynchrony=sometimes",), "is not one of on_policy, one_step_off, fully_async"),
    ],
)
def test_contradicting_settings_are_refused(overrides: tuple[str, ...], message: str):
    with pytest.raises(UserError, match=message):
        override(Config(), list(overrides))
