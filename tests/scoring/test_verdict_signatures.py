"""Reward functions written for verl, TRL and slime, as their documentation shows them, judged."""

from __future__ import annotations

import asyncio
import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_stare.config import ScoringConfig, UserError
from megatron_stare.scoring.judge import LocalVerifier, build_backends
from megatron_stare.scoring.verdict import Sample, Verdict, adapted, judged

RIGHT = Sample("so 7", "7", {"data_source": "gsm8k", "level": 3}, "What is 3 + 4?")
WRONG = Sample("so 8", "7", {"data_source": "gsm8k", "level": 3}, "What is 3 + 4?")


def ours(response, label, metadata):
    return float(response.endswith(label)) * (metadata["level"] == 3)


def ours_alone(response: str) -> float:
    return float("7" in response)


def ours_unused(response, label, _metadata) -> Verdict:
    return judged(response.endswith(label), response)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "gsm8k" and extra_info["level"] == 3
    return 1.0 if solution_str.endswith(ground_truth) else 0.0


def compute_score_dict(solution_str, ground_truth, extra_info=None, **kwargs):
    right = solution_str.endswith(ground_truth)
    return {"score": float(right), "acc": right}


def compute_scores(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    pairs = zip(solution_strs, ground_truths, strict=True)
    return [float(solution.endswith(truth)) for solution, truth in pairs]


def trl_columns(completions, ground_truth, **kwargs):
    assert kwargs["level"] == [3] * 3 and kwargs["prompts"] == ["What is 3 + 4?"] * 3
    return [float(c.endswith(gt)) for c, gt in zip(completions, ground_truth, strict=True)]


def trl_messages(prompts, completions, answer):
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if text.endswith(a) else 0.0 for text, a in zip(texts, answer, strict=True)]


def trl_conversation(prompts, completions, answer, **kwargs):
    """As in the GRPO demo that many scripts copy."""
    assert prompts[0][-1]["content"] == "What is 3 + 4?"
    return trl_messages(prompts, completions, answer)


def trl_not_applicable(completions, level, **kwargs):
    return [None if one > 2 else 1.0 for one in level]


async def slime_reward(args, sample, **kwargs):
    await asyncio.sleep(0)
    return float(sample.response.endswith(sample.label)) if sample.prompt else -1.0


class Callable_:
    def __call__(self, response, label, metadata):
        return float(response.endswith(label))


@pytest.mark.parametrize(
    "function",
    [
        *(ours, ours_alone, ours_unused, compute_score, compute_score_dict, compute_scores),
        *(trl_columns, trl_messages, trl_conversation, slime_reward, Callable_()),
        functools.partial(
            lambda response, label, metadata, *, best: best * ours_alone(response), best=1.0
        ),
    ],
)
def test_every_form_judges_by_the_names_of_its_parameters(function: Any) -> None:
    found = LocalVerifier(adapted(function)).judge([RIGHT, WRONG, RIGHT])
    assert [(one.value, one.verdict) for one in found] == [
        (1.0, "correct"),
        (0.0, "wrong"),
        (1.0, "correct"),
    ]


def test_none_from_a_trl_function_is_unverifiable() -> None:
    (found,) = LocalVerifier(adapted(trl_not_applicable)).judge([RIGHT])
    assert found.value is None and "returned None" in found.reason


def test_a_trl_function_of_conversations_gets_all_messages() -> None:
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3 + 4?"}]
    samples = [Sample(text, "7", {}, "<|im_start|>...", messages=asked) for text in ("", "7")]

    def reward(prompts, completions, **kwargs):
        said = [completion[0]["content"] for completion in completions]
        assert prompts == [asked, asked]
        return [float(text == "7") for text in said]

    found = LocalVerifier(adapted(reward)).judge(samples)
    assert [one.value for one in found] == [0.0, 1.0], found[0].reason


