"""As many steps and rollouts as a page has room for, and how many there were."""

from __future__ import annotations

from benchmarks._synthetic_run import write_run
from megatron_stare.reporting.page import content
from megatron_stare.reporting.page.runs import read_sources


def test_steps_and_rollouts_stay_within_their_limits(tmp_path, monkeypatch):
    write_run(tmp_path, 30, every=2, tokens=50, rollouts=2)
    runs = read_sources([tmp_path])[0].runs
    (whole,) = content.inside_of(runs)
    assert whole["recorded"] == 15 == len(whole["steps"])
    assert len(whole["rollouts"]) == 30 == whole["sampled"]
    monkeypatch.setattr(content, "MOST_STEPS", 4)
    monkeypatch.setattr(content, "MOST_TOKENS", 150)
    (some,) = content.inside_of(runs)
    assert [step["step"] for step in some["steps"]] == [2, 12, 20, 30]
    assert [each["step"] for each in some["rollouts"]] == [2, 30, 30], (
        "newest first, then the oldest"
    )
    assert some["sampled"] == 8
    monkeypatch.setattr(content, "MOST_TOKENS", 1)
    assert len(content.inside_of(runs)[0]["rollouts"]) == 1, "one is always there"


def test_steps_that_a_run_went_back_from_are_not_on_its_page(tmp_path):
    write_run(tmp_path, 6, every=2, tokens=50, rollouts=2)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    (found,) = content.inside_of(read_sources([tmp_path])[0].runs)
    assert found["recorded"] == 1 and [step["step"] for step in found["steps"]] == [2]


def test_a_run_without_diagnostics_has_no_rollouts_on_its_page(tmp_path):
    write_run(tmp_path, 2)
    (found,) = content.inside_of(read_sources([tmp_path])[0].runs)
    assert found == {"recorded": 0, "steps": [], "rollouts": [], "sampled": 0}


def test_every_prefix_of_the_order_is_spread_evenly():
    assert content._halving(5) == [4, 0, 2, 1, 3]
    assert content._halving(1) == [0] and content._halving(0) == []
    assert sorted(content._halving(100)) == [*range(100)]


def test_spaced_keeps_both_ends():
    assert content.spaced([*range(100)], 4) == [0, 33, 66, 99]
    assert content.spaced([1, 2], 4) == [1, 2] and content.spaced([1, 2, 3], 1) == [3]
