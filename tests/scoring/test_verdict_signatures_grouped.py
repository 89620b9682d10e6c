"""Reward functions of a group: all responses to a prompt come in one call, in every form."""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
from typing import Any

import numpy
import pytest

from megatron_stare.config import Config, ScoringConfig, override
from megatron_stare.records import Prompt, Rollout
from megatron_stare.scoring.judge import Judge, LocalVerifier, build_backends
from megatron_stare.scoring.verdict import Sample, Verdict, adapted
from tests.paths import ROOT
from tests.scoring.verifier_cases import longest

LONGEST = "tests.scoring.verifier_cases.longest"
# Two prompts, their responses in turn; of the third prompt there is one response.
SAMPLES = [
    Sample("aa", "7", {"data_source": "x"}, "first"),
    Sample("b", "7", {"data_source": "x"}, "second"),
    Sample("a", "7", {"data_source": "x"}, "first"),
    Sample("bbb", "7", {"data_source": "x"}, "second"),
    Sample("c", "8", {"data_source": "x"}, "second"),
]
FOUND = [1.0, 0.0, 0.0, 1.0, 1.0]


def verl(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert data_sources == ["x"] * len(solution_strs)
    assert extra_infos == [{"data_source": "x"}] * len(solution_strs)
    assert len(set(ground_truths)) == 1 and len(ground_truths) == len(solution_strs)
    return [{"score": one} for one in longest(solution_strs, ground_truths[0], {})]


def trl(completions, prompts, label, **kwargs):
    assert len(set(prompts)) == 1 and len(prompts) == len(label) == len(completions)
    return numpy.array(longest(completions, label[0], {}))


def trl_of_messages(completions, **kwargs):
    return longest(["" + one[0]["content"] for one in completions], "", {})


async def slime(args, samples, **kwargs):
    await asyncio.sleep(0)
    assert len({sample.prompt for sample in samples}) == 1
    return longest([sample.response for sample in samples], samples[0].label, {})


def with_prompt(responses, prompt):
    assert prompt in ("first", "second")
    return longest(responses, "", {})


@pytest.mark.parametrize("function", [longest, verl, trl, trl_of_messages, slime, with_prompt])
def test_every_form_sees_all_responses_to_a_prompt(function: Any) -> None:
    found = LocalVerifier(adapted(function)).judge(SAMPLES)
    assert [one.value for one in found] == FOUND


def test_the_function_of_the_documentation() -> None:
    lines = (ROOT / "docs/rewards.md").read_text(encoding="utf-8").split("def shortest_correct")[1]
    given: dict[str, Any] = {}
    exec(textwrap.dedent("    def shortest_correct" + lines.split("\n\n")[0]), given)
    group = [Sample(text, "7", {}, "p") for text in ("so 7", "7", "8", "and so 7")]
    found = LocalVerifier(adapted(given["shortest_correct"])).judge(group)
    assert [one.value for one in found] == [0.5, 1.0, 0.0, 0.5]


def pooled(samples: list[Sample], *settings: str) -> list[Verdict]:
    overrides = ["scoring.verifier_processes=2", *settings]
    scoring = override(Config(), overrides).scoring
    with contextlib.closing(build_backends([LONGEST], scoring)[LONGEST]) as backend:
        return backend.judge(samples)


def test_a_group_stays_whole_in_the_processes() -> None:
    """The same with more groups than processes."""
    many = [Sample(f"{'x' * n}", str(p), {}, "one") for n in range(3) for p in range(300)]
    found = [one.value for one in pooled(many)]
    assert found == [0.0] * 600 + [1.0] * 300


def test_responses_without_a_prompt_are_judged_alone() -> None:
    assert [one.value for one in pooled([Sample("a", "7"), Sample("aa", "7")])] == [1.0, 1.0]


def test_a_deadline_counts_for_each_response() -> None:
    """2 s for one response: 3 s are too long for one and enough for two."""
    group = [Sample("sleep 3", "", {}, "p"), Sample("x", "", {}, "p")]
    assert [one.value for one in pooled(group, "scoring.function_timeout=2")] == [1.0, 0.0]
    (late,) = pooled(group[:1], "scoring.function_timeout=2")
    assert late.value is None and "no verdict within 2 s; scoring.function_timeout" in late.reason


def test_a_crash_costs_its_group_alone() -> None:
    group = [Sample("exit", "", {}, "p"), Sample("x", "", {}, "p")]
    found = pooled([*group, *SAMPLES])
    assert [one.verdict for one in found[:2]] == ["unverifiable"] * 2
    assert [one.kills for one in found] == [2, 0, 0, 0, 0, 0, 0]
    assert [one.value for one in found[2:]] == FOUND


@pytest.mark.parametrize("timeout", [20, 0])
def test_a_wrong_number_of_rewards_is_unverifiable(timeout: int) -> None:
    group = [Sample(text, "", {"returned": 2}, "p") for text in ("a", "b", "c")]
    found = pooled(group, f"scoring.function_timeout={timeout}")
    assert [one.value for one in found] == [None] * 3
    assert "it returned 2 for 3 responses; return a list" in found[0].reason


def test_one_number_for_a_group_is_unverifiable() -> None:
    (found, _) = LocalVerifier(adapted(lambda responses: 1.0)).judge(SAMPLES[::2][:2])
    assert found.value is None and "it returned float for 2 responses" in found.reason


def test_a_judge_hands_over_a_group() -> None:
    """A response whose episode failed is not part of it."""
    failed = {"errors": 1.0}
    prompt = Prompt(0, (1,), "7", "first")  # type: ignore[arg-type]
    made = [
        Rollout(
            (1,), (0.0,), (1,), text=text, episode=episode, status="completed", weight_version=0
        )  # type: ignore[arg-type]
        for text, episode in (("aaaa", failed), ("aa", {}), ("a", {}))
    ]
    settings = ScoringConfig(reward=LONGEST, verifier_processes=1)
    with contextlib.closing(Judge(settings, 10)) as judge:
        found = judge.judge([(prompt, one) for one in made])
    assert [one.reward for one in found] == [None, 1.0, 0.0]
