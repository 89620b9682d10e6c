"""The tree of a page: of a comparison, of several runs, of one that has taken no step."""

from __future__ import annotations

import json

import pytest

from benchmarks._synthetic_run import write_run
from megatron_stare.config import UserError
from megatron_stare.reporting.page.content import (
    at_bound,
    colours_of,
    content_of,
    enumerated,
    short,
)
from megatron_stare.reporting.page.runs import Run
from megatron_stare.reporting.summary import mean_runs, summarize_run


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    directory = tmp_path_factory.mktemp("comparison")
    seeds: dict = {"0": {}, "1": {}}
    for seed, arms in seeds.items():
        for arm in ("grpo_ds", "stare"):
            run = write_run(directory / f"seed{seed}" / arm, 40, loss=arm, seed=int(seed))
            arms[arm] = summarize_run(run, 0.3)
    summary = {"runs": mean_runs(seeds), "seeds": seeds}
    summary |= {"command": "make demo", "caveats": ["a toy"]}
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def test_a_comparison_has_means_findings_and_caveats(comparison):
    found = content_of([comparison])
    assert [arm["name"] for arm in found["arms"]] == ["GRPO-ds", "STARE"]
    assert [run["seed"] for run in found["runs"]] == ["0", "0", "1", "1"]
    assert set(found["lines"]["entropy"]["means"]) == {"GRPO-ds", "STARE"}
    assert found["bands"] == [[0.3, 0.225, 0.375]]
    assert found["caveats"] == ["a toy"] and found["about"]["commands"] == ["make demo"]
    assert len(found["findings"]) == 4
    row = next(row for row in found["table"]["rows"] if "pass@8" in row["label"])
    assert len(row["cells"][1]["each"]) == 2 and row["cells"][1]["half_width"]
    assert "GRPO-ds ends at" in found["lead"] and found["lead"].endswith("Seeds 0, 1.")


def test_an_unfinished_run_is_shown_up_to_its_last_step(comparison, tmp_path):
    for arm in ("grpo_ds", "stare"):
        write_run(tmp_path / "seed0" / arm, 4, loss=arm)
    (tmp_path / "config.yaml").write_text("loss:\n  target_entropy: 0.3\n")
    found = content_of([tmp_path])
    assert [arm["name"] for arm in found["arms"]] == ["GRPO-ds", "STARE"]
    assert "still training" in found["caveats"][0]


def test_arms_of_several_directories_have_distinct_names(comparison, tmp_path):
    write_run(tmp_path / "other", 5, loss="stare", seed=7)
    write_run(tmp_path / "third", 5, loss="clip_cov")
    found = content_of([comparison, tmp_path / "other", tmp_path / "third"])
    names = [arm["name"] for arm in found["arms"]]
    assert names[0] == "GRPO-ds" and names[3] == "clip cov"
    assert names[1] == f"STARE, {comparison}" and names[2] == f"STARE, {tmp_path / 'other'}"
    assert len({arm["colour"] for arm in found["arms"]}) == 4
    with pytest.raises(UserError, match="twice"):
        content_of([comparison, comparison])


def test_a_run_without_a_step_has_a_page(tmp_path):
    write_run(tmp_path, 0)
    found = content_of([tmp_path])
    assert found["lead"] == "No step was taken yet." and found["figures"] == []
    assert found["table"]["rows"] == [] and found["runs"][0]["rows"] == 0


def test_two_arms_keep_their_colours_and_others_differ():
    assert colours_of(["x", "STARE", "y", "GRPO-ds"]) == [2, 0, 3, 1]
    many = colours_of([f"arm{at}" for at in range(12)])
    assert len(set(many)) == 8, "then they repeat; the names stay distinct"
    assert enumerated(["a"]) == "a" and enumerated(["a", "b", "c"]) == "a, b and c"


def test_short_keeps_five_digits_and_every_kind():
    tree = {"a": [0.123456789, 2.0, 7], "b": ("x", None, True), "c": -123456.7}
    assert short(tree) == {"a": [0.12346, 2, 7], "b": ["x", None, True], "c": -123460.0}


def test_the_page_names_a_weight_at_its_bound(tmp_path):
    rows = [{"step": step, "weight_w": 2.0 if step > 2 else 1.9} for step in range(1, 11)]
    (tmp_path / "config.yaml").write_text("loss: {adaptive: true, w_max: 2.0}\n")
    [said] = at_bound([Run("STARE", "0", tmp_path, rows, {})])
    assert "loss.w_max=2 in 80% of the steps" in said
    assert at_bound([Run("STARE", "0", tmp_path, rows[:2], {})]) == [], "it never reaches the bound"
    (tmp_path / "config.yaml").write_text("loss: {adaptive: false, w_max: 2.0}\n")
    assert at_bound([Run("STARE", "0", tmp_path, rows, {})]) == [], "a fixed W has no bound"
    assert at_bound([Run("GRPO", "0", tmp_path / "none", rows, {})]) == []
