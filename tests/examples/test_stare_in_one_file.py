"""The teaching example: its loss equals the package's, and the script runs."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_stare.losses import compute
from tests.paths import ROOT

PATH = ROOT / "examples/stare_in_one_file.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stare_in_one_file", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("entropy", [0.2, 0.4])
def test_the_examples_loss_equals_the_packages(example: ModuleType, entropy: float) -> None:
    """Value and gradient, with the gate on and off."""
    dice = torch.Generator().manual_seed(1)
    log_prob = -3 * torch.rand(6, 9, generator=dice)
    mask = torch.rand(6, 9, generator=dice) < 0.8
    rewards = torch.tensor([1.0, 0.0, 0.0] * 2)
    advantage = (rewards - rewards.mean())[:, None].expand(6, 9)
    ours, theirs = (log_prob.clone().requires_grad_() for _ in range(2))
    settings = {"variant": "C2", "reweight_w": 1.4, "reweight_m": 0.7, "target_entropy": 0.3}
    expected = compute(
        "stare",
        {
            "log_prob": theirs,
            "advantages": advantage,
            "entropy": torch.full((6, 9), entropy),
            "response_mask": mask,
        },
        **settings,
    )
    found = example.stare_loss(ours, advantage, mask, 1.4, 0.7, entropy < 0.3)
    found.backward()
    expected.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert ours.grad is not None and ours.grad.abs().max() > 0


def test_the_gate_acts_below_the_target_and_grows(example: ModuleType) -> None:
    gate = example.Gate()
    for _ in range(30):
        gate.look(0.1)
    assert (gate.on, gate.w, gate.m) == (True, example.W_MAX, example.M_MIN)
    for _ in range(30):
        gate.look(0.5)
    assert (gate.on, gate.w, gate.m) == (False, 1.0, 1.0)


def test_the_example_runs(
    example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward is one that a policy earns after three supervised steps."""

    def even(response: str, label: str, metadata: dict[str, Any]) -> float:
        return float(len(response) % 2 == 0)

    monkeypatch.setattr(example, "mirror_grid_reward", even)
    history = example.main(["--steps", "2", "--cold-start-steps", "3"])
    assert len(history) == 2 and 0 < history[0] < 3.2
    said = capsys.readouterr().out
    assert "step   0  entropy" in said and "pass@8" in said


@pytest.mark.slow
def test_stare_keeps_the_entropy_that_grpo_ds_loses(example: ModuleType) -> None:
    """The task is real; the figures of docs/results.md are of the quickstart's 400 steps."""
    kept, lost = (example.main(["--loss", loss]) for loss in ("stare", "grpo_ds"))
    assert sum(lost[-20:]) / 20 < 0.15 < 0.2 < sum(kept[-20:]) / 20


def test_the_example_is_short() -> None:
    assert len(PATH.read_text().splitlines()) < 300
