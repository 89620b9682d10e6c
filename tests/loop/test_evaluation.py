"""Evaluation: repeated rows, settings per set, what is one answer,
and resuming after kill -9 with the same numbers.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_stare.__main__ import main
from megatron_stare.collect.journal import MAGIC
from megatron_stare.config import Config, ScoringConfig, UserError, dump, load, override
from megatron_stare.loop.evaluation import answer_classes, build_sets
from megatron_stare.reporting.problem_scores import responses_directory
from megatron_stare.scoring.judge import Judge
from megatron_stare.scoring.verdict import Sample
from tests.paths import ROOT
from tests.small_run import small_config
from tests.tiny_models import byte_tokenizer


def write(path, rows):
    path.write_text(
        "".join(json.dumps({"prompt": prompt, "label": label}) + "\n" for prompt, label in rows)
    )
    return path


def test_repeated_rows_are_one_problem(tmp_path):
    problems = [(f"{n} + 1 =", str(n + 1)) for n in range(3)]
    path = write(tmp_path / "aime.jsonl", [*problems * 32, ("2 + 1 =", "another label")])
    config = override(
        Config(),
        [
            f"evaluation.eval_data.aime={path}",
            "evaluation.per_set.aime.n_samples=32",
            "data.deduplicate=exact",
        ],
    )
    (one,), lines = build_sets(config, byte_tokenizer())
    assert [prompt.text for prompt in one.prompts] == ["0 + 1 =", "1 + 1 =", "2 + 1 =", "2 + 1 ="]
    assert [prompt.label for prompt in one.prompts] == ["1", "2", "3", "another label"]
    assert (one.copies, one.samples) == ((32, 32, 32, 1), 32)
    assert len(lines) == 1 and "97 rows are 4 problems" in lines[0] and "32 samples" in lines[0]


def test_settings_of_one_set(tmp_path):
    path = write(tmp_path / "a.jsonl", [("1 + 1 =", "2")])
    files = [f"evaluation.eval_data.a={path}", f"evaluation.eval_data.b={path}"]
    config = override(
        Config(),
        [*files, "evaluation.per_set.a.n_samples=3", "evaluation.per_set.a.temperature=0.6"],
    )
    dump(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config
    (a, b), lines = build_sets(config, byte_tokenizer())
    assert (a.samples, a.params.temperature, a.params.top_p) == (3, 0.6, 1.0)
    assert (b.samples, b.params.temperature, b.params.stop) == (8, 1.0, ())
    ended = override(config, ["rollout.stop=[User, </answer>]"])
    assert build_sets(ended, byte_tokenizer())[0][1].params.stop == ("User", "</answer>")
    assert a.seed != b.seed and not lines
    more = override(config, ["evaluation.per_set.a.n_samples=5"])
    hotter = override(config, ["evaluation.per_set.a.temperature=0.7"])
    marks = [
        build_sets(one, byte_tokenizer())[0][0].fingerprint("w") for one in (config, more, hotter)
    ]
    assert marks[0] == marks[1] != marks[2]
    assert a.fingerprint("w") != a.fingerprint("other weights")


def test_greedy_sets_are_sampled_once_and_say_so(tmp_path):
    path = write(tmp_path / "a.jsonl", [("1 + 1 =", "2")])
    files = [f"evaluation.eval_data.{name}={path}" for name in "abcd"]
    settings = [
        "evaluation.eval_temperature=0",
        "evaluation.per_set.b.n_samples=1",
        "evaluation.per_set.c.temperature=0.6",
        "evaluation.per_set.c.top_k=20",
        "evaluation.per_set.d.top_k=1",
        "evaluation.per_set.d.temperature=1.0",
    ]
    sets, lines = build_sets(override(Config(), [*files, *settings]), byte_tokenizer())
    assert [one.samples for one in sets] == [1, 1, 8, 1]
    assert [(one.params.temperature, one.params.top_k) for one in sets] == [
        (0.0, 0),
        (0.0, 0),
        (0.6, 20),
        (1.0, 1),
    ]
    assert [line.split(":")[0] for line in lines] == ["a", "d"]
    assert all("8 samples" in line and "sampled once" in line for line in lines)
    unset = override(Config(), [*files, *settings, "evaluation.per_set.c.temperature=null"])
    assert build_sets(unset, byte_tokenizer())[0][2].params.temperature == 0


@pytest.mark.parametrize(
    ("setting", "off"), [("eval_interval=5", "set it to 0"), ("eval_at_start=true", "to false")]
)
def test_an_evaluation_without_sets_is_said(setting, off):
    config = override(Config(), [f"evaluation.{setting}"])
    sets, (line,) = build_sets(config, byte_tokenizer())
    assert not sets and line.startswith(f"evaluation.{setting} evaluates nothing")
    assert "evaluation.eval_data.<name>=" in line and line.endswith(off)
    assert build_sets(Config(), byte_tokenizer()) == ([], [])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["evaluation.per_set.a.n_samples=4"], "not a set of evaluation.eval_data"),
        (
            ["evaluation.eval_data.a=x", "evaluation.per_set.a.top_p=2"],
            "evaluation.per_set.a.top_p=2",
        ),
        (["evaluation.eval_data.a=x", "evaluation.per_set.a.n_samples=-1"], "out of range"),
        (["evaluation.eval_data.a=x", "evaluation.per_set.a.n_samples=0"], "lie in [1"),
        (["evaluation.eval_data.a=x", "evaluation.per_set.a.top_p=0"], "lie in (0"),
        (["evaluation.eval_data.a=x", "evaluation.per_set.a.top_k=-1"], "lie in [0"),
        (["evaluation.eval_temperature=-0.1"], "evaluation.eval_temperature=-0.1"),
        (["evaluation.eval_top_k=-1"], "evaluation.eval_top_k=-1"),
        (["evaluation.eval_data.a=x", "evaluation.per_set.a.samples=4"], "per_set.a.samples"),
        (["evaluation.reflection_words=[wait,'']"], "empty word"),
    ],
)
def test_bad_settings_are_refused(overrides, words):
    with pytest.raises(UserError) as caught:
        override(Config(), overrides)
    assert words in str(caught.value)


@pytest.mark.parametrize("extraction", ["any", "boxed", "answer", "tag"])
def test_equal_answers_are_one(extraction):
    scoring = ScoringConfig(extraction=extraction, verifier_processes=1, verifier_timeout=60)
    form = {"answer": "Answer: {}", "tag": "<answer>{}</answer>"}.get(extraction, "\\boxed{{{}}}")
    written = ["1/2", "3", "\\frac{1}{2}", "3.0", "0.25", "\\frac14", "no", None, " 3"]
    responses = [form.format(text) if text else "I give up" for text in written]
    if extraction == "any":
        responses[7] = ""
    judge = Judge(scoring)
    try:
        found = [
            judge.verdicts([Sample(text, label) for text in responses]) for label in ("0.5", "7")
        ]
        classes = answer_classes(found, ["math"] * len(found), judge, scoring)
    finally:
        judge.close()
    answers, given = classes[0]
    assert given == [0, 1, 0, 1, 2, 2, 3, None, 1]
    assert answers == ["1/2", "3", "0.25", "no"]
    assert classes[1][1] == [0, 1, 2, 3, 4, 5, 6, None, 1], "nothing right: compared as text"


def test_other_rewards_compare_texts():
    scoring = ScoringConfig(reward="multiple_choice")
    judge = Judge(scoring)
    try:
        verdicts = [
            judge.verdicts(
                [Sample(f"\\boxed{{{text}}}", "B") for text in ("B", "(B)", "C", "(C)", "D")]
            )
        ]
        (classes,) = answer_classes(verdicts, ["multiple_choice"], judge, scoring)
        assert classes[1] == [0, 0, 1, 1, 2]
    finally:
        judge.close()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    held = tmp_path / "problems.jsonl"
    config = small_config(
        tmp_path,
        f"evaluation.eval_data.held={held}",
        "evaluation.n_samples_per_eval_prompt=4",
        "rollout.engine_batch_size=4",
        "rollout.rollout_max_response_len=24",
    )
    dump(config, tmp_path / "recipe.yaml")
    return tmp_path / "recipe.yaml"


def evaluated(recipe: Path, directory: Path) -> tuple[dict, list[dict]]:
    assert main(["evaluate", str(recipe), f"run.dir={directory}"]) == 0
    rows = (directory / "evaluation/problems.jsonl").read_text().splitlines()
    return json.loads((directory / "evaluation.json").read_text()), [
        json.loads(row) for row in rows
    ]


def frames_in(directory: Path) -> int:
    return sum(
        file.read_bytes().count(MAGIC) for file in directory.glob("evaluation/*/*/step_*.frames")
    )


@pytest.mark.slow
def test_a_killed_evaluation_continues(tmp_path: Path, recipe: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "megatron_stare",
        "evaluate",
        str(recipe),
        f"run.dir={tmp_path / 'killed'}",
    ]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        while frames_in(tmp_path / "killed") < 3:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = frames_in(tmp_path / "killed")
    assert 3 <= before < 36 * 4
    with next((tmp_path / "killed").glob("evaluation/*/*/step_*.frames")).open("ab") as file:
        file.write(MAGIC + b"12")  # as a kill in the midst of a frame leaves it
    again = evaluated(recipe, tmp_path / "killed")
    assert again == evaluated(recipe, tmp_path / "whole")
    assert frames_in(tmp_path / "killed") == 36 * 4 + 1, "what was there was not sampled again"
    numbers, problems = again
    assert len(problems) == numbers["eval/held/problems"] == 36
    assert (
        0
        < numbers["eval/held/avg_at_k_low"]
        < numbers["eval/held/avg_at_k"]
        < numbers["eval/held/avg_at_k_high"]
    )
    assert sum(row["correct"] for row in problems) == pytest.approx(
        numbers["eval/held/avg_at_k"] * 36 * 4
    )


def test_a_greedy_evaluation(tmp_path: Path, recipe: Path, capsys) -> None:
    """One response to each problem, the same under any seed; top_k alone still asks for four.
    Responses stay to be read, unless the run records nothing.
    """
    seeds = []
    for seed in (0, 1):
        command = ["evaluate", str(recipe), f"run.dir={tmp_path}/greedy{seed}", f"run.seed={seed}"]
        assert main([*command, "evaluation.eval_temperature=0"]) == 0
        rows = (tmp_path / f"greedy{seed}/evaluation/problems.jsonl").read_text().splitlines()
        seeds.append([json.loads(row) for row in rows])
        assert frames_in(tmp_path / f"greedy{seed}") == 36
    assert seeds[0] == seeds[1]
    assert "4 samples of a problem would be one and the same" in capsys.readouterr().out
    arguments = ["evaluate", str(recipe), f"run.dir={tmp_path}/few", "evaluation.eval_top_k=2"]
    assert main([*arguments, "run.record=none"]) == 0
    assert frames_in(tmp_path / "few") == 36 * 4
    assert responses_directory(tmp_path / "greedy0", 0).is_dir()
    assert not responses_directory(tmp_path / "few", 0).exists()


def test_a_second_evaluation_samples_only_new_rows(tmp_path: Path, recipe: Path) -> None:
    first, _ = evaluated(recipe, tmp_path / "run")
    assert frames_in(tmp_path / "run") == 36 * 4
    arguments = [
        "evaluate",
        str(recipe),
        f"run.dir={tmp_path / 'run'}",
        "evaluation.per_set.held.n_samples=5",
    ]
    assert main(arguments) == 0
    assert frames_in(tmp_path / "run") == 36 * 5
    numbers = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert numbers["eval/held/k"] == 5
    assert 0 <= numbers["eval/held/avg_at_k"] * 5 - first["eval/held/avg_at_k"] * 4 <= 1, (
        "one sample more each"
    )
