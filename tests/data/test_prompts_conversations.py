"""Conversations as training sequences:
what bears loss, what is refused, and that rollouts see the same tokens.
"""

from __future__ import annotations

import random

import pytest

from megatron_stare.compare.worlds import calculator as world
from megatron_stare.data.prompts import tokenize_conversation
from megatron_stare.data.rows import BadRow
from megatron_stare.rollout.tools.builtin import evaluate, show
from megatron_stare.rollout.tools.engine import ToolMessages


@pytest.fixture(scope="module")
def tokenizer():
    return world.tool_tokenizer()


TALK = [
    {"role": "user", "content": "6*7="},
    {"role": "assistant", "content": "<tool_call>x</tool_call>"},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "\\boxed{42}"},
    {"role": "user", "content": "thanks"},
]


def test_only_the_assistants_tokens_are_loss_tokens(tokenizer):
    ids, mask = tokenize_conversation(TALK, tokenizer)
    written = [tokenizer.decode([i]) for i, m in zip(ids, mask, strict=True) if m]
    assert written == [
        "<tool_call>",
        "x",
        "</tool_call>",
        "<|end|>",
        "\\boxed{",
        "4",
        "2",
        "}",
        "<|end|>",
    ]
    assert tokenizer.decode(ids) == "".join(
        [
            "<user>6*7=<|end|><assistant><tool_call>x</tool_call><|end|><tool>42<|end|><assistant>\\boxed{42}<|end|>"
        ]
    ), "what follows the last turn has no use"


def test_a_demonstration_and_a_rollout_are_the_same_tokens(tokenizer):
    ids, mask = tokenize_conversation(TALK[:4], tokenizer)
    start = mask.index(1)
    end = start + mask[start:].index(0)
    between = ToolMessages(tokenizer).ids(["42"], tokenizer.eos_token_id)
    assert ids[end : end + len(between)] == between and mask[end + len(between)] == 1


def test_the_templates_end_of_a_turn_is_written_where_it_is_not_the_end_token():
    """As of Qwen's base models: the new line after the turn is the template's."""
    other = world.tool_tokenizer()
    other.eos_token = world.PAD
    other.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    other.chat_template = world.CHAT_TEMPLATE.replace("<|end|>", "<|end|>\n")
    ids, mask = tokenize_conversation(TALK[:4], other)
    written = other.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert written == "<tool_call>x</tool_call><|end|>\\boxed{42}<|end|>"
    assert other.decode(ids).count("<|end|>\n") == 3


def test_tools_reach_the_template(tokenizer):
    other = world.tool_tokenizer()
    other.chat_template = "{% if tools %}{{ tools[0]['name'] }}{% endif %}" + world.CHAT_TEMPLATE
    ids, mask = tokenize_conversation(TALK[:2], other, [{"name": "calc"}])
    assert other.decode(ids).startswith("calc<user>") and mask[:4] == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("messages", "template", "message"),
    [
        (TALK[:1], world.CHAT_TEMPLATE, "no message of role assistant"),
        (TALK, "{{ messages[-1]['content'] }}", "rewrites what stands before it"),
        (TALK, "{{ raise_exception('no tools here') }}", "no tools here"),
        ([{"role": "assistant"}], "{{ messages[0]['content']['x'] }}", "refuses the messages"),
    ],
)
def test_a_conversation_that_is_not_one_sequence_is_refused(messages, template, message):
    other = world.tool_tokenizer()
    other.chat_template = template
    with pytest.raises(BadRow, match=message):
        tokenize_conversation(messages, other)


def test_the_demonstrator_is_careless_as_described(tokenizer):
    rng = random.Random(1)
    problems = world.draw_problems(rng, 2000)
    assert len(set(problems)) == 2000 and all(len(problem) == 7 for problem in problems)
    talks = [world.demonstrate(problem, rng) for problem in problems]
    right = [
        talk[-1]["content"] == world._boxed(show(evaluate(p)))
        for p, talk in zip(problems, talks, strict=True)
    ]
    called = [any(m["role"] == "tool" for m in talk) for talk in talks]
    assert 0.45 < sum(right) / len(right) < 0.6 and 0.62 < sum(called) / len(called) < 0.72
    for talk in talks[:200]:
        ids, mask = tokenize_conversation(talk, tokenizer)
        assert (
            tokenizer.unk_token_id not in ids and sum(mask) > 2 and len(ids) < world.MAX_POSITIONS
        )
