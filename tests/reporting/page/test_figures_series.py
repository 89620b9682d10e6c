"""Lines, areas, and what follows from several metrics, against numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_stare.reporting.page import figures
from megatron_stare.reporting.page.runs import Run


def run_of(rows: list[dict], arm: str = "STARE", seed: str = "0") -> Run:
    return Run(arm, seed, Path("run"), rows, {})


def test_prediction_agrees_with_numpy():
    rng = np.random.default_rng(0)
    drift = rng.normal(size=60)
    entropy = np.concatenate([[1.0], 1.0 + np.cumsum(0.3 * drift + 0.1 * rng.normal(size=60))])
    rows = [
        {"step": at + 1, "entropy": float(entropy[at]), "entropy_drift": float(drift[at])}
        for at in range(60)
    ]
    del rows[30]["entropy"]  # a step that was not finite: neither change that touches it counts
    kept = [at for at in range(59) if at not in (29, 30)]
    expected, realised = drift[kept], np.diff(entropy[:60])[kept]
    found = figures.prediction(run_of(rows))
    assert found["steps"] == 57 and found["key"] == "entropy_drift"
    assert found["correlation"] == pytest.approx(np.corrcoef(expected, realised)[0, 1])
    assert found["slope"] == pytest.approx(expected @ realised / (expected @ expected))
    assert found["same_sign"] == pytest.approx(np.mean(expected * realised > 0))
    assert figures.prediction(run_of(rows[:3])) is None
    for row, drift_of_row in zip(rows, drift, strict=True):
        row |= {"entropy_change/predicted": float(drift_of_row)}
        row |= {"entropy_change/realised": 2 * float(drift_of_row)}
    measured = figures.prediction(run_of(rows))
    assert (measured["key"], measured["same_batch"]) == ("entropy_change/predicted", True)
    assert measured["steps"] == 60 and not found["same_batch"]
    assert measured["slope"] == pytest.approx(2.0)
    assert measured["correlation"] == pytest.approx(1.0)


def test_a_mean_over_seeds_is_of_the_steps_that_all_have():
    runs = [
        run_of([{"step": step, "reward": value * step} for step in range(1, last)], seed=str(value))
        for value, last in ((1.0, 6), (2.0, 5), (3.0, 9))
    ]
    found = figures.lines_of(runs, "reward", 100)
    assert [line.x[-1] for line in found["runs"]] == [5, 4, 8]
    mean = found["means"]["STARE"]
    assert mean.x == [1, 2, 3, 4] and mean.y == pytest.approx([2.0, 4.0, 6.0, 8.0])
    half = 4.303 * 1.0 / np.sqrt(3)  # t(2, 0.975) s / sqrt(3), s = 1 at step 1
    assert mean.high[0] - mean.y[0] == pytest.approx(half, rel=1e-3)
    assert figures.lines_of(runs, "absent", 100) is None


def test_only_finite_numbers_are_drawn():
    rows = [{"step": 1, "a": float("nan")}, {"step": 2, "a": 1}, {"step": 3, "a": "text"}]
    assert run_of(rows).series("a") == [(2, 1.0)]


def test_an_evaluation_of_the_start_is_drawn_at_step_0():
    rows = [{"step": 1, "eval_start/held/avg_at_k": 0.25}, {"step": 2, "eval/held/avg_at_k": 0.5}]
    assert run_of(rows).series("eval/held/avg_at_k") == [(0, 0.25), (2, 0.5)]
    assert run_of(rows[1:]).series("eval/held/avg_at_k") == [(2, 0.5)]
    assert run_of(rows).series("eval_start/held/avg_at_k") == [(1, 0.25)]


def test_phases_add_up_to_the_step():
    rows = [
        {"step": 1, "seconds_rollout": 3.0, "seconds_update": 1.0, "seconds_total": 5.0},
        {"step": 2, "seconds_rollout": 3.0, "seconds_evaluate": 4.0, "seconds_total": 7.5},
    ]
    timed, phases = figures.phases_of(run_of(rows))
    assert phases == ["seconds_rollout", "seconds_update", "seconds_evaluate", "seconds_other"]
    layers = figures.stacked(timed, phases, 10)["layers"]
    assert np.sum([*layers.values()], axis=0) == pytest.approx([5.0, 7.5])
    assert layers["seconds_evaluate"] == [0.0, 4.0]
    assert figures.stacked(run_of([{"step": 1}]), phases, 10) is None


def test_figures_without_information_are_left_out():
    idle = [{"step": 1, "entropy": 0.3, "gate": 0.0, "weight_w": 1.0, "weight_m": 1.0}]
    names = [each["name"] for each in figures.figures_of([run_of(idle)])["figures"]]
    assert names == ["entropy"]
    steered = [idle[0] | {"gate": 1.0, "weight_w": 1.2}]
    names = [each["name"] for each in figures.figures_of([run_of(steered)])["figures"]]
    assert names == ["entropy", "gate", "weights"]


def test_evaluations_have_their_k_and_their_names():
    rows = [{"step": 2, "eval/heldout_hard/pass_at_k": 0.5, "eval/heldout_hard/avg_at_k": 0.2}]
    rows[0]["eval/heldout_hard/k"] = 8
    found = figures.figures_of([run_of(rows)])["figures"]
    assert [each["title"] for each in found] == ["Held-out HARD: pass@8", "Held-out HARD: avg@8"]
    assert figures.evaluation_label("aime24") == "aime24"
