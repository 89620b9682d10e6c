"""Paired differences of two evaluations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT


def write(file: Path, correct: list[int], k: int = 2) -> Path:
    rows = [
        {
            "set": "held",
            "index": index,
            "k": k,
            "correct": right,
            "pass_at_k": {"1": right / k, str(k): float(right > 0)},
        }
        for index, right in enumerate(correct)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def paired(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks/paired.py", *words], capture_output=True, text=True
    )


def test_two_seeds_are_averaged_problem_by_problem(tmp_path: Path) -> None:
    """Every problem gains a half in avg@2 in one seed and nothing in the other: no spread, although
    the problems differ.
    """
    first = [write(tmp_path / f"first{n}", [0, 1, 0, 1]) for n in range(2)]
    second = [write(tmp_path / "second0", [1, 2, 1, 2]), first[1]]
    done = paired("--first", *first, "--second", *second)
    assert done.returncode == 0, done.stderr
    rows = {
        cells[0]: cells[1:]
        for line in done.stdout.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("\u2502").split("\u2502")]) == 4
    }
    assert rows["avg@2"] == ["+0.250", "+0.250 to +0.250", "4"]
    assert rows["pass@2"][0] == "+0.250" and rows["pass@2"][1] != "+0.250 to +0.250"


@pytest.mark.parametrize(("correct", "k"), [([1, 2, 1], 2), ([1, 2, 1, 2], 4)])
def test_other_problems_are_refused(tmp_path: Path, correct: list[int], k: int) -> None:
    first = write(tmp_path / "first", [0, 1, 0, 1])
    done = paired("--first", first, "--second", write(tmp_path / "second", correct, k))
    assert done.returncode == 1 and "the files differ in their problems" in done.stderr
    done = paired("--first", first, "--second", first, first)
    assert done.returncode == 1 and "--first has 1 files and --second 2" in done.stderr
