"""The figures of a report, drawn from metrics.jsonl rows:
entropy, evaluation, reward, length, control.

One colour per arm everywhere (Okabe and Ito's palette, then Tol's, safe for colour-blind readers),
thin lines for seeds and a thick one for their mean, labels at the line ends instead of a legend.
matplotlib is imported where it is used: it takes a second.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stare.config import UserError
from megatron_stare.reporting.summary import BAND

INK, MUTED, GRID, BAND_FILL = "#222222", "#6b6b6b", "#e8e8e8", "#dfe7ee"
ARM_COLOURS = {"grpo_ds": "#D55E00", "stare": "#0072B2"}
# then Tol's muted palette
MORE_COLOURS = ["#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
MORE_COLOURS += ["#882255", "#999933", "#332288", "#44AA99", "#661100"]
ARM_LABELS = {"grpo_ds": "GRPO-ds", "grpo": "GRPO", "dapo": "DAPO", "stare": "STARE", "sft": "SFT"}
GATE_WINDOW = 20
WIDTH, HEIGHT, DPI = 7.6, 3.7, 160  # inches, inches, dots per inch
END_LABEL, LABEL_POINTS = "end label", 12.5

Point = tuple[float, float]


@dataclass(frozen=True)
class Run:
    """One arm under one seed."""

    arm: str
    seed: str
    rows: Sequence[Mapping[str, Any]]

    def series(self, key: str) -> list[Point]:
        """(step, value) wherever a row has the key."""
        return [
            (row["step"], row[key]) for row in self.rows if isinstance(row.get(key), (int, float))
        ]


def arm_label(arm: str) -> str:
    return ARM_LABELS.get(arm, arm.replace("_", " "))


def arm_colours(arms: Sequence[str]) -> dict[str, str]:
    """The fixed colours of the known arms, and the rest of the palette for others, in order."""
    spare = iter(MORE_COLOURS * (1 + len(arms)))
    return {arm: ARM_COLOURS.get(arm) or next(spare) for arm in arms}


def mean_series(many: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean over seeds at every step that all of them have."""
    tables = [dict(series) for series in many]
    shared = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    return [(step, math.fsum(table[step] for table in tables) / len(tables)) for step in shared]


def moving_mean(series: Sequence[Point], window: int) -> list[Point]:
    """The mean over the last `window` points (fewer at the start)."""
    values = [value for _, value in series]
    windows = (values[max(0, at + 1 - window) : at + 1] for at in range(len(values)))
    return [
        (step, math.fsum(part) / len(part)) for (step, _), part in zip(series, windows, strict=True)
    ]


def draw_all(runs: Sequence[Run], directory: Path, target_entropy: float | None) -> dict[str, Path]:
    """Draw every figure there is data for into `directory`;
    {figure name: PNG path}, in the order of a report.
    """
    directory.mkdir(parents=True, exist_ok=True)
    painters: dict[str, Callable[[], Any]] = {
        "entropy": lambda: _draw_entropy(runs, target_entropy),
        "evaluation": lambda: _draw_evaluation(runs),
        "reward": lambda: _draw_one(
            runs, "reward", "Training reward", "mean of all sampled responses"
        ),
        "length": lambda: _draw_one(
            runs, "response_length", "Response length", "mean tokens per response", from_zero=False
        ),
        "control": lambda: _draw_control(runs),
    }
    drawn = {}
    with _style():
        for name, paint in painters.items():
            figure = paint()
            if figure is not None:
                drawn[name] = directory / f"{name}.png"
                _separate_labels(figure)
                figure.savefig(drawn[name], dpi=DPI)
    return drawn


@contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError:
        raise UserError("reports need matplotlib; pip install matplotlib") from None
    with matplotlib.rc_context(
        {
            "font.family": "DejaVu Sans",
            "font.size": 10,
            "text.color": INK,
            "axes.labelcolor": MUTED,
            "axes.edgecolor": "#b8b8b8",
            "axes.grid": True,
            "axes.grid.axis": "y",
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.spines.left": False,
            "grid.color": GRID,
            "grid.linewidth": 0.8,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "ytick.major.size": 0,
            "xtick.major.size": 3,
            "lines.solid_capstyle": "round",
            "figure.facecolor": "white",
        }
    ):
        yield


def _draw_entropy(runs: Sequence[Run], target: float | None) -> Any:
    def decorate(axes: Any) -> None:
        if target:
            axes.axhspan(
                target * (1 - BAND), target * (1 + BAND), color=BAND_FILL, zorder=0, linewidth=0
            )
            axes.axhline(target, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)

    note = f"target {target:g} \u00b1 {BAND:.0%}" if target else ""
    subtitle = "nats per token, mean over the batch" + (f"; shaded: {note}" if note else "")
    return _draw_one(runs, "entropy", "Policy entropy", subtitle, decorate)


def _draw_one(
    runs: Sequence[Run],
    key: str,
    title: str,
    subtitle: str,
    decorate: Callable[[Any], None] | None = None,
    from_zero: bool = True,
) -> Any:
    """A figure with one panel, or None where no run has the key."""
    if not any(run.series(key) for run in runs):
        return None
    figure, ((axes,),) = _panels(1, 1)
    if decorate is not None:
        decorate(axes)
    _draw_lines(axes, runs, lambda run: run.series(key))
    _title(axes, title, subtitle)
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("optimizer step")
    return figure


