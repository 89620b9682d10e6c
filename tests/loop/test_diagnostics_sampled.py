"""Which rollouts are shown, and what each token adds to their text."""

from __future__ import annotations

import numpy
import pytest

from megatron_stare.loop.diagnostics import pieces, places_of
from megatron_stare.records import Group, Prompt, Rollout
from tests.tiny_models import END, byte_tokenizer


def group(index: int, verdicts: str) -> Group:
    rollouts = tuple(
        Rollout(
            [1],
            [0.0],
            [True],
            status="completed",
            weight_version=0,
            verdict="correct" if v == "+" else "wrong",
        )
        for v in verdicts
    )
    return Group(Prompt(index, numpy.zeros(1, numpy.int32), ""), rollouts)


def shown(count: int, step: int = 0) -> list[tuple[int, int, int, int]]:
    parts = [[group(10, "----"), group(11, "+---")], [group(12, "++++"), group(13, "--++")]]
    places = places_of(parts, count, step)
    return [(p.part, p.sequence, p.group.prompt.index, p.sample) for p in places]


def test_whole_groups_with_right_and_wrong_answers_come_first():
    assert shown(8) == [(0, 4 + k, 11, k) for k in range(4)] + [(1, 4 + k, 13, k) for k in range(4)]
    assert shown(8, step=3)[0] == (1, 4, 13, 0), "another step begins with another group"
    assert len(shown(99)) == 16 and shown(0) == []


def test_a_group_that_does_not_fit_shows_right_and_wrong_in_turn():
    assert shown(3, step=2) == [(1, 6, 13, 2), (1, 4, 13, 0), (1, 7, 13, 3)]


@pytest.mark.parametrize(
    "text", ["plain", "caf\u00e9 \u4e16\u754c!", "\U0001f600\U0001f600", "a\ufffdb", ""]
)
def test_pieces_are_the_text_and_a_character_is_its_last_bytes(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text).input_ids
    found = pieces(ids, tokenizer)
    assert len(found) == len(ids) == len(text.encode())
    assert "".join(found) == text
    if text.startswith("\U0001f600"):
        assert found[:4] == ["", "", "", "\U0001f600"]


def test_invalid_bytes_do_not_delay_later_text():
    tokenizer = byte_tokenizer()
    (first,) = tokenizer("\u00e9").input_ids[:1]
    letters = tokenizer("abcdef").input_ids
    found = pieces([first, first, *letters, 0], tokenizer)
    assert found == ["", "", "\ufffd\ufffda", *"bcdef", END]
