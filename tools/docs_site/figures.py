"""Draws the pictures of the documentation.

    python tools/docs_site/figures.py runs/quickstart --output docs/images
    python tools/docs_site/figures.py --losses runs/losses --output docs/images
    python tools/docs_site/figures.py --controllers runs/prompts_8 --output docs/images

quickstart.png: entropy against its band, and HARD problems solved, from the metrics of a finished
quickstart; four_quadrants.png: what examples/four_quadrants.py draws. losses.png: the entropy of
every arm of a comparison of losses, a panel each. controllers_<directory>.png: of every arm the
entropy, and what its controller sets, a line for each seed; and a table of every run, in words.
"""

from __future__ import annotations

import argparse
import math
import runpy
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stare.reporting.logbook import METRICS_NAME, read_metrics
from megatron_stare.reporting.summary import BAND, arm_label

ROOT = Path(__file__).resolve().parents[2]
TARGET_ENTROPY = 0.3  # of the quickstart
ARMS = {"grpo_ds": ("GRPO-ds", "#D55E00"), "stare": ("STARE", "#1f83c4")}
LEVERS = ("weight_w", "alpha", "entropy_coefficient", "zeta")  # what a controller sets
BAND_FILL, MUTED = "#dfe7ee", "#808080"
_PALE = "#c9d1d9"
DARK = {
    f"{part}.{kind}": _PALE
    for part, kind in (("axes", "edgecolor"), ("axes", "labelcolor"), ("axes", "titlecolor"))
} | {"text.color": _PALE, "xtick.color": _PALE, "ytick.color": _PALE}


@dataclass(frozen=True)
class Curves:
    """The metrics of one arm under one seed."""

    seed: str
    arm: str
    rows: Sequence[Mapping[str, Any]]

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) wherever a row has the key."""
        return [(row["step"], row[key]) for row in self.rows if key in row]


def read_runs(directory: Path, arms: Sequence[str] = ()) -> list[Curves]:
    """These arms (all that were trained) of every seed of a comparison."""
    return [
        Curves(path.parents[1].name, path.parent.name, read_metrics(path))
        for path in sorted(directory.glob(f"seed*/*/{METRICS_NAME}"))
        if not arms or path.parent.name in arms
    ]


def draw_quickstart(runs: Sequence[Curves], path: Path, dark: bool = False) -> None:
    """Two panels, each arm under its name; transparent, so that a dark page needs a dark one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.style.context(DARK if dark else {}):
        _draw_quickstart(plt, runs, path)


def _draw_quickstart(plt: Any, runs: Sequence[Curves], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), sharex=True)
    low, high = TARGET_ENTROPY * (1 - BAND), TARGET_ENTROPY * (1 + BAND)
    left.axhspan(low, high, color="#7f9db9", alpha=0.25, linewidth=0, zorder=0)
    place = {"transform": left.get_yaxis_transform(), "ha": "right", "va": "bottom"}
    left.text(0.98, high, "target band", color=MUTED, fontsize=9, **place)
    for run in runs:
        for axis, key in ((left, "entropy"), (right, "eval/heldout_hard/pass_at_k")):
            _line(axis, run, key)
    left.set(title="Entropy [nats per token]", xlabel="step", ylim=(0, None))
    right.set(title="HARD problems solved in 8 tries", xlabel="step", ylim=(-0.02, 1.02))
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.02)
    handles, labels = left.get_legend_handles_labels()
    first = dict(zip(labels, handles, strict=True))
    right.legend(first.values(), first.keys(), frameon=False, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=110, transparent=True)
    plt.close(figure)


def _line(axis: Any, run: Curves, key: str) -> None:
    points = run.series(key)
    marker = "o-" if key.startswith("eval/") else "-"
    label, colour = ARMS[run.arm]
    axis.plot(
        [step for step, _ in points],
        [value for _, value in points],
        marker,
        color=colour,
        label=label,
        linewidth=1.4,
        markersize=4,
    )


