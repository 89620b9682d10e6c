"""Two checkouts compared by their metrics, and figures that differ by one bit."""

import json
import math
import sys

import pytest

from tools import same_bits


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_one_bit_is_a_difference_and_measured_seconds_are_not(tmp_path):
    row = {"step": 3, "loss": 0.25, "entropy": math.nan, "seconds_total": 1.0}
    old = write(tmp_path / "old", [row])
    same = write(tmp_path / "same", [row | {"seconds_total": 2.0}])
    other = write(tmp_path / "other", [row | {"loss": math.nextafter(0.25, 1.0)}])
    assert same_bits.difference(old, same) == ""
    assert "step 3: 1 figures differ: {'loss': (0.25, 0.25000000000000006)}" in (
        same_bits.difference(old, other)
    )


def test_a_key_or_a_step_that_is_not_written_is_a_difference(tmp_path):
    old = write(tmp_path / "old", [{"step": 1, "loss": 0.0}, {"step": 2, "loss": 0.0}])
    shorter = write(tmp_path / "shorter", [{"step": 1, "loss": 0.0}])
    fewer = write(tmp_path / "fewer", [{"step": 1}, {"step": 2, "loss": 0.0}])
    assert same_bits.difference(old, shorter).endswith("1 lines in place of 2")
    assert "{'loss': (0.0, None)}" in same_bits.difference(old, fewer)


@pytest.mark.slow
def test_a_checkout_has_its_own_bits(tmp_path, monkeypatch, capsys):
    settings = ["cold_start.steps=2", "evaluation.eval_interval=0", "compare.run=[stare]"]
    runs = ["--steps", "2", "--runs", "resumed", "fully_async", "--directory", str(tmp_path)]
    command = ["same_bits", str(same_bits.HERE), *runs, "--set", *settings]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        same_bits.main()
    assert capsys.readouterr().out == "resumed: identical\nfully_async: identical\n"
    assert ended.value.code == 0
