"""docs/status.md: each cell names tests that run the feature in the place of its column."""

from __future__ import annotations

import re

from tests.paths import ROOT

PAGE = (ROOT / "docs/status.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and "feature" not in line
]
# What the text of a column's tests has to contain; nothing is asked of tests of one process.
MARKS = {
    2: r"run_distributed|torchrun|Ranks|nproc|srun|sbatch",
    3: r"mark\.sglang|sglang",
    4: r"nullcuda|mark\.gpu",
}


def test_cells_name_tests_that_have_the_columns_mark() -> None:
    assert len(ROWS) > 15
    for row in ROWS:
        for column, cell in enumerate(row[1:], start=1):
            linked = re.search(r"\(\.\./(tests/[\w/]+\.py)\)", cell)
            assert linked or cell == "-", f"{row[0]}: {cell}"
            if linked:
                text = (ROOT / linked[1]).read_text(encoding="utf-8")
                assert re.search(MARKS.get(column, r"def test_"), text), f"{row[0]}: {linked[1]}"


def test_no_gpu_is_claimed_without_a_report_of_one() -> None:
    reports = list((ROOT / "docs").glob("gpu_reports/*.md"))
    assert bool(reports) or all(row[5] == "-" for row in ROWS)
