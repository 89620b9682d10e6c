"""The figures of a page, in order, and what they show: a table to read and to add to.

A line shows a number of metrics.jsonl, or a quantity derived from several of them, whose key begins
with `derived/`: the share of open gates, the realised and the predicted change of entropy. A run of
10,000 steps is drawn in a few hundred buckets of equal length in steps. A bucket holds the mean of
its points and the lowest and the highest of them, so that a single outlier stays visible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_stare.reporting.page.runs import Point, Run, arms_of, mean_over_seeds
from megatron_stare.reporting.problem_scores import evaluation_sets
from megatron_stare.reporting.summary import evaluation_label

GATE_WINDOW = 20
GATE, REALISED, PREDICTED = "derived/gate", "derived/realised", "derived/predicted"
# Predictions of the change of entropy, best first: from the whole loss, from the bare gradient.
PREDICTIONS = ("entropy_change/predicted", "entropy_drift")
SAME_BATCH = "entropy_change/realised"  # logged if diagnostics.realised is set
MOST_SCATTERED = 1500


class Line(NamedTuple):
    """y over x; `low` and `high` are the extremes of a bucket or the ends of an interval, or None
    where every point is drawn as it is.
    """

    x: list[float]
    y: list[float]
    low: list[float] | None
    high: list[float] | None


def bucketed(points: Sequence[Point], most: int) -> Line:
    """At most `most` points: all of them, or the mean and the extremes of buckets.

    Buckets are equal ranges of x from the first to the last point; an empty one is left out. The x
    of a bucket is the mean of its points' x.
    """
    if most < 1:
        raise ValueError(f"a line needs room for at least one point, not {most}")
    if len(points) <= most:
        return Line([x for x, _ in points], [y for _, y in points], None, None)
    first, last = points[0][0], points[-1][0]
    buckets: list[list[Point]] = [[] for _ in range(most)]
    for point in points:
        place = int((point[0] - first) / (last - first) * most) if last > first else 0
        buckets[min(place, most - 1)].append(point)
    filled = [bucket for bucket in buckets if bucket]
    return Line(
        [math.fsum(x for x, _ in bucket) / len(bucket) for bucket in filled],
        [math.fsum(y for _, y in bucket) / len(bucket) for bucket in filled],
        [min(y for _, y in bucket) for bucket in filled],
        [max(y for _, y in bucket) for bucket in filled],
    )


def moving_mean(series: Sequence[Point], window: int) -> list[Point]:
    """The mean over the last `window` points (fewer at the start)."""
    values = [value for _, value in series]
    windows = (values[max(0, at + 1 - window) : at + 1] for at in range(len(values)))
    return [
        (step, math.fsum(part) / len(part)) for (step, _), part in zip(series, windows, strict=True)
    ]


def points_of(run: Run, key: str) -> list[Point]:
    """(step, value) of a key of metrics.jsonl, or of a derived one."""
    if key == GATE:  # rows of an objective without a gate hold a gate of 0
        gated = any("weight_w" in row or row.get("gate") for row in run.rows)
        return moving_mean(run.series("gate"), GATE_WINDOW) if gated else []
    if key == REALISED:
        return _realised(run)
    if key == PREDICTED:
        return run.series(prediction_key(run) or "")
    return run.series(key)


def prediction_key(run: Run) -> str | None:
    """The metric by which a run predicted its entropy's change."""
    return next((key for key in PREDICTIONS if any(key in row for row in run.rows)), None)


def _realised(run: Run) -> list[Point]:
    """The change on the same batch if the run measured it. Otherwise H(t + 1) - H(t) at step t, if
    both were logged; the two steps have different prompts.
    """
    measured = run.series(SAME_BATCH)
    if measured:
        return measured
    entropy = dict(run.series("entropy"))
    return [
        (step, entropy[step + 1] - value) for step, value in entropy.items() if step + 1 in entropy
    ]


def numeric_keys(runs: Iterable[Run]) -> list[str]:
    """Every key of which a row holds a number, by name."""
    found = {
        key
        for run in runs
        for row in run.rows
        for key, value in row.items()
        if isinstance(value, int | float)
    }
    return sorted(found - {"step"})


def lines_of(runs: Sequence[Run], key: str, most: int) -> dict[str, Any] | None:
    """{"runs": a Line or None of each run, "means": {arm: Line}} of a key; None where no run has
    it. Means, with 95% intervals (Student's t), are of arms with several seeds.
    """
    found = [points_of(run, key) for run in runs]
    if not any(found):
        return None
    means = {}
    for arm in arms_of(runs):
        seeds = [points for run, points in zip(runs, found, strict=True) if run.arm == arm]
        if len(seeds) > 1 and all(seeds):
            means[arm] = _mean_line(seeds, most)
    return {
        "runs": [bucketed(points, most) if points else None for points in found],
        "means": {arm: line for arm, line in means.items() if line.x},
    }


