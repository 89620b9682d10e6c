"""Every page that speaks of GPUs says where its subject has run: CPU, null device, GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.paths import ROOT

HEADER = "| status | CPU | null device | GPU | tests |"
# Lists of names claim nothing of what they name. faq.md links to status.md, whose own table is
# tested below.
LISTS = ("configuration.md", "architecture.md", "glossary.md", "faq.md", "status.md")
PAGES = [
    page
    for page in (*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "slurm" / "README.md")
    if page.name not in LISTS and re.search(r"\bGPUs?\b", page.read_text(encoding="utf-8"))
]
# Reports of `gpuday`: without one, nothing has run on a GPU.
REPORTS = [*ROOT.glob("docs/gpuday*.md")]


def rows(page: Path) -> list[list[str]]:
    """The cells of the status table."""
    _, _, after = page.read_text(encoding="utf-8").partition(HEADER)
    lines = after.partition("\n\n")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_status_of_a_page_is_that_of_its_tests(page: Path) -> None:
    """A named test of each place exists; on the null device run those that are marked so."""
    found = rows(page)
    assert found, f"{page} speaks of GPUs and has no status table"
    for what, on_cpu, on_null, on_gpu, tests in found:
        files = [ROOT / name for name in re.findall(r"`([^`]+)`", tests)]
        marked = ["mark.nullcuda" in file.read_text(encoding="utf-8") for file in files]
        assert {on_cpu, on_null, on_gpu} <= {"yes", "no"} and files, what
        assert (on_null == "yes") == any(marked), what
        assert (on_cpu == "yes") == (not all(marked)), what
        assert on_gpu == "no" or REPORTS, what


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_gpu_hours_are_planned(page: Path) -> None:
    """A paragraph or table with GPU-hours says that they are planned, or marks each figure."""
    for part in re.split(r"\n\n", page.read_text(encoding="utf-8")):
        if re.search(r"\d GPU-hours|GPU-hours \(", part):
            assert re.search(r"plan|\(c\)", part), part


# The columns of status.md's table, and what the text of a column's tests has to contain.
COLUMNS = (
    ("one process", r"def test_"),
    ("ranks", r"run_distributed|torchrun|Ranks|nproc|srun|sbatch"),
    ("servers", r"mark\.sglang|sglang"),
    ("null device", r"nullcuda|mark\.gpu"),
)


def test_cells_of_the_status_page_name_tests_that_have_their_columns_mark() -> None:
    lines = (ROOT / "docs/status.md").read_text(encoding="utf-8").splitlines()
    table = [line.strip("|").split("|") for line in lines if line.startswith("| ")]
    head, *features = [[cell.strip() for cell in row] for row in table]
    assert head == ["feature", *(name for name, _ in COLUMNS), "GPU"] and len(features) > 15
    for feature, *cells, on_gpu in features:
        assert on_gpu == "-" or REPORTS, feature
        for cell, (name, mark) in zip(cells, COLUMNS, strict=True):
            linked = re.search(r"\(\.\./(tests/[\w/]+\.py)\)", cell)
            assert linked or cell == "-", f"{feature}: {cell}"
            if linked:
                text = (ROOT / linked[1]).read_text(encoding="utf-8")
                assert re.search(mark, text), f"{feature}, {name}: {linked[1]}"
