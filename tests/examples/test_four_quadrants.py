"""The theory's example: its formula is the derivative, and the package's sensitivity."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console

from megatron_stare.losses.compute import _sensitivity
from tests.paths import ROOT


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = ROOT / "examples/four_quadrants.py"
    spec = importlib.util.spec_from_file_location("four_quadrants", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_g_equals_the_change_of_entropy_by_a_step_and_the_packages_value(
    example: ModuleType,
) -> None:
    logits = 2 * torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    g, before = example.sensitivity(logits), example.entropy_of(logits)
    for token in range(7):
        for advantage in (1.0, -0.5):
            moved = example.entropy_of(example.step_on(logits, token, advantage, 1e-7)) - before
            assert float(moved) / 1e-7 == pytest.approx(advantage * float(g[token]), abs=1e-6)
    log_TV = logits.log_softmax(-1).expand(7, 7)
    theirs = _sensitivity(log_TV, -log_TV.diagonal(), before.expand(7))
    torch.testing.assert_close(g, theirs)
    assert float((logits.softmax(-1) * g).sum()) == pytest.approx(0, abs=1e-12), "neutrality"


def test_the_four_quadrants_are_every_token_once(example: ModuleType) -> None:
    dice = torch.Generator().manual_seed(2)
    advantage, g = (torch.randn(40, generator=dice) for _ in range(2))
    masks = example.quadrants(advantage, g)
    assert torch.stack(list(masks.values())).sum(0).eq(1).all()
    for up, rises in masks:
        inside = (advantage * g)[masks[up, rises]]
        assert ((inside > 0) == (up == rises)).all(), "the sign table"


def test_at_the_critical_weight_the_sum_is_zero(example: ModuleType, tmp_path: Path) -> None:
    dice = torch.Generator().manual_seed(3)
    surprisal = 4 * torch.rand(60, generator=dice, dtype=torch.float64)
    advantage = torch.randn(60, generator=dice, dtype=torch.float64)
    g = surprisal - 2.5
    found = example.criticality(Console(), advantage, g, surprisal)
    chosen = example.one.top(surprisal, advantage > 0)
    weight = torch.where(chosen, found["critical_weight"], 1.0).double()
    assert float((weight * advantage * g).sum()) == pytest.approx(0, abs=1e-5)
    curve = {"surprisal": [0.5, 3.0], "g": [-0.1, 0.1]}
    example.draw(tmp_path / "plot.png", curve, (advantage, g, surprisal))
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_notebook_runs_whole(example: ModuleType, tmp_path: Path) -> None:
    found = example.main(["--output", str(tmp_path), "--cold-start-steps", "200"])
    assert found["left"] < 0.5 and found["rising_share"] > 0.5


def test_on_the_toy_the_critical_weight_holds_entropy(example: ModuleType) -> None:
    """The change is measured, by a step in float64."""
    logits = -0.7 * torch.arange(10, dtype=torch.float64)
    reward = (torch.arange(10) % 2 == 0).double()
    weight, plain, balanced = example.toy_balance(logits, reward)
    assert weight > 1 and plain < -0.01 and abs(balanced) < 1e-4 * abs(plain)
