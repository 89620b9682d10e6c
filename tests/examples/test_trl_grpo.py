"""STARE in TRL's GRPOTrainer, run for real in the trainers' own environment."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.conftest import TRAINERS_PYTHON
from tests.paths import ROOT

pytestmark = pytest.mark.trainers

# Plain GRPO, STARE with weights 1, and STARE with its gate closed, from one seed.
ALIKE = """
import sys, tempfile
import torch
from trl import GRPOTrainer
from examples.trl_grpo import StareTrainer, parts

ones = {"variant": "C2", "reweight_w": 1.0, "reweight_m": 1.0}
strong = {"variant": "C2", "reweight_w": 1.5, "reweight_m": 0.5}
weights = []
for kind, own in (
    (GRPOTrainer, {}),
    (StareTrainer, {"target_entropy": 99.0, "weights": ones}),
    (StareTrainer, {"target_entropy": 0.0, "weights": strong}),
    (StareTrainer, {"target_entropy": 99.0, "weights": strong}),
):
    with tempfile.TemporaryDirectory() as directory:
        trainer = kind(**parts(3, directory), **own)
        trainer.train()
    weights.append(torch.cat([one.detach().flatten() for one in trainer.model.parameters()]))
print("differences", *[float((one - weights[0]).abs().max()) for one in weights[1:]])
"""


def run(*arguments: str) -> str:
    done = subprocess.run(
        [str(TRAINERS_PYTHON), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_prints_entropy_and_chosen_tokens() -> None:
    """The gate opens when entropy falls below its target; a uniform start has ln 40 = 3.689."""
    out = run("examples/trl_grpo.py", "--steps", "12", "--target-entropy", "3.67")
    rows = re.findall(r"entropy (\S+)  raised (\d+)  damped (\d+)", out)
    assert len(rows) == 12 and float(rows[0][0]) == pytest.approx(3.68, abs=0.02)
    for entropy, raised, damped in rows:
        open_gate = float(entropy) < 3.6695
        shut_gate = float(entropy) > 3.6705
        assert open_gate <= (int(raised) > 0 and int(damped) > 0)
        assert shut_gate <= (int(raised) == int(damped) == 0)
    assert any(int(raised) for _, raised, _ in rows) and not all(int(r) for _, r, _ in rows)


def test_without_weights_the_update_is_trls_bit_for_bit() -> None:
    found = run("-c", ALIKE).split("differences ")[1].split()
    ones, shut, strong = map(float, found)
    assert ones == shut == 0.0 and strong > 1e-4
