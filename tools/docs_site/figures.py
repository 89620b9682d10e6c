"""Draws the pictures of the documentation.

    python tools/docs_site/figures.py runs/quickstart --output docs/images

quickstart.png: entropy against its band, and HARD problems solved, from the metrics of a finished
quickstart; four_quadrants.png: what examples/four_quadrants.py draws.
"""

from __future__ import annotations

import argparse
import runpy
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stare.reporting.logbook import METRICS_NAME, read_metrics
from megatron_stare.reporting.summary import BAND

ROOT = Path(__file__).resolve().parents[2]
TARGET_ENTROPY = 0.3  # of the quickstart
ARMS = {"grpo_ds": ("GRPO-ds", "#D55E00"), "stare": ("STARE", "#0072B2")}
BAND_FILL, MUTED = "#dfe7ee", "#6b6b6b"


@dataclass(frozen=True)
class Curves:
    """The metrics of one arm under one seed."""

    arm: str
    rows: Sequence[Mapping[str, Any]]

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) wherever a row has the key."""
        return [(row["step"], row[key]) for row in self.rows if key in row]


def read_runs(directory: Path) -> list[Curves]:
    """Both arms of every seed of a comparison."""
    return [
        Curves(arm, read_metrics(seed / arm / METRICS_NAME))
        for seed in sorted(directory.glob("seed*"))
        for arm in ARMS
    ]


def draw_quickstart(runs: Sequence[Curves], path: Path) -> None:
    """Two panels, each arm under its name."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), sharex=True)
    low, high = TARGET_ENTROPY * (1 - BAND), TARGET_ENTROPY * (1 + BAND)
    left.axhspan(low, high, color=BAND_FILL, zorder=0)
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
    figure.savefig(path, dpi=110)
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


def draw_quadrants(path: Path) -> None:
    """Run the example; a minute of cold start."""
    example = runpy.run_path(str(ROOT / "examples/four_quadrants.py"))
    with tempfile.TemporaryDirectory() as place:
        example["main"](["--output", place])
        shutil.copyfile(Path(place) / path.name, path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="the pictures of the documentation")
    parser.add_argument("run", type=Path, help="a finished quickstart")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    draw_quickstart(read_runs(options.run), options.output / "quickstart.png")
    draw_quadrants(options.output / "four_quadrants.png")


if __name__ == "__main__":
    main()
