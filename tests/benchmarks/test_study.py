"""Figures of docs/results.md that study.py prints, from the data in the repository."""

from __future__ import annotations

import argparse
import re
import tarfile
from pathlib import Path

import pytest

from benchmarks.study import expression, responses_of
from tests.paths import ROOT

RUNS = "runs/smollm2_135m_lcm_losses"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("study")
    with tarfile.open(ROOT / "docs/studies/smollm2.tar.xz") as archive:
        wanted = [each for each in archive if each.name.startswith(RUNS) and each.isfile()]
        archive.extractall(place, [e for e in wanted if "/diagnostics/" in e.name], filter="data")
    return place / RUNS


@pytest.mark.parametrize(
    ("run", "share", "reward", "of_others"),
    [
        *((f"seed{seed}/grpo_ds", "100%", r"0\.\d+", "-") for seed in range(3)),
        ("seed0/stare", "64%", "0.574", "0.418"),
        ("seed1/stare", "80%", "0.490", "0.385"),
        ("seed2/stare", "75%", "0.587", "0.688"),
    ],
)
def test_the_page_says_how_many_responses_name_the_greatest_common_divisor(
    runs: Path, run: str, share: str, reward: str, of_others: str
) -> None:
    table = responses_of(runs / run, re.compile("gcd"))
    _, second = zip(*(column.cells for column in table.columns), strict=True)
    assert second[2] == share and second[4] == of_others
    assert re.fullmatch(reward, str(second[3]))


def test_a_wrong_expression_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"'\(' is no regular expression"):
        expression("(")
