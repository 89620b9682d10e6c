"""The numbers of a run against a naive twin."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from megatron_stare.config import UserError
from megatron_stare.reporting import summary
from megatron_stare.reporting.logbook import Logbook


@pytest.mark.parametrize("steps", [1, 2, 7, 10, 25, 200])
def test_summary_agrees_with_numpy(tmp_path, steps):
    rng = random.Random(steps)
    entropy = [rng.uniform(0.1, 0.5) for _ in range(steps)]
    with Logbook(tmp_path) as book:
        book.write(0, {"eval/heldout_hard/avg_at_k": 0.1, "eval/heldout_hard/k": 8})
        for step, value in enumerate(entropy, start=1):
            row = {"entropy": value, "reward": value / 2, "seconds_total": 0.25}
            row |= {"weight_w": 1 + value, "gate": float(value < 0.3)}
            if step == steps:
                for name, avg in (("heldout_hard", 0.6), ("heldout_easy", 0.8)):
                    row |= {
                        f"eval/{name}/avg_at_k": avg,
                        f"eval/{name}/pass_at_k": 0.9,
                        f"eval/{name}/k": 16,
                    }
            book.write(step, row)
    found = summary.summarize_run(tmp_path, 0.3)
    tail = entropy[-math.ceil(steps / 10) :]
    half = np.array(entropy[-math.ceil(steps / 2) :])
    assert found["entropy_initial"] == entropy[0]
    assert found["entropy_final"] == pytest.approx(np.mean(tail))
    assert found["train_reward_final"] == pytest.approx(np.mean(tail) / 2)
    assert found["entropy_in_band_fraction"] == pytest.approx(np.mean(abs(half - 0.3) <= 0.075))
    assert found["weight_last_half"] == pytest.approx(1 + np.mean(half))
    assert found["gate_open_fraction"] == pytest.approx(np.mean(half < 0.3))
    assert (
        found["eval/heldout_hard/avg_at_k"],
        found["eval/heldout_hard/pass_at_k"],
        found["eval/heldout_easy/avg_at_k"],
    ) == (0.6, 0.9, 0.8)
    assert (found["eval/heldout_hard/k"], found["steps"], found["seconds"]) == (
        16,
        steps,
        pytest.approx(steps / 4),
    )


def test_a_run_without_steps_is_an_error(tmp_path):
    write = Logbook(tmp_path)
    write.close()
    with pytest.raises(UserError, match="no step with an entropy"):
        summary.summarize_run(tmp_path, 0.3)


def test_only_a_run_with_a_weight_has_a_gate(tmp_path):
    """Every objective's rows have the key, 0 where nothing acts by it."""
    with Logbook(tmp_path) as book:
        book.write(1, {"entropy": 0.3, "gate": 0.0})
    found = summary.summarize_run(tmp_path, 0.3)
    assert found["weight_last_half"] is found["gate_open_fraction"] is None


def test_every_evaluation_set_has_its_rows():
    """Sets have any name and number of samples; k is a letter where runs differ."""
    one = {"eval/sums/pass_at_k": 0.5, "eval/sums/avg_at_k": 0.25, "eval/sums/k": 4}
    rows = summary.table_rows([one])
    assert ("eval/sums/pass_at_k", "sums, pass@4", ".3f") in rows
    assert ("eval/sums/avg_at_k", "sums, avg@4", ".3f") in rows
    assert [key for key, *_ in summary.table_rows([{}]) if key.startswith("eval/")] == []
    labels = [label for _, label, _ in summary.table_rows([one, one | {"eval/sums/k": 8}])]
    assert "sums, pass@k" in labels
