"""`rollouts`: what a run trained on and what an evaluation sampled, as rows of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.__main__ import main
from megatron_stare.config import dump
from tests.small_run import rows_of, small_config


def rows(capsys: pytest.CaptureFixture[str], *words: Any) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["rollouts", *map(str, words)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]]


def refused(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    assert main(["rollouts", *map(str, words)]) == 2
    return capsys.readouterr().err


def check_going_back(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As after --load step_00000001: step 2 is one that the run went back from."""
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[0] + "\n")
    assert rows(capsys, run) == rows(capsys, run, "--step", 1)
    start = rows(capsys, run, "--evaluation", "held", "--step", 0)
    assert rows(capsys, run, "--evaluation", "held") == start


def test_a_run_and_its_evaluations_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(
        tmp_path,
        "train.num_rollout=2",
        "scoring.function_timeout=20",
        f"evaluation.eval_data.held={tmp_path / 'problems.jsonl'}",
        "evaluation.n_samples_per_eval_prompt=2",
        "evaluation.eval_at_start=true",
        "evaluation.eval_interval=2",
    )
    dump(config, tmp_path / "run.yaml")
    run = tmp_path / "run"
    assert main(["train", str(tmp_path / "run.yaml")]) == 0

    trained = rows(capsys, run)
    assert trained == rows(capsys, run, "--step", 2) != rows(capsys, run, "--step", 1)
    places = [(row["step"], row["group"], row["sample"]) for row in trained]
    assert places == [(2, group, sample) for group in range(4) for sample in range(4)]
    for row in trained:
        assert row["reward"] == float(sum(row["response"].encode()) % 2 == 0)
        assert row["verdict"] == ("correct" if row["reward"] else "wrong")
        assert row["advantage"] * (row["reward"] - 0.5) > 0 and row["weight_version"] == 1
        assert str(eval(row["prompt"][:-1])) == row["label"] and row["response_length"] <= 12

    (first, last) = rows_of(config)
    for step, metrics, name in ((0, first, "eval_start"), (2, last, "eval")):
        held = rows(capsys, run, "--evaluation", "held", "--step", step)
        assert [(row["index"], row["sample"]) for row in held] == [
            (place, sample) for place in range(36) for sample in range(2)
        ]
        right = sum(row["verdict"] == "correct" for row in held)
        assert right / 72 == pytest.approx(metrics[f"{name}/held/avg_at_k"])
        assert {row["set"] for row in held} == {"held"} and held[5]["metadata"] == {}
    assert held == rows(capsys, run, "--evaluation", "held")

    # a second evaluation of the same step replaces the first one, and `grade` judges its rows
    assert main(["evaluate", str(run), "evaluation.n_samples_per_eval_prompt=1"]) == 0
    output = tmp_path / "held.jsonl"
    capsys.readouterr()
    assert main(["rollouts", str(run), "--evaluation", "held", "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"written: {output}\n"
    again = [json.loads(line) for line in output.read_text().splitlines()]
    assert again == held[::2]
    reward = "scoring.reward=tests.rewards.even_characters"
    assert main(["grade", str(output), "--output", str(tmp_path / "graded.jsonl"), reward]) == 0
    assert (tmp_path / "graded.jsonl").read_text() == output.read_text()

    check_going_back(run, capsys)
    assert "step 3 has no record" in refused(capsys, run, "--step", 3)
    assert "(there: held)" in refused(capsys, run, "--evaluation", "aime24")
    named = refused(capsys, run, "--evaluation", "held", "--step", 1)
    assert "--step 1: held was evaluated after the steps 0, 2; choose one" in named
    assert "No such file" in refused(capsys, run, "--output", tmp_path / "none/rows.jsonl")
    assert "(there: none)" in refused(capsys, tmp_path, "--evaluation", "held")
    assert "(there: none)" in refused(capsys, tmp_path)


def test_text_without_an_encoding_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A label with half of a surrogate pair, which JSON can hold, and letters of another script."""
    data = tmp_path / "held.jsonl"
    labels = ["\ud800", "\u4e2d\u2028"]
    data.write_text(
        "".join(json.dumps({"prompt": f"{n}=", "label": x}) + "\n" for n, x in enumerate(labels))
    )
    config = small_config(
        tmp_path, f"evaluation.eval_data.held={data}", "evaluation.n_samples_per_eval_prompt=1"
    )
    dump(config, tmp_path / "run.yaml")
    assert main(["evaluate", str(tmp_path / "run.yaml")]) == 0
    run = tmp_path / "run"
    assert [row["label"] for row in rows(capsys, run, "--evaluation", "held")] == labels
    problems = (run / "evaluation/problems.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert [json.loads(line)["label"] for line in problems] == labels
    assert "\u4e2d" in problems[1]