def test_calls_of_an_async_function_share_an_event_loop() -> None:
    """As a client that the function keeps from call to call needs it."""
    loops = []

    async def reward(response):
        loops.append(asyncio.get_running_loop())
        return 1.0

    async def in_a_notebook() -> list[Verdict]:
        return verifier.judge([WRONG])

    verifier = LocalVerifier(adapted(reward))
    found = verifier.judge([RIGHT]) + asyncio.run(in_a_notebook())
    assert [one.value for one in found] == [1.0, 1.0], found[1].reason
    assert loops[0] is loops[1] and not loops[0].is_closed()


def test_a_dictionary_of_verl_says_itself_whether_the_response_is_right() -> None:
    """A score for the format alone is positive, and the answer is wrong."""

    def compute_score(solution_str, ground_truth):
        right = solution_str.endswith(ground_truth)
        return {"score": 1.0 if right else 0.1, "acc": right, "pred": solution_str[-1], "n": 3}

    right, wrong = LocalVerifier(adapted(compute_score)).judge([RIGHT, WRONG])
    assert (right.value, right.verdict, right.extracted) == (1.0, "correct", "7")
    assert (wrong.value, wrong.verdict, wrong.extracted) == (0.1, "wrong", "8")
    for score in (None, float("nan"), "none"):
        dictionary = {"score": score, "acc": True}
        (found,) = LocalVerifier(adapted(lambda response, d=dictionary: d)).judge([RIGHT])
        assert (found.value, found.verdict) == (None, "unverifiable")


def test_a_column_named_like_trls_completions_is_not_passed() -> None:
    """Data sets of preferences have one."""
    sample = Sample("so 7", "7", {"completions": ["6", "7"], "level": 3}, "What is 3 + 4?")

    def reward(completions, **kwargs):
        return [float(completions == ["so 7"] and kwargs["level"] == [3])]

    (found,) = LocalVerifier(adapted(reward)).judge([sample])
    assert found.value == 1.0, found.reason


def test_an_error_inside_of_a_trl_function_is_its_own() -> None:
    def broken(completions, **kwargs):
        return [len(completions[0]) + "one"]

    (found,) = LocalVerifier(adapted(broken)).judge([RIGHT])
    assert found.value is None and "TypeError: unsupported operand" in found.reason


def test_the_setting_of_slime_is_named() -> None:
    def reward(args, sample):
        return args.rm_url

    (found,) = LocalVerifier(adapted(reward)).judge([RIGHT])
    assert "args.rm_url is a setting of slime" in found.reason


def swapped(label, prediction):
    return 1.0


def anything(*args):
    return 1.0


def with_more(response, label, metadata, judge_model):
    return 1.0


def of_the_trainer(completions, completion_ids):
    return [1.0]


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (swapped, "parameters (label, prediction)"),
        (anything, "parameters (args)"),
        (with_more, "nothing gives its parameter judge_model"),
        (of_the_trainer, "nothing gives its parameter completion_ids"),
        (lambda data_source, ground_truth: 1.0, "parameters (data_source, ground_truth)"),
    ],
)
def test_another_form_is_refused_before_a_run_starts(
    function: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("users_rewards")
    module.reward = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_rewards", module)
    with pytest.raises(UserError, match=r"write f\(response, label, metadata\) or") as error:
        build_backends(["users_rewards.reward"], ScoringConfig())
    assert named in str(error.value) and "users_rewards.reward" in str(error.value)


def test_a_function_of_verl_in_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "from megatron_stare.scoring.verdict import in_worker\n"
        "@in_worker\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str.endswith(ground_truth) and data_source == 'gsm8k')\n"
    )
    (tmp_path / "pooled_reward.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    backend = build_backends(["pooled_reward.compute_score"], ScoringConfig(verifier_processes=1))[
        "pooled_reward.compute_score"
    ]
    try:
        assert [one.value for one in backend.judge([RIGHT, WRONG])] == [1.0, 0.0]
    finally:
        backend.close()
