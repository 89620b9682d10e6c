"""What is read of a server's answer, and which answers are refused."""

from __future__ import annotations

import json
from typing import Any

import numpy
import pytest

from megatron_stare.records import RoutingShape
from megatron_stare.rollout.engine import FaultyAnswer
from megatron_stare.rollout.sglang.answers import (
    decoded,
    prefill_request,
    read_answer,
    read_prefill,
    routing_of,
)


def answer(pairs: list[Any], **changes: Any) -> dict[str, Any]:
    """As SGLang writes it, with what else it may hold around the lists."""
    meta = {
        "id": "x",
        "finish_reason": {"type": "length", "length": 3},
        "weight_version": "7",
        "output_token_logprobs": pairs,
        "input_top_logprobs": [[[1, 2]]],
    }
    text = 'a \\ "output_token_logprobs":[[1,2,null]] and "output_token_logprobs"'
    ids = [pair[1] if len(pair) > 1 else 0 for pair in pairs]
    return {"text": text, "output_ids": ids, "meta_info": meta} | changes


@pytest.mark.parametrize("count", [0, 1, 500])
def test_numbers_are_read_exactly(count: int):
    random = numpy.random.default_rng(count)
    logprobs = [-0.0, -1e-09, -12, 3.5e-05, *(-random.random(count)).tolist()]
    ids = [place * 7919 % 150_000 for place in range(len(logprobs))]
    content = answer([list(pair) for pair in zip(logprobs, ids, [None] * len(ids), strict=True)])
    found = read_answer(decoded(json.dumps(content).encode()))
    assert found.ids.tolist() == ids and found.status == "truncated"
    assert found.logprobs.tobytes() == numpy.array(logprobs, numpy.float32).tobytes()


BROKEN = {
    "a word in the place of a number": [["-0.5", 3, None], [-0.5, 4, None]],
    "a fraction for an id": [[-0.5, 3.5, None], [-0.5, 4, None]],
    "true": [[-0.5, True, None], [-0.5, 4, None]],
    "no number": [[None, 3, None], [-0.5, 4, None]],
    "one too many and one too few": [[-0.5, 3, 9, None], [-0.5, None]],
    "another id": [[-0.5, 8, None], [-0.5, 4, None]],
    "too few": [[-0.5, 3, None]],
    "a list": [[-0.5, [3], None], [-0.5, 4, None]],
    "nothing": [],
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_answers_are_refused(fault: str):
    content = answer(BROKEN[fault], output_ids=[3, 4])
    with pytest.raises(FaultyAnswer):
        read_answer(decoded(json.dumps(content).encode()))


def test_half_an_answer_is_no_json():
    with pytest.raises(json.JSONDecodeError):
        decoded(json.dumps(answer([])).encode()[:-1])


SHAPE = RoutingShape(layers=(1, 3), top_k=2, experts=8)


def test_experts_are_those_of_the_layers_that_have_some():
    """A server names experts of every layer of the model, those without any too."""
    choices = numpy.array([[[0, 0], [1, 2], [0, 0], [7, 3]], [[0, 0], [5, 0], [0, 0], [2, 1]]])
    routing = routing_of(choices.astype("<i4").tobytes(), 2, SHAPE)
    assert SHAPE.decoded(routing).tolist() == [[[1, 2], [7, 3]], [[5, 0], [2, 1]]]


@pytest.mark.parametrize(
    ("routed", "rows", "words"),
    [
        (numpy.zeros((2, 4, 2), "<i4"), 2, "one expert twice"),
        (numpy.full((2, 4, 2), (1, 8), "<i4"), 2, "expert choices 1 to 8 of 8"),
        (numpy.full((2, 4, 2), (1, 2), "<i4"), 3, "not those of 3 positions"),
        (numpy.full((2, 3, 2), (1, 2), "<i4"), 2, "in each of 4 or more layers"),
        (numpy.zeros(3, numpy.uint8), 1, "3 bytes of expert choices"),
    ],
)
def test_impossible_experts_are_refused(routed: numpy.ndarray, rows: int, words: str):
    with pytest.raises(FaultyAnswer, match=words):
        routing_of(routed.tobytes(), rows, SHAPE)


def read_ids(written: list[int], hidden: Any = None) -> dict[str, Any]:
    """A server's answer for ids that it only reads; its log-probs name these ids."""
    logprobs = [[-0.5 * place, label, None] for place, label in enumerate(written)]
    top = [None, *([[-0.1, label + 1, None]] for label in written[1:])]
    logprobs[0][0] = None
    return {
        "meta_info": {"input_token_logprobs": logprobs, "input_top_logprobs": top} | (hidden or {})
    }


def test_a_servers_scores_are_read():
    """The vocabulary's last id is written as 0; hidden states come in pieces, and with one more of
    the token that is sampled after them.
    """
    ids = numpy.array([3, 4, 9, 1], numpy.int32)
    states = numpy.arange(10.0).reshape(5, 2)
    hidden = {"hidden_states": [states[:2].tolist(), states[2:].tolist()]}
    for written in ([3, 4, 9, 1], [3, 4, 0, 1]):
        found = read_prefill(read_ids(written, hidden), ids, 10)
        assert found.logprobs.tolist() == [-0.5, -1.0, -1.5]
        assert found.likeliest.tolist() == [label + 1 for label in written[1:]]
        assert found.hidden is not None and found.hidden.tolist() == states[:4].tolist()
    assert read_prefill(read_ids([3, 4, 9, 1]), ids, 10).hidden is None
    assert prefill_request(ids, True)["sampling_params"]["max_new_tokens"] == 1
    assert prefill_request(ids, False)["sampling_params"]["max_new_tokens"] == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (read_ids([3, 0, 9, 1]), "other ids"),
        (read_ids([3, 4, 9]), "other ids"),
        (read_ids([3, 4, 9, 1], {"hidden_states": [[[1.0], [2.0, 3.0]]]}), "another shape"),
        ({"meta_info": {"input_token_logprobs": []}}, "lacks"),
        ({}, "lacks"),
    ],
)
def test_impossible_scores_are_refused(content: dict[str, Any], words: str):
    with pytest.raises(FaultyAnswer, match=words):
        read_prefill(content, numpy.array([3, 4, 9, 1], numpy.int32), 10)
