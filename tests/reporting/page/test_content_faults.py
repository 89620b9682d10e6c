"""Survived faults, counted over restarts; alarms as they were raised."""

from __future__ import annotations

import pytest

from benchmarks._synthetic_run import write_alarm
from megatron_stare.config import UserError
from megatron_stare.reporting.logbook import Alarm, append_alarm
from megatron_stare.reporting.page.content import faults_of, increases
from megatron_stare.reporting.page.runs import Run


def test_a_falling_counter_means_a_restart():
    points = [(1, 0.0), (2, 2.0), (3, 2.0), (4, 1.0), (5, 4.0)]
    assert increases(points) == [(2, 2.0), (4, 1.0), (5, 3.0)]


def test_faults_are_summed_and_listed_by_step(tmp_path):
    rows = [
        {"step": 1, "engine_restarts": 0.0, "nonfinite": 0.0, "verifier_kills": 2.0},
        {"step": 2, "engine_restarts": 1.0, "nonfinite": 1.0, "verifier_kills": 1.0},
        {"step": 3, "engine_restarts": 1.0, "nonfinite": 0.0, "verifier_kills": 0.0},
    ]
    found = faults_of(Run("STARE", "0", tmp_path, rows, {}))
    assert [
        (each["key"], each["count"], each["first"], each["last"]) for each in found["counts"]
    ] == [
        ("engine_restarts", 1.0, 2, 2),
        ("nonfinite", 1.0, 2, 2),
        ("verifier_kills", 3.0, 1, 2),
    ]


def test_alarms_are_read_and_only_a_torn_last_line_is_ignored(tmp_path):
    run = Run("STARE", "0", tmp_path, [], {})
    assert faults_of(run)["alarms"] == []
    write_alarm(tmp_path, 40)
    path = tmp_path / "alarms.jsonl"
    with path.open("a") as file:
        file.write('{"step": 41, "ala')
    assert [each["steps"] for each in faults_of(run)["alarms"]] == [[40]]
    path.write_text('{"step": "x"}\n{"step": 1}\n')
    with pytest.raises(UserError, match=r"alarms\.jsonl:1"):
        faults_of(run)


def test_alarms_of_one_cause_share_a_row(tmp_path):
    raised = [
        Alarm(40, "entropy", "0.2 nats", 20, "raise loss.w_max", [[1, 0]]),
        Alarm(50, "gradient", "a spike", 50, "lower optimizer.lr", []),
        Alarm(90, "entropy", "0.1 nats", 20, "raise loss.w_max", [[2, 3]]),
        Alarm(95, "entropy", "0.9 nats", 95, "lower optimizer.lr", []),
    ]
    for alarm in raised:
        append_alarm(tmp_path, alarm)
    first, second, third = faults_of(Run("STARE", "0", tmp_path, [], {}))["alarms"]
    assert first == {
        "alarm": "entropy",
        "remedy": "raise loss.w_max",
        "steps": [40, 90],
        "first_step": 20,
        "message": "0.1 nats",
        "rollouts": [[1, 0], [2, 3]],
    }
    assert (second["alarm"], third["steps"]) == ("gradient", [95]), "another remedy: another cause"


def test_groups_that_a_setting_drops_are_not_faults(tmp_path):
    rows = [{"step": 1, "stale_groups_dropped": 7.0}]
    assert faults_of(Run("STARE", "0", tmp_path, rows, {}))["counts"] == []