def _draw_evaluation(runs: Sequence[Run]) -> Any:
    """Columns: evaluation sets; rows: pass@k and avg@k."""
    found = {key for run in runs for row in run.rows for key in row if key.startswith("eval/")}
    names = sorted({key.split("/")[1] for key in found}, reverse=True)
    kinds = [
        kind
        for kind in ("pass_at_k", "avg_at_k")
        if any(f"eval/{name}/{kind}" in found for name in names)
    ]
    if not names or not kinds:
        return None
    figure, grid = _panels(len(kinds), len(names))
    for kind, line in zip(kinds, grid, strict=True):
        for name, axes in zip(names, line, strict=True):
            key = f"eval/{name}/{kind}"
            _draw_lines(axes, runs, operator.methodcaller("series", key), marker=True)
            draws = {int(value) for run in runs for _, value in run.series(f"eval/{name}/k")}
            measure = kind.replace("_at_k", f"@{draws.pop()}" if len(draws) == 1 else "@k")
            _title(axes, f"{_evaluation_label(name)}: {measure}", "")
            axes.set_ylim(-0.03, 1.03)
            axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    for axes in grid[-1]:
        axes.set_xlabel("optimizer step")
    return figure


def _evaluation_label(name: str) -> str:
    words = name.split("_")
    if words[0] == "heldout":
        return " ".join(["Held-out", *(word.upper() for word in words[1:])])
    return " ".join(words)


def _draw_control(runs: Sequence[Run]) -> Any:
    """STARE's two handles: how often the gate is open, and the weights W and M."""
    steered = [
        run
        for run in runs
        if any(weight != 1 for key in ("weight_w", "weight_m") for _, weight in run.series(key))
    ]
    if not steered:
        return None
    figure, ((gate, weights),) = _panels(1, 2)
    _draw_lines(gate, steered, lambda run: moving_mean(run.series("gate"), GATE_WINDOW))
    _title(gate, "Gate open", f"share of the last {GATE_WINDOW} steps")
    gate.set_ylim(-0.03, 1.03)
    named = len({run.arm for run in steered}) > 1
    _draw_lines(weights, steered, lambda run: run.series("weight_w"), suffix="W", named=named)
    _draw_lines(weights, steered, lambda run: run.series("weight_m"), suffix="M", named=named)
    weights.axhline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    _title(weights, "Weights W and M", "on the selected tokens while the gate is open")
    for axes in (gate, weights):
        axes.set_xlabel("optimizer step")
    return figure


def _panels(rows: int, columns: int) -> tuple[Any, list[list[Any]]]:
    from matplotlib.figure import Figure

    height = HEIGHT if rows == 1 else 2.9 * rows
    figure = Figure(figsize=(WIDTH if columns < 3 else 3.4 * columns, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.06)
    grid = figure.subplots(rows, columns, squeeze=False)
    return figure, [list(line) for line in grid]


def _title(axes: Any, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", pad=22 if subtitle else 8)
    if subtitle:
        axes.annotate(
            subtitle,
            (0, 1),
            (0, 7),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=9,
            color=MUTED,
        )


def _draw_lines(
    axes: Any,
    runs: Sequence[Run],
    series_of: Callable[[Run], list[Point]],
    marker: bool = False,
    suffix: str = "",
    named: bool = True,
) -> None:
    """Thin lines per seed and their thick mean per arm, labelled at the right end."""
    arms = list({run.arm: None for run in runs})
    ends: list[tuple[float, str, str]] = []
    for arm, colour in arm_colours(arms).items():
        many = [series for series in (series_of(run) for run in runs if run.arm == arm) if series]
        if len(many) > 1:
            for series in many:
                axes.plot(
                    *zip(*series, strict=True), color=colour, alpha=0.3, linewidth=0.8, zorder=2
                )
        mean = mean_series(many)
        if mean:
            style = (
                {"marker": "o", "markersize": 4, "clip_on": False}
                if marker or len(mean) == 1
                else {}
            )
            axes.plot(*zip(*mean, strict=True), color=colour, linewidth=1.9, zorder=3, **style)
            label = " ".join(part for part in (arm_label(arm) if named else "", suffix) if part)
            ends.append((mean[-1][1], label, colour))
    axes.margins(x=0.01)
    axes.set_xlim(left=0)
    _label_ends(axes, ends)


def _label_ends(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Labels to the right of the axes at the height of each line's end;
    `_separate_labels` keeps them apart.
    """
    for value, text, colour in ends:
        axes.annotate(
            text,
            (1, value),
            (6, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=colour,
            fontsize=9.5,
            fontweight="bold",
            va="center",
            annotation_clip=False,
            gid=END_LABEL,
        )


def _separate_labels(figure: Any) -> None:
    """Move end labels that would overlap apart, once limits and layout are final."""
    figure.draw_without_rendering()
    points_per_pixel = 72 / figure.dpi
    for axes in figure.axes:
        labels = [label for label in axes.texts if label.get_gid() == END_LABEL]
        heights = [
            axes.transData.transform((0, label.xy[1]))[1] * points_per_pixel for label in labels
        ]
        for label, height, apart in zip(
            labels, heights, spread(heights, LABEL_POINTS), strict=True
        ):
            label.set_position((6, apart - height))


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """The nearest heights (least squares) in the same order that are at least `gap` apart.

    With the i-th smallest lowered by i * gap this is isotonic regression: pool adjacent violators.
    """
    order = sorted(range(len(heights)), key=lambda at: heights[at])
    pools: list[tuple[float, int]] = []  # (sum, count), means increasing
    for rank, at in enumerate(order):
        total, count = heights[at] - rank * gap, 1
        while pools and pools[-1][0] / pools[-1][1] >= total / count:
            total, count = total + pools[-1][0], count + pools.pop()[1]
        pools.append((total, count))
    lowered = [total / count for total, count in pools for _ in range(count)]
    apart = [0.0] * len(heights)
    for rank, at in enumerate(order):
        apart[at] = lowered[rank] + rank * gap
    return apart
