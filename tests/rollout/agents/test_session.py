"""The tree of calls: which differences continue a sequence, and which tokens are trained."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import numpy
import pytest

from megatron_stare.records import Rollout
from megatron_stare.rollout.agents.messages import Message
from megatron_stare.rollout.agents.session import CallTree, Node

ASKED: Message = {"role": "user", "content": "go"}
SERVED: Message = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "hm",
    "tool_calls": [
        {
            "id": "call_0_0",
            "type": "function",
            "function": {"name": "f", "arguments": '{"a": 2, "b": [1, {"c": true}]}'},
        }
    ],
}
RESULT: Message = {"role": "tool", "tool_call_id": "call_0_0", "content": "3"}


def sampled(ids: list[int], version: int = 0) -> Rollout:
    logprobs = [-0.1 * each for each in ids]
    return Rollout(ids, logprobs, [1] * len(ids), status="completed", weight_version=version)


def tree_of_one(tolerate: str = "format+reasoning") -> CallTree:
    tree = CallTree(tolerate)
    prompt = numpy.array([1, 2], numpy.int32)
    tree.add(Node(None, "", [ASKED], SERVED, prompt, sampled([3, 4]), delivered=True))
    return tree


def echoed(**changes: Any) -> Message:
    message = copy.deepcopy(SERVED) | changes
    return {key: value for key, value in message.items() if value != "absent"}


def with_arguments(text: str, **changes: Any) -> Message:
    (call,) = copy.deepcopy(SERVED["tool_calls"])
    call["function"]["arguments"] = text
    return echoed(tool_calls=[call | changes])


@pytest.mark.parametrize(
    ("echo", "kinds"),
    [
        (echoed(), set()),
        (echoed(content=""), {"null"}),
        (echoed(content="absent"), set()),
        (echoed(content=[]), {"null"}),
        (echoed(content=" \n"), {"whitespace"}),
        (with_arguments('{"b":[1,{"c":true}],"a":2.0}'), {"arguments"}),
        (with_arguments(SERVED["tool_calls"][0]["function"]["arguments"], index=0), {"keys"}),
        (echoed(name="agent"), {"keys"}),
        (echoed(reasoning_content="absent"), {"reasoning"}),
        (echoed(reasoning_content="absent", reasoning="hm"), {"reasoning"}),
        (echoed(reasoning_content="other"), None),
        (echoed(content="words"), None),
        (echoed(tool_calls=None), None),
        (with_arguments('{"a": 3, "b": [1, {"c": true}]}'), None),
        (with_arguments('{"a": 2, "b": [1, {"c": 1}]}'), None),
        (with_arguments('{"a": 2}'), None),
        (with_arguments("no json"), None),
        (with_arguments(SERVED["tool_calls"][0]["function"]["arguments"], id="other"), None),
    ],
)
def test_small_differences_continue_the_sequence(echo: Message, kinds: set[str] | None):
    tree = tree_of_one()
    parent = tree.parent_of([ASKED, echo, RESULT], "")
    if kinds is None:
        assert parent is None and not tree.tolerated
    else:
        assert parent is tree.nodes[0]
        assert set(tree.tolerated) == kinds


def test_integers_that_javascript_rounds_are_a_rewrite():
    exact, rounded = str(2**53 + 1), str(2**53)
    tree = CallTree()
    node_answer = with_arguments(f'{{"a": {exact}}}')
    prompt = numpy.array([1], numpy.int32)
    tree.add(Node(None, "", [ASKED], node_answer, prompt, sampled([2]), delivered=True))
    assert tree.parent_of([ASKED, with_arguments(f'{{"a":{exact}}}')], "") is not None
    assert tree.parent_of([ASKED, with_arguments(f'{{"a": {rounded}}}')], "") is None


@pytest.mark.parametrize(
    ("tolerate", "continued"),
    [("none", (False, False)), ("format", (True, False)), ("format+reasoning", (True, True))],
)
def test_tolerated_differences_are_a_setting(tolerate: str, continued: tuple[bool, bool]):
    for echo, expected in zip(
        (echoed(content=""), echoed(reasoning_content="absent")), continued, strict=True
    ):
        found = tree_of_one(tolerate).parent_of([ASKED, echo, RESULT], "")
        assert (found is not None) == expected
    assert tree_of_one(tolerate).parent_of([ASKED, echoed(), RESULT], "") is not None


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "gone"}, SERVED, RESULT],
        [{"role": "system", "content": "s"}, ASKED, SERVED, RESULT],
        [SERVED, RESULT],
        [ASKED, RESULT],
        [ASKED],
    ],
)
def test_a_rewritten_history_is_a_root(messages: list[Message]):
    assert tree_of_one().parent_of(messages, "") is None
    assert tree_of_one().parent_of([ASKED, SERVED, RESULT], "other tools") is None


def test_random_trees_train_every_delivered_token_once():
    """Random continuations, forks, roots and lost answers; each call has ids of its own."""
    dice = random.Random(0)
    for _ in range(200):
        tree, fresh = CallTree(), iter(range(1, 10_000))
        trained: list[int] = []
        for version in range(dice.randint(1, 12)):
            parent = dice.choice([None, *tree.nodes])
            begin = parent.ids.tolist() if parent else []
            prompt = begin + [next(fresh) for _ in range(dice.randint(1, 3))]
            ids = [next(fresh) for _ in range(dice.randint(1, 4))]
            history = parent.history if parent else []
            messages = [*history, {"role": "user", "content": str(next(fresh))}]
            assert tree.parent_of(messages, "") is parent
            answer = {"role": "assistant", "content": str(next(fresh))}
            tree.add(
                Node(
                    parent,
                    "",
                    messages,
                    answer,
                    numpy.array(prompt, numpy.int32),
                    sampled(ids, version),
                    delivered=dice.random() < 0.8,
                )
            )
        kept = [node for node in tree.nodes if node.delivered]
        trained = [int(each) for node in kept for each in node.sampled.response_ids]
        if not kept:
            with pytest.raises(ValueError, match="without"):
                tree.rollout({}, status="completed")
            continue
        rollout = tree.rollout({}, status="completed")
        ids = rollout.response_ids[rollout.loss_mask]
        assert Counter(ids.tolist()) == Counter(trained), "each once"
        assert numpy.allclose(rollout.logprobs[rollout.loss_mask], -0.1 * ids)
        version_of = {
            int(each): node.sampled.weight_version
            for node in kept
            for each in node.sampled.response_ids
        }
        for each, version in zip(ids, rollout.versions[rollout.loss_mask], strict=True):
            assert version_of[int(each)] == version
        whole = [node.ids.tolist() for node in kept]
        assert all(rollout.response_ids[a:b].tolist() in whole for a, b in rollout.stretches)
        lost = sum(node.sampled.length for node in tree.nodes if not node.delivered)
        assert rollout.episode["undelivered_tokens"] == lost
        assert rollout.episode["sequences"] == len(rollout.lengths)
