"""examples/stare.ipynb: its code runs, and prints the figures that are stored in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

NOTEBOOK = json.loads((ROOT / "examples/stare.ipynb").read_text(encoding="utf-8"))
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def run(cells: list[dict], directory: Path) -> str:
    """The output of the code of these cells, in a process of its own, without a screen."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join("".join(cell["source"]) for cell in cells)],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def stored(cells: list[dict]) -> str:
    """The output of these cells in the saved notebook."""
    streams = (output for cell in cells for output in cell["outputs"] if "text" in output)
    return "".join("".join(stream["text"]) for stream in streams if stream["name"] == "stdout")


def test_the_parts_without_training_print_what_the_notebook_shows(tmp_path: Path) -> None:
    quick = CELLS[:-2]
    printed, shown = (text.splitlines() for text in (run(quick, tmp_path), stored(quick)))
    assert len(printed) == len(shown) > 10
    for ours, theirs in zip(printed, shown, strict=True):
        if "e-" not in theirs:  # a rounding error, and nothing else
            assert ours == theirs


@pytest.mark.slow
def test_the_training_curve_shows_what_the_notebook_says(tmp_path: Path) -> None:
    """STARE ends near the target, GRPO-ds far below it."""
    printed = run(CELLS, tmp_path)
    ends = {
        line.split()[0]: float(line.split(" -> ")[1].split()[0])
        for line in printed.splitlines()
        if " -> " in line
    }
    assert ends["GRPO-ds"] < 0.6 * 0.3 < 0.225 < ends["STARE"] < 0.375
