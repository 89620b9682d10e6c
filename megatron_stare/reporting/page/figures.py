"""Which figures a page has, in order, and what they show: a table to read and to add to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_stare.reporting.page.runs import Run
from megatron_stare.reporting.page.series import (
    GATE,
    GATE_WINDOW,
    PREDICTED,
    REALISED,
    lines_of,
    numeric_keys,
    phases_of,
    prediction,
    stacked,
)

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


FIGURES = (
    Figure(
        "entropy",
        "entropy",
        "Policy entropy",
        "nats per token",
        {"entropy": ""},
        "Mean over the batch. Below the band the policy collapses, above it wanders.",
    ),
    Figure(
        "reward",
        "learning",
        "Training reward",
        "mean reward",
        {"reward": ""},
        "Every response that was sampled, before groups without signal are dropped.",
    ),
    Figure(
        "length",
        "learning",
        "Response length",
        "tokens",
        {"response_length": ""},
        "Mean of every response that was sampled.",
        zero=False,
    ),
    Figure(
        "truncated",
        "learning",
        "Truncated responses",
        "share",
        {"truncated_fraction": ""},
        "Responses that met the length limit.",
    ),
    Figure(
        "gate",
        "control",
        "Gate open",
        "share of steps",
        {GATE: ""},
        f"Share of the last {GATE_WINDOW} steps. STARE acts only while the gate is open.",
        limits=(0, 1),
    ),
    Figure(
        "weights",
        "control",
        "Weights W and M",
        "factor",
        {"weight_w": "W", "weight_m": "M"},
        "On the selected tokens while the gate is open: W on L+, M on L-.",
        zero=False,
        rule=1.0,
    ),
    Figure(
        "critical",
        "control",
        "Distance to the critical weight, W* - 1",
        "factor",
        {"critical_weight_excess": ""},
        "With this much more weight on L+ entropy would stand still, to first order.",
        zero=False,
        rule=0.0,
    ),
    Figure(
        "thresholds",
        "control",
        "Selection thresholds",
        "score of the last token chosen",
        {"threshold_positive": "L+", "threshold_negative": "L-"},
    ),
    Figure(
        "realised",
        "prediction",
        "Realised change of entropy",
        "nats per step",
        {REALISED: ""},
        "H of the next step minus H of this one, though the two have different prompts; of the "
        "same batch where diagnostics.realised is set.",
        zero=False,
        rule=0.0,
    ),
    Figure(
        "predicted",
        "prediction",
        "Predicted change of entropy",
        "per unit step in the logits",
        {PREDICTED: ""},
        "First order. Its sign and shape are predictions, its scale is the optimizer's.",
        zero=False,
        rule=0.0,
    ),
    Figure(
        "gradient", "machine", "Gradient norm", "before clipping", {"grad_norm": ""}, zero=False
    ),
    Figure(
        "difference",
        "machine",
        "Trainer against engine",
        "nats, mean |difference| of log-probs",
        {"logprob_diff_mean": "", "rollout_diff_mean": "stale tokens too"},
    ),
    Figure(
        "staleness",
        "machine",
        "Staleness",
        "steps between sampling and training",
        {"staleness_mean": "mean", "staleness_max": "largest"},
    ),
)


def figures_of(runs: Sequence[Run]) -> dict[str, Any]:
    """The figures there is data for, with the lines of every metric: {"figures", "lines",
    "stacks", "predictions", "others"}.
    """
    figures = [figure for figure in (*FIGURES, *_evaluations(runs)) if _worth_drawing(figure, runs)]
    lines = {key: lines_of(runs, key, MOST_POINTS) for figure in figures for key in figure.keys}
    figures = [figure for figure in figures if any(lines[key] for key in figure.keys)]
    others = [key for key in numeric_keys(runs) if lines.get(key) is None]
    found = lines | {key: lines_of(runs, key, MOST_OTHER_POINTS) for key in others}
    return {
        "figures": [vars(figure) for figure in figures],
        "lines": {key: line for key, line in found.items() if line},
        "others": [key for key in numeric_keys(runs) if found.get(key)],
        "stacks": [stack for run in range(len(runs)) for stack in _stacks(runs, run)],
        "predictions": [prediction(run) for run in runs],
        "most_points": MOST_POINTS,
        "most_other_points": MOST_OTHER_POINTS,
    }


def _worth_drawing(figure: Figure, runs: Sequence[Run]) -> bool:
    """Not the gate and the weights of runs that have none of them: always closed, always one."""
    idle = {"gate": 0.0, "weights": 1.0}.get(figure.name)
    keys = ["gate"] if figure.name == "gate" else list(figure.keys)
    values = (value for run in runs for key in keys for _, value in run.series(key))
    return idle is None or any(value != idle for value in values)


def _evaluations(runs: Sequence[Run]) -> list[Figure]:
    """A figure of pass@k and one of avg@k for each evaluation set."""
    names = {key.split("/")[1] for key in numeric_keys(runs) if key.startswith("eval/")}
    found = []
    for name in sorted(names, reverse=True):
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


def evaluation_label(name: str) -> str:
    """heldout_hard: Held-out HARD."""
    words = name.split("_")
    if words[0] == "heldout":
        return " ".join(["Held-out", *(word.upper() for word in words[1:])])
    return " ".join(words)


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