def _mean_line(seeds: Sequence[Sequence[Point]], most: int) -> Line:
    """The mean over seeds, and the ends of its interval, each averaged over a bucket."""
    rows = mean_over_seeds(seeds)
    middle = bucketed([(step, mean) for step, mean, _ in rows], most)
    half = bucketed([(step, half_width) for step, _, half_width in rows], most).y
    low = [mean - width for mean, width in zip(middle.y, half, strict=True)]
    high = [mean + width for mean, width in zip(middle.y, half, strict=True)]
    return Line(middle.x, middle.y, low, high)


def stacked(run: Run, keys: Sequence[str], most: int) -> dict[str, Any] | None:
    """Values that add up, as means of buckets: {"x", "layers": {key: values}}; None without any.

    In a row that has one of the keys, another that is missing is zero: the phase did not run.
    """
    rows = [row for row in run.rows if any(key in row for key in keys)]
    if not rows:
        return None
    layers = {
        key: bucketed([(row["step"], float(row.get(key, 0.0))) for row in rows], most)
        for key in keys
    }
    return {
        "x": layers[keys[0]].x,
        "layers": {key: line.y for key, line in layers.items()},
    }


def phases_of(run: Run) -> tuple[Run, list[str]]:
    """The run with seconds_other (seconds_total minus all phases) in its rows, and the keys of its
    phases in the order of their first appearance.
    """
    keys = list({key: None for row in run.rows for key in row if key.startswith("seconds_")})
    phases = [key for key in keys if key != "seconds_total"]
    rows: list[Mapping[str, Any]] = []
    for row in run.rows:
        if "seconds_total" in row:
            named = math.fsum(row.get(key, 0.0) for key in phases)
            row = {**row, "seconds_other": max(0.0, row["seconds_total"] - named)}
        rows.append(row)
    other = ["seconds_other"] if "seconds_total" in keys else []
    return Run(run.arm, run.seed, run.directory, rows, run.summary), phases + other


