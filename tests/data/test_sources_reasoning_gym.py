"""Rows of reasoning-gym, and its scorers as a reward."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from megatron_stare.config import DataConfig, UserError
from megatron_stare.data.rows import Dropped, read_rows
from megatron_stare.data.sources import PREFIX, gym_rows
from megatron_stare.recipes import smollm2
from megatron_stare.scoring.gym_verifier import reasoning_gym
from megatron_stare.scoring.judge import REWARDS

TASK = f"{PREFIX}chain_sum?size=20&seed=1&min_terms=2&max_terms=3"


def test_rows_are_those_of_the_package():
    import reasoning_gym as gym  # a second, which every process of a parallel run would spend

    rows = list(read_rows(TASK, DataConfig(), Dropped()))
    made = gym.create_dataset("chain_sum", size=20, seed=1, min_terms=2, max_terms=3)
    assert [row.question for row in rows] == [entry["question"] for entry in made]
    assert [row.label for row in rows] == [entry["answer"] for entry in made]
    assert {row.metadata["data_source"] for row in rows} == {"reasoning_gym:chain_sum"}
    assert [row.number for row in rows] == list(range(1, 21))
    both = list(read_rows(f"{TASK},{PREFIX}lcm?size=5", DataConfig(), Dropped()))
    signs = f'{PREFIX}basic_arithmetic?size=9&operators=["+", "-"]'
    rows = list(read_rows(f"{signs},{PREFIX}lcm?size=5", DataConfig(), Dropped()))
    assert len(rows) == 14 and not any("*" in row.question for row in rows)
    assert len(both) == 25 and both[-1].metadata["data_source"] == "reasoning_gym:lcm"


@pytest.mark.parametrize(
    ("response", "value", "verdict"),
    [
        ("4 + 3 = 7\nAnswer: {}", 1.0, "correct"),
        ("Answer:  {} ", 1.0, "correct"),
        ("<answer>{}</answer>", 1.0, "correct"),
        ("the answer is {}", 0.0, "wrong"),  # the text holds it, and gives no answer
        ("Answer: 1{}", None, "wrong"),
    ],
)
def test_an_answer_has_the_score_of_the_data_sets_scorer(response, value, verdict):
    row = next(iter(read_rows(TASK, DataConfig(), Dropped())))
    found = reasoning_gym(response.format(row.label), row.label, row.metadata)
    assert found.verdict == verdict
    assert value is None or found.value == value


def test_a_row_of_another_source_is_unverifiable():
    found = reasoning_gym("Answer: 1", "1", {})
    assert found.verdict == "unverifiable" and "metadata" in found.reason


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (f"{PREFIX}chain_sums", "did you mean 'chain_sum'"),
        (f"{PREFIX}chain_sum?terms=2", "refuses these settings"),
        (f"{PREFIX}chain_sum?min_terms=0", "refuses these settings"),
        (f"{PREFIX}chain_sum?seed=None", "refuses these settings"),
        (f"{PREFIX}chain_sum?size", "is not key=value"),
        (f"{PREFIX}boxnet", "own answer"),
        (f"{PREFIX}graph_color", "own answer"),
        (f"{PREFIX}propositional_logic", "own answer"),
        (f"{PREFIX}rubiks_cube", "own answer"),
        (f"{PREFIX}rush_hour", "own answer"),
    ],
)
def test_unsolvable_rows_are_refused(source: str, says: str):
    with pytest.raises(UserError, match=says):
        next(gym_rows(source))


@pytest.mark.slow
def test_every_other_data_set_gives_its_own_answer_the_full_score():
    from reasoning_gym.factory import DATASETS

    refused = set()
    for name in sorted(set(DATASETS) - {"composite"}):
        try:
            rows = list(gym_rows(f"{PREFIX}{name}?size=3&seed=5"))
        except UserError:
            refused.add(name)
            continue
        for row in rows:
            found = reasoning_gym(f"<answer>{row['label']}</answer>", "", row["metadata"], "tag")
            assert found.value == 1.0, (name, found)
    faulty = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
    assert refused == faulty | {"arc_agi", "rearc"}


def demonstrated(source: str, name: str) -> list[tuple[str, str]]:
    """The question of each demonstration of a recipe, after the data set's own words, and its
    answer.
    """
    (lead,) = {row["prompt"][0]["content"].rpartition(": ")[0] for row in gym_rows(source)}
    made = [row["messages"] for row in getattr(smollm2, name)()]
    pairs = [[message["content"] for message in messages] for messages in made]
    assert {question.rpartition(": ")[0] for question, _ in pairs} == {lead}
    assert len({answer for _, answer in pairs}) > 500
    return [(question.rpartition(": ")[2], answer) for question, answer in pairs]


def test_demonstrations_of_sums_are_right_and_written_as_the_data_set_writes():
    for expression, answer in demonstrated(smollm2.SUMS, "sums"):
        assert answer.rpartition("Answer: ")[2] == str(eval(expression.removesuffix(" =")))
        for step in answer.split("\n")[0].split(", ") if "=" in answer else ():
            left, _, right = step.rpartition(" = ")
            assert eval(left.removeprefix("tens ").removeprefix("ones ")) == int(right)


def test_demonstrations_of_multiples_are_right_and_written_as_the_data_set_writes():
    listed = 0
    for asked, answer in demonstrated(smollm2.MULTIPLES, "multiples"):
        pair = [int(number) for number in asked.split(", ")]
        working, _, result = answer.rpartition("Answer: ")
        assert int(result) == math.lcm(*pair)
        if working.startswith("gcd "):
            divisor, *steps = working.strip().removeprefix("gcd ").split(", ")
            assert int(divisor) == math.gcd(*pair)
        elif working:
            listed += 1
            *multiples, last = working.strip().split(", ")
            steps = [last]
            assert [int(one) for one in multiples] == [*range(max(pair), int(result), max(pair))]
        for left, _, right in (step.rpartition(" = ") for step in (steps if working else ())):
            assert eval(left) == int(right)
    assert 100 < listed < 600


def test_a_verifier_process_imports_the_package_before_its_first_sample():
    """A busy machine takes longer for it than scoring.verifier_timeout allows."""
    code = (
        "import sys; from megatron_stare.scoring.verifier_pool import _warm_up; "
        f"_warm_up({REWARDS['reasoning_gym'].path!r}); print('reasoning_gym' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "True"
