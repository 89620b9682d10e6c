"""The grade command: order, streaming, bad rows, atomic output, summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.__main__ import main

ROWS: list[dict[str, Any]] = [
    {"response": "so \\boxed{1/2}", "label": "0.5", "id": 7, "extra": {"kept": [1]}},
    {"response": "Answer: 4", "label": 5},
    {"response": "\\boxed{\\text{\u4e2d}} \ud800", "reward_model": {"ground_truth": "3"}},
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(source: Path, target: Path, *overrides: str) -> int:
    return main(
        ["grade", str(source), "--output", str(target), "scoring.verifier_processes=1", *overrides]
    )


def test_rows_come_back_in_order_with_their_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = write(tmp_path / "in.jsonl", ROWS * 900), tmp_path / "out.jsonl"
    assert run(source, target) == 0
    found = read(target)
    assert [
        {key: row[key] for key in given} for row, given in zip(found, ROWS * 900, strict=True)
    ] == ROWS * 900
    verdicts = [(row["reward"], row["verdict"], row["extracted"]) for row in found]
    assert (
        verdicts
        == [(1.0, "correct", "1/2"), (0.0, "wrong", "4"), (0.0, "wrong", "\\text{\u4e2d}")] * 900
    )
    out = capsys.readouterr().out
    assert "rows: 2700 (900 correct, 1800 wrong, 0 unverifiable); 0 skipped" in out
    assert "mean reward: 0.3333 over 2700 verified rows" in out and "killed or crashed: 0" in out


def test_a_function_of_verl_gets_the_column_that_names_the_data_set(tmp_path: Path) -> None:
    row = {"response": "4", "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 1}}
    source = write(
        tmp_path / "in.jsonl", [row | {"data_source": name} for name in ("sums", "walks")]
    )
    target = tmp_path / "out.jsonl"
    assert run(source, target, "scoring.reward=tests.scoring.verifier_cases.verl_sums") == 0
    assert [row["reward"] for row in read(target)] == [1.0, 0.0]


def test_labels_are_those_that_a_run_reads(tmp_path: Path) -> None:
    """Lists, and true and false, are JSON text."""
    rows = [
        {"response": "\\boxed{[1, 3]}", "label": [1, 3]},
        {"response": "\\boxed{true}", "label": True},
    ]
    source, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert run(source, target) == 0
    assert [row["reward"] for row in read(target)] == [1.0, 1.0]


def test_neighbouring_responses_to_a_prompt_are_judged_together(tmp_path: Path) -> None:
    """Groups of three do not divide a batch of 1,024 rows."""
    rows = [
        {"response": "x" * n, "label": "", "prompt": f"prompt {number}"}
        for number in range(700)
        for n in (1, 3, 2)
    ]
    source, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert run(source, target, "scoring.reward=tests.scoring.verifier_cases.longest") == 0
    assert [row["reward"] for row in read(target)] == [0.0, 1.0, 0.0] * 700


def test_unverifiable_rows_have_no_reward_and_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = "tests.scoring.verifier_cases"
    source = write(
        tmp_path / "in.jsonl",
        [{"response": word, "label": "yes"} for word in ("yes", "exit", "no")],
    )
    assert run(source, tmp_path / "out.jsonl", f"scoring.reward={cases}.obedient") == 0
    rows = read(tmp_path / "out.jsonl")
    assert [(row["reward"], row["verdict"]) for row in rows] == [
        (1.0, "correct"),
        (None, "unverifiable"),
        (0.0, "wrong"),
    ]
    assert "exit code 3" in rows[1]["reason"] and "reason" not in rows[0]
    out = capsys.readouterr().out
    assert "mean reward: 0.5000 over 2 verified rows" in out and "killed or crashed: 2" in out


def test_several_rewards_show_their_parts(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", ROWS[:1])
    weights = "scoring.rewards={math: 1, language: 0.5}"
    assert run(source, tmp_path / "out.jsonl", weights) == 0
    [row] = read(tmp_path / "out.jsonl")
    assert row["reward"] == 1.5 and row["reward_parts"] == {"math": 1.0, "language": 1.0}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ({"label": "1"}, "field 'response' is missing"),
        ({"response": 1, "label": "1"}, "field 'response' is not a string"),
        ({"response": "1"}, "neither 'label' nor reward_model.ground_truth"),
        ({"response": "1", "label": None}, "data.label_key names the field of the answer"),
        ({"response": "1", "label": "1", "metadata": 3}, "field 'metadata' is int"),
    ],
)
def test_bad_rows_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: Any, words: str
) -> None:
    source, target = write(tmp_path / "in.jsonl", [ROWS[0], "", row]), tmp_path / "out.jsonl"
    target.write_text("an older result\n")
    assert run(source, target, "scoring.reward=language") == 2
    error = capsys.readouterr().err
    assert f"{source}, row 3: " in error and words in error and error.count("\n") == 1
    assert target.read_text() == "an older result\n", "nothing half done"
    assert run(source, target, "scoring.reward=language", "data.on_bad_row=skip") == 0
    assert len(read(target)) == 1 and "1 skipped" in capsys.readouterr().out
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("absent.jsonl", "out.jsonl"), "does not exist"),
        (("in.jsonl", "no/out.jsonl"), "its directory must exist"),
        (("in.jsonl", "out.jsonl", "scoring.overlong_filter=true"), "need token counts"),
        (("in.jsonl", "out.jsonl", "scoring.shaping=retool"), "counts an episode's turns"),
        (("in.jsonl", "out.jsonl", "scoring.reward=maths"), "did you mean 'math'"),
    ],
)
def test_ungradable_input_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    write(tmp_path / "in.jsonl", ROWS)
    assert run(tmp_path / arguments[0], tmp_path / arguments[1], *arguments[2:]) == 2
    assert words in capsys.readouterr().err