def prediction(run: Run) -> dict[str, Any] | None:
    """Predicted against realised change of entropy, step by step: correlation r (Pearson), the
    slope of the line through the origin that fits best, the share of equal signs, and points.
    """
    realised, expected = dict(points_of(run, REALISED)), dict(points_of(run, PREDICTED))
    pairs = [(expected[step], realised[step]) for step in realised if step in expected]
    if len(pairs) < 3:
        return None
    count = len(pairs)
    mean_x, mean_y = (math.fsum(pair[axis] for pair in pairs) / count for axis in (0, 1))
    xx = math.fsum((x - mean_x) ** 2 for x, _ in pairs)
    yy = math.fsum((y - mean_y) ** 2 for _, y in pairs)
    xy = math.fsum((x - mean_x) * (y - mean_y) for x, y in pairs)
    square = math.fsum(x * x for x, _ in pairs)
    stride = -(-count // MOST_SCATTERED)
    return {
        "key": prediction_key(run),
        "same_batch": bool(run.series(SAME_BATCH)),
        "steps": count,
        "correlation": xy / math.sqrt(xx * yy) if xx > 0 and yy > 0 else None,
        "slope": math.fsum(x * y for x, y in pairs) / square if square > 0 else None,
        "same_sign": sum(x * y > 0 for x, y in pairs) / count,
        "points": pairs[::stride],
        "every": stride,
    }


# The most points of a line: of a figure with a place of its own, and of all the others.
MOST_POINTS, MOST_OTHER_POINTS = 400, 150
MOST_STACKED = 240
QUADRANTS = {
    "quadrant/positive_rising": "A > 0, g > 0: entropy up",
    "quadrant/positive_falling": "A > 0, g < 0: entropy down",
    "quadrant/negative_rising": "A < 0, g > 0: entropy down",
    "quadrant/negative_falling": "A < 0, g < 0: entropy up",
}


@dataclass(frozen=True)
class Figure:
    """One set of axes. `keys` are metrics and how their lines are called where there are several;
    `limits` fixes the vertical axis, `zero` has it begin at zero.
    """

    name: str
    section: str
    title: str
    unit: str
    keys: dict[str, str]
    note: str = ""
    zero: bool = True
    limits: tuple[float, float] | None = None
    rule: float | None = None  # a thin line across, to compare with


# fmt: off
FIGURES = (
    Figure("entropy", "entropy", "Policy entropy", "nats per token", {"entropy": ""},
           "Mean over the batch. Below the band the policy collapses, above it wanders."),
    Figure("reward", "learning", "Training reward", "mean reward", {"reward": ""},
           "Every response that was sampled, before groups without signal are dropped."),
    Figure("length", "learning", "Response length", "tokens", {"response_length": ""},
           "Mean of every response that was sampled.", zero=False),
    Figure("truncated", "learning", "Truncated responses", "share", {"truncated_fraction": ""},
           "Responses that met the length limit."),
    Figure("gate", "control", "Gate open", "share of steps", {GATE: ""},
           f"Share of the last {GATE_WINDOW} steps. STARE acts only while the gate is open.",
           limits=(0, 1)),
    Figure("weights", "control", "Weights W and M", "factor", {"weight_w": "W", "weight_m": "M"},
           "On the selected tokens while the gate is open: W on L+, M on L-.",
           zero=False, rule=1.0),
    Figure("critical", "control", "Distance to the critical weight, W* - 1", "factor",
           {"critical_weight_excess": ""},
           "With this much more weight on L+ entropy would stand still, to first order.",
           zero=False, rule=0.0),
    Figure("thresholds", "control", "Selection thresholds", "score of the last token chosen",
           {"threshold_positive": "L+", "threshold_negative": "L-"}),
    Figure("realised", "prediction", "Realised change of entropy", "nats per step", {REALISED: ""},
           "H of the next step minus H of this one, though the two have different prompts; of the "
           "same batch where diagnostics.realised is set.", zero=False, rule=0.0),
    Figure("predicted", "prediction", "Predicted change of entropy", "per unit step in the logits",
           {PREDICTED: ""},
           "First order. Its sign and shape are predictions, its scale is the optimizer's.",
           zero=False, rule=0.0),
    Figure("gradient", "machine", "Gradient norm", "before clipping", {"grad_norm": ""},
           zero=False),
    Figure("difference", "machine", "Trainer against engine",
           "nats, mean |difference| of log-probs",
           {"logprob_diff_mean": "", "rollout_diff_mean": "stale tokens too"}),
    Figure("staleness", "machine", "Staleness", "steps between sampling and training",
           {"staleness_mean": "mean", "staleness_max": "largest"}),
)
# fmt: on


def figures_of(runs: Sequence[Run]) -> dict[str, Any]:
    """The figures there is data for, with the lines of every metric: {"figures", "lines",
    "stacks", "predictions", "numbers": the names of all}.
    """
    figures = [figure for figure in (*FIGURES, *_evaluations(runs)) if _worth_drawing(figure, runs)]
    lines = {key: lines_of(runs, key, MOST_POINTS) for figure in figures for key in figure.keys}
    figures = [figure for figure in figures if any(lines[key] for key in figure.keys)]
    others = [key for key in numeric_keys(runs) if lines.get(key) is None]
    found = lines | {key: lines_of(runs, key, MOST_OTHER_POINTS) for key in others}
    return {
        "figures": [vars(figure) for figure in figures],
        "lines": {key: line for key, line in found.items() if line},
        "numbers": [key for key in numeric_keys(runs) if found.get(key)],
        "stacks": [stack for run in range(len(runs)) for stack in _stacks(runs, run)],
        "predictions": [prediction(run) for run in runs],
        "most_points": MOST_POINTS,
        "most_other_points": MOST_OTHER_POINTS,
    }


def _worth_drawing(figure: Figure, runs: Sequence[Run]) -> bool:
    """Whether a figure is worth drawing: not the gate where it is always closed, nor weights that
    are always one.
    """
    idle = {"gate": 0.0, "weights": 1.0}.get(figure.name)
    keys = ["gate"] if figure.name == "gate" else list(figure.keys)
    values = (value for run in runs for key in keys for _, value in run.series(key))
    return idle is None or any(value != idle for value in values)


def _evaluations(runs: Sequence[Run]) -> list[Figure]:
    """A figure of pass@k and one of avg@k for each evaluation set."""
    found = []
    for name in sorted(evaluation_sets(numeric_keys(runs)), reverse=True):
        draws = {int(value) for run in runs for _, value in run.series(f"eval/{name}/k")}
        k = str(draws.pop()) if len(draws) == 1 else "k"
        for kind, note in (
            ("pass", f"At least one of {k} samples is right."),
            ("avg", f"Mean accuracy over {k} samples."),
        ):
            key = f"eval/{name}/{kind}_at_k"
            title = f"{evaluation_label(name)}: {kind}@{k}"
            figure = Figure(key, "evaluation", title, "share", {key: ""}, note, limits=(0, 1))
            found.append(figure)
    return found


def _stacks(runs: Sequence[Run], number: int) -> list[dict[str, Any]]:
    """A run's areas: shares of the four quadrants, seconds per phase."""
    run = runs[number]
    found = []
    areas = stacked(run, list(QUADRANTS), MOST_STACKED)
    if areas:
        layers = {QUADRANTS[key]: values for key, values in areas["layers"].items()}
        found.append({"run": number, "kind": "quadrants", "x": areas["x"], "layers": layers})
    timed, phases = phases_of(run)
    seconds = stacked(timed, phases, MOST_STACKED) if phases else None
    if seconds:
        layers = {key.removeprefix("seconds_"): each for key, each in seconds["layers"].items()}
        found.append({"run": number, "kind": "seconds", "x": seconds["x"], "layers": layers})
    return found
