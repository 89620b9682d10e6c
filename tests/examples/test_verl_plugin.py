"""STARE from verl's registry compared with verl's own loss, in the trainers' environment."""

from __future__ import annotations

import re

import pytest

from tests.examples.test_trl_grpo import run

pytestmark = pytest.mark.trainers


def test_with_weights_of_one_loss_and_gradient_are_verls() -> None:
    """69 tokens have a positive advantage and 32 a negative one: a tenth of them is 7 and 4."""
    pattern = r"(\w+) +loss (\S+)  gradient (\S+)  raised (\d+)  damped (\d+)"
    rows = {name: rest for name, *rest in re.findall(pattern, run("examples/verl_plugin.py"))}
    assert rows.keys() == {"vanilla", "stare_one", "stare_shut", "stare_open"}
    assert rows["stare_one"] == rows["stare_shut"] == rows["vanilla"]
    assert rows["stare_open"][2:] == ["7", "4"]
    assert rows["stare_open"][:2] != rows["vanilla"][:2]
