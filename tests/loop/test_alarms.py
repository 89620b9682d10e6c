"""Each alarm on numbers that go wrong: when it is raised, since when, with whom, how often."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy
import pytest

from megatron_stare.config import Config, RunAlarm, UserError, override
from megatron_stare.loop.alarms import REMEDIES, Alarms, repeats
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.losses import objective_of
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.reporting.logbook import Alarm, read_alarms
from tests.loop.test_learn import spoil_scores
from tests.small_run import rows_of, small_config

CALM = {
    "entropy": 0.3,
    "grad_norm": 1.0,
    "logprob_diff_mean": 0.01,
    "response_length": 100.0,
    "truncated_fraction": 0.1,
    "no_answer_fraction": 0.0,
    "repeated_fraction": 0.0,
    "reward": 0.5,
    "accuracy": 0.5,
    "nonfinite": 0.0,
}
PATIENCE, WINDOW = 3, 20


def alarms_of(
    directory: Path, topology: Topology, *options: str, target: float | None = 0.3
) -> Alarms:
    directory.mkdir(exist_ok=True)
    common = (f"run.dir={directory}", f"alarms.patience={PATIENCE}", f"alarms.window={WINDOW}")
    return Alarms(override(Config(), [*common, *options]), topology, target)


def run(alarms: Alarms, steps: range, **changed: Any) -> None:
    for step in steps:
        alarms.watch(step, CALM | {k: v(step) if callable(v) else v for k, v in changed.items()})


@pytest.mark.parametrize(
    ("name", "changed", "raised", "says"),
    [
        ("entropy", {"entropy": 0.1}, 43, "0.1 nats is below 0.5 times the target 0.3"),
        ("entropy", {"entropy": 1.0}, 43, "above 3 times"),
        ("gradient", {"grad_norm": 11.0}, 41, "above 10 times its median 1"),
        ("mismatch", {"logprob_diff_mean": 0.2}, 41, "alarms.mismatch=0.1"),
        (
            "exactness",
            {"exactness_z": -9.0, "exactness_gap": -0.05},
            41,
            "0.05 nats less surprising",
        ),
        (
            "exactness",
            {
                "exactness_z": 1.0,
                "exactness_gap": 0.01,
                "exactness_z_server_3": 7.0,
                "exactness_gap_server_3": 0.04,
            },
            41,
            "of server 3 are 0.04 nats more surprising",
        ),
        ("length", {"response_length": 201.0}, 43, "above 2 times"),
        ("length", {"response_length": 49.0}, 43, "below 1/2"),
        ("format", {"truncated_fraction": 0.4}, 43, "40% of the rollouts"),
        ("format", {"no_answer_fraction": 0.5}, 43, "50% of the rollouts give no answer"),
        ("repeated", {"repeated_fraction": 0.2}, 41, "20% of the rollouts"),
        ("nonfinite", {"nonfinite": 1.0}, 41, "not finite"),
        (
            "reward",
            {"reward": lambda step: 0.5 + step / 100, "accuracy": lambda step: 0.9 - step / 100},
            54,
            "accuracy from",
        ),
    ],
)
def test_an_alarm_is_raised_once_with_its_first_step(
    tmp_path, topology, capsys, name, changed, raised, says
):
    alarms = alarms_of(tmp_path, topology)
    run(alarms, range(1, 41))
    assert read_alarms(tmp_path) == [], "a calm run has none"
    run(alarms, range(41, 41 + WINDOW), **changed)
    found = read_alarms(tmp_path)
    assert [alarm.alarm for alarm in found] == [name]
    assert name == "entropy" or found[0].remedy == REMEDIES[name]
    assert found[0].step == raised or name == "reward"
    assert found[0].first_step == (41 if name != "reward" else found[0].step)
    assert says in found[0].message
    err = capsys.readouterr().err
    assert err.count("alarm at step") == 1 and f"{name}: {found[0].message}" in err


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "stare"])
def test_the_remedy_of_a_collapse_fits_the_objective(tmp_path, topology, name):
    """The run accepts the settings of the remedy, and does not have them already."""
    given = (f"loss.name={name}",)
    alarms = alarms_of(tmp_path, topology, *given, target=None)
    run(alarms, range(1, 5))
    run(alarms, range(5, 60), entropy=0.1)
    (alarm,) = read_alarms(tmp_path)
    proposed = re.findall(r"[\w.]+=[\w.]+", alarm.remedy)
    config = override(alarms.config, proposed)
    assert objective_of(config.loss).reads("w_max") and config.loss != alarms.config.loss
    adaptive = alarms_of(tmp_path / "next", topology, *given, *proposed)
    run(adaptive, range(1, 10), entropy=0.1)
    assert "raise loss.w_max" in read_alarms(tmp_path / "next")[0].remedy


@pytest.mark.parametrize(
    ("options", "z", "gap"),
    [
        ((), 50.0, 0.02),  # many tokens, and rounding
        ((), 3.0, 0.3),  # few tokens
        (("alarms.exactness=0",), -50.0, -0.2),
    ],
)
def test_exactness_needs_deviations_and_nats(tmp_path, topology, options, z, gap):
    alarms = alarms_of(tmp_path, topology, *options)
    run(alarms, range(1, 5), exactness_z=z, exactness_gap=gap)
    assert read_alarms(tmp_path) == []


def test_one_cause_is_one_alarm(tmp_path, topology):
    alarms = alarms_of(tmp_path, topology)
    run(alarms, range(1, 10 * WINDOW), entropy=0.1)
    assert len(read_alarms(tmp_path)) == 1
    run(alarms, range(10 * WINDOW, 11 * WINDOW))
    run(alarms, range(11 * WINDOW, 12 * WINDOW), entropy=0.1)
    assert len(read_alarms(tmp_path)) == 2, "it had ceased"
    stopped = alarms_of(tmp_path / "stopped", topology, "alarms.stop=[entropy]")
    run(stopped, range(1, 2 * WINDOW), entropy=0.1)
    assert len(read_alarms(tmp_path / "stopped")) == 2, "a continued run stops again"


OPEN = {"gate": 1.0, "weight_w": 1.2, "rising_share_positive": 0.25}


def test_a_selection_that_lowers_entropy_is_reported(tmp_path, topology):
    """By the median of the last steps: a single step of the right sign does not hide it."""
    alarms = alarms_of(tmp_path, topology)
    run(alarms, range(1, 20), **OPEN, gamma=lambda step: 0.1 if step % 3 else -0.1)
    run(alarms, range(20, 25), **OPEN | {"gate": 0.0}, gamma=-0.1)
    assert read_alarms(tmp_path) == [], "a shut gate weights nothing"
    run(alarms, range(25, 35), **OPEN, gamma=lambda step: 0.1 if step % 3 == 0 else -0.1)
    (alarm,) = read_alarms(tmp_path)
    assert (alarm.alarm, alarm.remedy) == ("selection", REMEDIES["selection"])
    assert "of 3 steps is -0.1; 25% of L+ raise entropy" in alarm.message


def test_a_weight_at_its_bound_is_reported(tmp_path, topology):
    adaptive = ("loss.adaptive=true", "loss.w_max=1.5")
    alarms = alarms_of(tmp_path, topology, *adaptive)
    run(alarms, range(1, 10), **OPEN)
    assert read_alarms(tmp_path) == []
    run(alarms, range(10, 20), **OPEN | {"weight_w": 1.5})
    (alarm,) = read_alarms(tmp_path)
    assert alarm.alarm == "weight" and "loss.w_max=1.5" in alarm.message
    shut = {"gate": 0.0, "weight_w": 1.45}
    near = alarms_of(tmp_path / "near", topology, *adaptive)
    for step in range(1, 20):
        run(near, range(step, step + 1), **OPEN | {"weight_w": 1.5} | (shut if step % 2 else {}))
    assert read_alarms(tmp_path / "near") == [], "the gate shuts in between"
    fixed = alarms_of(tmp_path / "fixed", topology, "loss.reweight_w=1.5")
    run(fixed, range(1, 20), **OPEN | {"weight_w": 1.5})
    assert read_alarms(tmp_path / "fixed") == []


@pytest.mark.parametrize("key", ["gradient", "mismatch", "length", "format", "repeated"])
def test_a_limit_of_0_is_off(tmp_path, topology, key):
    alarms = alarms_of(tmp_path, topology, f"alarms.{key}=0")
    run(alarms, range(1, 41))
    bad = {"grad_norm": 1e9, "logprob_diff_mean": 9.0, "response_length": 9e9}
    bad |= {"truncated_fraction": 1.0, "repeated_fraction": 1.0}
    run(alarms, range(41, 50), **bad)
    names = {alarm.alarm for alarm in read_alarms(tmp_path)}
    assert names == {"gradient", "mismatch", "length", "format", "repeated"} - {key}


def test_a_single_step_is_not_a_drift(tmp_path, topology):
    alarms = alarms_of(tmp_path, topology)
    run(alarms, range(1, 31), entropy=lambda step: 0.3 if step % 2 else 0.0)
    assert read_alarms(tmp_path) == []
    run(alarms, range(31, 31 + 2 * WINDOW), entropy=0.0)
    steps = [(alarm.step, alarm.first_step) for alarm in read_alarms(tmp_path)]
    assert steps == [(32, 30)]


def test_without_a_target_the_first_steps_entropy_is_the_measure(tmp_path, topology):
    alarms = alarms_of(tmp_path, topology, target=None)
    run(alarms, range(1, 10), entropy=lambda step: 0.6 - 0.05 * step)
    (alarm,) = read_alarms(tmp_path)
    assert alarm.alarm == "entropy" and "the first step's 0.55" in alarm.message


def test_the_memory_survives_a_checkpoint_and_later_lines_are_cut(tmp_path, topology):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory in (whole, parts):
        directory.mkdir()
    spikes = {"grad_norm": lambda step: 50.0 if step in (15, 16, 40) else 1.0, "entropy": 0.1}
    run(alarms_of(whole, topology), range(1, 45), **spikes)
    first = alarms_of(parts, topology)
    run(first, range(1, 15), **spikes)
    kept = first.state()
    run(first, range(15, 20), **spikes)
    second = alarms_of(parts, topology)
    second.load_state(kept)
    second.forget_after(14)
    run(second, range(15, 45), **spikes)
    assert read_alarms(parts) == read_alarms(whole)
    assert [alarm.step for alarm in read_alarms(whole) if alarm.alarm == "gradient"] == [15, 40]


def test_the_alarm_names_the_rollouts(tmp_path, topology):
    def rollout(length: int, **facts: Any) -> Rollout:
        ids = numpy.tile(numpy.arange(3), length)[:length] if facts.pop("loops", False) else None
        ids = numpy.arange(length) if ids is None else ids
        zeros = numpy.zeros(length)
        facts = {"status": "completed", "verdict": "wrong", "reward": 0.0} | facts
        return Rollout(ids, zeros, zeros == 0, weight_version=0, text="Wait, wait. So", **facts)

    groups = [
        Group(Prompt(4, numpy.zeros(1, int), ""), (rollout(40), rollout(60, loops=True))),
        Group(
            Prompt(9, numpy.zeros(1, int), ""),
            (rollout(90, status="truncated"), rollout(5, reward=2.0)),
        ),
    ]
    alarms = alarms_of(tmp_path, topology)
    assert alarms.look(groups) == {"reflections": 2.0, "repeated_fraction": 0.25}
    alarms.suspect("nonfinite", (9, 1))
    alarms.watch(1, CALM | {"repeated_fraction": 0.25, "nonfinite": 1.0})
    assert [(a.alarm, a.rollouts) for a in read_alarms(tmp_path)] == [
        ("repeated", [[4, 1]]),
        ("nonfinite", [[9, 1]]),
    ]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([*range(100), *([7] * 32)], True),
        ([*range(100), *([7] * 31)], False),
        ([*range(30), *([1, 2, 3] * 11)], True),
        ([*range(30), *([1, 2, 3] * 11), 9], False),
        ([*range(50)] * 4, True),
        ([*range(65)] * 8, False),
        ([1, 2], False),
        ([], False),
    ],
)
def test_repeated_endings_are_found(ids, expected):
    assert repeats(numpy.array(ids, numpy.int32)) == expected


def test_a_torn_last_line_is_left_out_and_another_is_named(tmp_path):
    path = tmp_path / "alarms.jsonl"
    line = '{"step": 1, "alarm": "a", "message": "m", "first_step": 1, "remedy": "r"}\n'
    path.write_text(line + line[:20])
    assert read_alarms(tmp_path) == [Alarm(1, "a", "m", 1, "r")]
    path.write_text(line[:20] + "\n" + line)
    with pytest.raises(UserError, match=r"alarms\.jsonl:1"):
        read_alarms(tmp_path)


def test_an_alarm_that_stops_leaves_a_checkpoint_and_names_the_rollout(tmp_path, topology):
    config = small_config(tmp_path, "train.num_rollout=4", "alarms.stop=[nonfinite]")
    trainer = Trainer(config, topology)
    spoil_scores(trainer, {1})
    with pytest.raises(RunAlarm, match=r"step 2: nonfinite: .*lower optimizer\.lr"):
        trainer.run(Interrupt())
    assert [row["step"] for row in rows_of(config)] == [1, 2]
    assert [path.name for path in (Path(config.run.dir) / "checkpoints").glob("step_*")]
    (alarm,) = read_alarms(Path(config.run.dir))
    assert (alarm.step, alarm.alarm, len(alarm.rollouts)) == (2, "nonfinite", 1)
    assert alarm.rollouts[0][1] == 1, "the second sequence is the first prompt's second rollout"
    assert Trainer(config, topology).run(Interrupt()), "it resumes from there"
    assert [row["step"] for row in rows_of(config)] == [1, 2, 3, 4]


def test_an_unknown_alarm_is_refused():
    with pytest.raises(UserError, match="'noise', which is none of entropy, selection, weight"):
        override(Config(), ["alarms.stop=[noise]"])
