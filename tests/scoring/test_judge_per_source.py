"""scoring.per_source: every row is judged by the reward of its data set."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.__main__ import main
from megatron_stare.config import Config, UserError, dump, override
from megatron_stare.loop.evaluation import answer_classes
from megatron_stare.records import Prompt, Rollout
from megatron_stare.scoring.judge import Judge, judgement_metrics
from megatron_stare.scoring.verdict import Sample
from tests.small_run import rows_of, small_config

SETTINGS = (
    "scoring.reward=per_source",
    "scoring.per_source={sums: math, walks: tests.scoring.verifier_cases.half}",
    "scoring.verifier_processes=1",
)


@pytest.fixture
def judge() -> Any:
    with contextlib.closing(Judge(override(Config(), SETTINGS).scoring)) as made:
        yield made


def pair(source: str, text: str) -> tuple[Prompt, Rollout]:
    metadata = {"data_source": source} if source else {}
    rollout = Rollout((1,), (0.0,), (1,), status="completed", weight_version=0, text=text)  # type: ignore[arg-type]
    return Prompt(0, (1,), "4", metadata=metadata), rollout  # type: ignore[arg-type]


def test_each_row_has_the_verdict_of_its_data_sets_reward(judge: Judge) -> None:
    right, half, none, wrong, other, unnamed = judge.judge(
        [
            pair("sums", "\\boxed{4}"),
            pair("walks", "\\boxed{4}"),
            pair("sums", "I give up"),
            pair("sums", "\\boxed{5}"),
            pair("songs", "\\boxed{4}"),
            pair("", "\\boxed{4}"),
        ]
    )
    assert (right.reward, right.verdict) == (1.0, "correct")
    assert right.reward_parts == {"per_source": 1.0, "per_source/sums": 1.0}
    assert (half.reward, half.reward_parts["per_source/walks"]) == (0.5, 0.5)
    assert (wrong.reward, wrong.verdict) == (0.0, "wrong")
    # `half` extracts nothing from any response: only math can miss an answer.
    assert [one.answered for one in (right, half, none, wrong)] == [True, True, False, True]
    for one in (other, unnamed):
        assert (one.reward, one.verdict, one.loss_mask.tolist()) == (None, "unverifiable", [0])
    metrics = judgement_metrics([right, half, none, wrong])
    assert metrics["reward/per_source/sums"] == pytest.approx(1 / 3)
    assert metrics["reward/per_source/walks"] == 0.5
    (verdict,) = judge.verdicts([Sample("4", "4", {"data_source": "songs"})])
    assert "scoring.per_source has no 'songs'" in verdict.reason
    assert judge.scoring.deciding({"data_source": ["sums"]}) == "", "a list is not a name"


def test_it_is_summed_with_rewards_of_all_rows_and_shaped() -> None:
    weights = ("scoring.rewards={per_source: 2, format: 0.5}", "scoring.format_pattern=boxed")
    settings = override(Config(), [*SETTINGS, *weights]).scoring
    with contextlib.closing(Judge(settings)) as made:
        (one,) = made.judge([pair("walks", "\\boxed{4}")])
    assert one.reward == 1.5
    assert one.reward_parts == {"per_source": 0.5, "format": 1.0, "per_source/walks": 0.5}
    settings = override(Config(), [*SETTINGS, "scoring.shaping=signed"]).scoring
    with contextlib.closing(Judge(settings)) as made:
        (one,) = made.judge([pair("sums", "\\boxed{5}")])
    assert (one.reward, one.reward_parts["per_source/sums"]) == (-1.0, 0.0)


def test_the_answers_of_a_data_set_are_compared_by_its_reward(judge: Judge) -> None:
    texts = [f"\\boxed{{{text}}}" for text in ("4", "0.5", "1/2")]
    found = [
        judge.verdicts([Sample(text, "4", {"data_source": source}) for text in texts])
        for source in ("walks", "sums")
    ]
    rewards = [judge.scoring.deciding({"data_source": source}) for source in ("walks", "sums")]
    classes = answer_classes(found, rewards, judge, judge.scoring)
    assert classes[0][1] == [None, None, None], "`half` extracts nothing"
    assert classes[1][1] == [0, 1, 1], "1/2 is 0.5"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["scoring.reward=per_source"], "scoring.reward=per_source needs scoring.per_source; give"),
        (["scoring.per_source={a: math}"], "has no effect without scoring.reward=per_source; set"),
        (["scoring.reward=per_source", "scoring.per_source={a: per_source}"], "has itself"),
        (["scoring.reward=per_source", "scoring.per_source={a: judge}"], "needs a language model"),
        (["scoring.reward=per_source", "scoring.per_source={a: episode}"], "needs agents.fun"),
    ],
)
def test_impossible_settings_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        override(Config(), overrides)


def test_an_unknown_reward_of_a_data_set_is_refused() -> None:
    settings = override(Config(), ["scoring.reward=per_source", "scoring.per_source={a: maths}"])
    with pytest.raises(UserError, match="'maths' is unknown; did you mean 'math'"):
        Judge(settings.scoring)


def test_a_mixture_trains_and_is_evaluated_and_a_row_without_a_reward_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sums, walks, held = (tmp_path / f"{name}.jsonl" for name in ("sums", "walks", "held"))
    rows = [{"prompt": f"{a}+{a}=", "label": "1"} for a in range(6)]
    named = [row | {"kind": "sums", "data_source": "unused"} for row in rows]
    sums.write_text("".join(json.dumps(row) + "\n" for row in named))
    nested = [row | {"metadata": {"kind": "walks"}} for row in rows]
    walks.write_text("".join(json.dumps(row) + "\n" for row in nested))
    held.write_text(json.dumps(named[0]) + "\n" + json.dumps(nested[1]) + "\n")
    config = small_config(
        tmp_path,
        "data.prompt_data=",
        f"data.sources={{{sums}: 1, {walks}: 1}}",
        "data.source_key=kind",
        f"evaluation.eval_data.held={held}",
        "evaluation.eval_interval=0",
        "scoring.reward=per_source",
        "scoring.per_source={sums: tests.rewards.even_characters, walks: format}",
        "scoring.format_pattern='[a-m]'",
        "scoring.verifier_processes=1",
    )
    recipe = tmp_path / "recipe.yaml"
    dump(config, recipe)
    assert main(["train", str(recipe), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "verifier format: " in said and "verifier tests.rewards.even_characters: " in said
    assert main(["train", str(recipe)]) == 0
    for row in rows_of(config):
        parts = [row[f"reward/per_source/{name}"] for name in ("sums", "walks")]
        assert all(0 <= part <= 1 for part in parts)
        assert min(parts) <= row["reward/per_source"] <= max(parts)
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    with walks.open("a") as file:
        file.write(json.dumps({"prompt": "7+7=", "label": "1"}) + "\n")
    fresh = ["train", str(recipe), f"run.dir={tmp_path / 'other'}"]
    assert main(fresh) == 2
    assert f"{walks}: a row has no 'kind', and scoring.per_source has a reward for sums, walks" in (
        capsys.readouterr().err
    )
    held.write_text(json.dumps(named[0] | {"kind": "songs"}) + "\n")
    assert main(["evaluate", str(tmp_path / "run")]) == 2
    assert "evaluation.eval_data.held: a row is of the data set 'songs'" in capsys.readouterr().err
