"""The table that ends a comparison fits a terminal of 80 columns, for two arms and for twelve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_stare.reporting.console import print_summary
from megatron_stare.reporting.summary import table_rows

ARMS = ["stare", "grpo_ds", "dapo", "stare_paper", "steer", "entropy_20", "gspo", "cispo", "sapo"]


def written(directory: Path, arms: list[str]) -> Path:
    """A summary of two seeds: of arm n all figures are n/10, one tenth more under the other."""
    draws = {"eval/heldout_hard/k": 8, "eval/heldout_easy/k": 8}
    keys = [key for key, *_ in table_rows([draws])]
    seeds = {
        seed: {
            arm: {key: place / 10 + int(seed) / 10 for key in keys}
            | draws
            | {"target_entropy": 0.3}
            for place, arm in enumerate(arms)
        }
        for seed in ("0", "1")
    }
    (directory / "summary.json").write_text(json.dumps({"seeds": seeds}))
    return directory


@pytest.mark.parametrize("count", [2, 9])
def test_the_console_shows_every_arm_with_its_figures(
    count: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_summary(written(tmp_path, ARMS[:count]))
    said = capsys.readouterr().out
    assert "..." not in said and "\u2026" not in said, "nothing is cut"
    assert all(len(line) <= 80 for line in said.splitlines())
    for name in ("STARE", "GRPO-ds", "stare paper", "cispo")[: 4 if count > 2 else 2]:
        assert name in said
    # 0.0 and 0.1: half the interval is 12.706 x 0.05
    assert "0.050" in said and "+-0.635" in said.replace("+- ", "+-")
    if count > 2:
        first, second = (line for line in said.splitlines() if line.startswith(" cispo"))
        assert first.split()[1:] == ["0.750", "75%", *["0.750"] * 5]
        assert second.split()[1:] == ["0.75", "75%"] and "W, last half" in said and "HARD" in said
