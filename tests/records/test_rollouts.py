"""The arrays of a rollout are typed and read-only, for every type of input."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import pytest

from megatron_stare.records import Prompt, Rollout, turns_of


def rollout(**changes: Any) -> Rollout:
    given: dict[str, Any] = {
        "response_ids": [5, 6, 7],
        "logprobs": (-0.1, -0.2, -1e-9),
        "loss_mask": [1, 0, True],
        "token_versions": [1, 2, 2],
    }
    return Rollout(**given | changes, status="completed", weight_version=2)


def test_sequences_become_arrays_of_nine_or_thirteen_bytes_a_token():
    found = rollout()
    assert found.response_ids.dtype == found.token_versions.dtype == numpy.int32
    assert (found.logprobs.dtype, found.loss_mask.dtype) == (numpy.float32, numpy.bool_)
    assert found.loss_tokens == 2 and found.oldest_version == 1
    arrays = (found.response_ids, found.logprobs, found.loss_mask, found.token_versions)
    assert sum(array.nbytes for array in arrays) == 3 * 13
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    same = rollout(token_versions=[2, 2, 2])
    assert not len(same.token_versions) and same.versions.tolist() == [2, 2, 2]


def test_an_array_is_kept_or_copied_but_never_shared():
    ids = numpy.array([5, 6, 7], numpy.int32)
    found = rollout(response_ids=ids)
    ids[0] = 9
    assert found.response_ids.tolist() == [5, 6, 7]
    assert dataclasses.replace(found, reward=1.0).response_ids is found.response_ids
    prompt = Prompt(0, numpy.array([1, 2]), "")
    assert prompt == Prompt(0, (1, 2), "") != Prompt(0, (1, 3), "")  # type: ignore[arg-type]
    assert found == rollout() != rollout(logprobs=(-0.1, -0.2, -0.3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_ids": [1, 2.5, 3]}, "response_ids: float64"),
        ({"response_ids": [1, 1 << 40, 3]}, f"response_ids: {1 << 40} is not of type int32"),
        ({"response_ids": ["a", "b", "c"]}, "response_ids"),
        ({"response_ids": [True, True, True]}, "response_ids: bool"),
        ({"response_ids": [[1], [2], [3]]}, "of shape"),
        ({"logprobs": [-1.0, None, -1.0]}, "logprobs: object"),
        ({"loss_mask": [0, 1, 2]}, "loss_mask: 2 is not of type bool"),
        ({"loss_mask": [0, 1]}, "2 loss_mask entries"),
        ({"token_versions": [1, 2]}, "2 token_versions of 3"),
    ],
)
def test_other_numbers_and_lengths_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        rollout(**changes)


def test_a_part_is_followed_by_inserted_and_sampled_tokens():
    part = rollout(token_versions=[1, 1, 1])
    longer = part.continued(Rollout.inserted([8, 9], "aborted", 2))
    assert longer.response_ids.tolist() == [5, 6, 7, 8, 9]
    assert longer.loss_mask.tolist() == [1, 0, 1, 0, 0] and longer.logprobs[3:].tolist() == [0, 0]
    assert longer.versions.tolist() == [1, 1, 1, 2, 2] and longer.weight_version == 2
    nothing = Rollout.inserted((), "aborted", 7)
    assert nothing.continued(part).versions.tolist() == [1, 1, 1]
    assert part.continued(nothing).versions.tolist() == [1, 1, 1]
    assert not longer.without_loss(status="truncated").loss_tokens and longer.loss_tokens == 2


@pytest.mark.parametrize(
    ("mask", "turns"),
    [
        ("111", [0, 0, 0]),
        ("110010", [0, 0, 0, 0, 1, 1]),
        ("00110100", [-1, -1, 0, 0, 0, 1, 1, 1]),
        ("000", [-1, -1, -1]),
        ("", []),
    ],
)
def test_a_turn_is_a_stretch_of_loss_tokens(mask: str, turns: list[int]):
    """A token after it, up to the next one, counts to the same turn."""
    found = turns_of(numpy.array([letter == "1" for letter in mask], numpy.bool_))
    assert found.dtype == numpy.int32 and found.tolist() == turns