def draw_losses(runs: Sequence[Curves], path: Path, columns: int = 4) -> None:
    """A panel for each arm with a line for each seed, over those of the first arm of ARMS."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms = sorted({run.arm for run in runs}, key=lambda arm: (arm not in ARMS, arm))
    rows = -(-len(arms) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(10, 1.9 * rows), sharex=True, sharey=True, squeeze=False
    )
    low, high = TARGET_ENTROPY * (1 - BAND), TARGET_ENTROPY * (1 + BAND)
    for axis, arm in zip(axes.flat, arms, strict=False):
        axis.axhspan(low, high, color=BAND_FILL, zorder=0)
        axis.set_title(arm_label(arm), fontsize=10)
        for run in sorted(runs, key=lambda run: run.arm == arm):
            if run.arm not in (arm, next(iter(ARMS))):
                continue
            points = run.series("entropy")
            colour = ARMS["stare"][1] if run.arm == arm else "#c4c4c4"
            axis.plot(*zip(*points, strict=True), color=colour, linewidth=1.1)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.02)
        axis.set_ylim(0, 2.5 * TARGET_ENTROPY)
    for axis in axes.flat[len(arms) :]:
        axis.set_visible(False)
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("entropy [nats per token]", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def draw_controllers(runs: Sequence[Curves], path: Path) -> None:
    """A column for each arm: entropy against its band, and its controller's lever."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    levers = {run.arm: next(filter(run.series, LEVERS), LEVERS[0]) for run in runs}
    arms = sorted(levers, key=lambda arm: (LEVERS.index(levers[arm]), len(arm)))
    low, high = TARGET_ENTROPY * (1 - BAND), TARGET_ENTROPY * (1 + BAND)
    figure, axes = plt.subplots(
        2, len(arms), figsize=(1 + 2.1 * len(arms), 4), sharex=True, squeeze=False
    )
    for (top, bottom), arm in zip(axes.T, arms, strict=True):
        lever = levers[arm]
        top.axhspan(low, high, color=BAND_FILL, zorder=0)
        top.set_title(arm_label(arm))
        top.set_ylim(0, 2.5 * TARGET_ENTROPY)
        bottom.set_title("W" if lever == LEVERS[0] else lever, fontsize=9)
        bottom.set_xlabel("step")
        for axis, key in ((top, "entropy"), (bottom, lever)):
            for run in (run for run in runs if run.arm == arm):
                points = run.series(key)
                axis.plot([step for step, _ in points], [one for _, one in points], linewidth=0.9)
            axis.spines[["top", "right"]].set_visible(False)
            axis.margins(x=0.02)
    _share_range(
        [axis for axis, arm in zip(axes[1], arms, strict=True) if levers[arm] == LEVERS[0]]
    )
    axes[0, 0].set_ylabel("entropy [nats per token]")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def describe_controllers(runs: Sequence[Curves]) -> str:
    """For every run: steps out of the band after step 30 and the first of them, mean W of the first
    400 steps, and of the last half mean W and the median critical weight W*.
    """
    lines = [f"{'':24}  out  first  W to 400  W last half  W* last half"]
    for run in runs:
        out = [
            step
            for step, value in run.series("entropy")
            if step > 30 and abs(value - TARGET_ENTROPY) > BAND * TARGET_ENTROPY
        ]
        half = len(run.rows) // 2
        weight, excess = (run.series(key) for key in ("weight_w", "critical_weight_excess"))
        numbers = [
            statistics.fmean([value for step, value in weight if step <= 400] or [math.nan]),
            statistics.fmean([value for step, value in weight if step > half] or [math.nan]),
            1 + statistics.median([value for step, value in excess if step > half] or [math.nan]),
        ]
        first = out[0] if out else "-"
        shown = "".join(
            f"{value:>{width}.2f}" for value, width in zip(numbers, (10, 13, 14), strict=True)
        )
        lines.append(f"{run.seed + ' ' + run.arm:24}{len(out):5}{first:>7}{shown}")
    return "\n".join(lines)


def _share_range(axes: Sequence[Any]) -> None:
    """The same ordinate on all of them."""
    ends = [axis.get_ylim() for axis in axes]
    for axis in axes:
        axis.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))


def draw_quadrants(path: Path) -> None:
    """Run the example; a minute of cold start."""
    example = runpy.run_path(str(ROOT / "examples/four_quadrants.py"))
    with tempfile.TemporaryDirectory() as place:
        example["main"](["--output", place])
        shutil.copyfile(Path(place) / path.name, path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="the pictures of the documentation")
    parser.add_argument("run", type=Path, nargs="?", help="a finished quickstart")
    parser.add_argument("--losses", type=Path, help="a finished comparison of losses")
    parser.add_argument("--controllers", type=Path, nargs="*", default=[], help="such, with W")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    if options.losses:
        draw_losses(read_runs(options.losses), options.output / "losses.png")
    for directory in options.controllers:
        path = options.output / f"controllers_{directory.name}.png"
        draw_controllers(runs := read_runs(directory), path)
        print(f"{path}\n{describe_controllers(runs)}")
    if options.run:
        runs = read_runs(options.run, list(ARMS))
        draw_quickstart(runs, options.output / "quickstart.png")
        draw_quickstart(runs, options.output / "quickstart_dark.png", dark=True)
        draw_quadrants(options.output / "four_quadrants.png")


if __name__ == "__main__":
    main()
