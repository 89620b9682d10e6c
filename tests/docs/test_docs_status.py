"""Every page that speaks of GPUs says where its subject has run: CPU, null device, GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.paths import ROOT

HEADER = "| status | CPU | null device | GPU | tests |"
# They list names, and claim nothing of what they name.
LISTS = ("configuration.md", "architecture.md", "glossary.md")
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
