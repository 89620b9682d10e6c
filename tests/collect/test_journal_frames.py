"""Rollouts as bytes and back, and groups as a checkpoint of version 0.1.0 has them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import pytest

from megatron_stare.collect.journal import (
    InvalidBytes,
    frame,
    group_frames,
    groups_in,
    read_frames,
    whole_frames,
)
from megatron_stare.records import Group, Prompt, Rollout


def groups() -> list[Group]:
    """Two groups; of no token, of one version, of several; text that is not ASCII."""
    judged: Any = {"reward": 0.1, "advantage": -1.5, "verdict": "wrong", "reward_parts": {"a": 0.1}}
    found = Rollout(
        numpy.arange(3, dtype=numpy.int32),
        numpy.array([-0.1, -2.0, -1e-30], numpy.float32),
        numpy.array([True, False, True]),
        status="completed",
        weight_version=3,
        text="\u00e9\ud800",
        episode={"turns": 2.0},
        token_versions=numpy.array([-1, 2, 3], numpy.int32),
        routing=numpy.arange(200, 230, dtype=numpy.uint8),
        **judged,
    )
    plain = dataclasses.replace(found, token_versions=numpy.zeros(0, numpy.int32))
    empty = Rollout.inserted((), "truncated", 0)
    prompts = [Prompt(n, numpy.array([1, 2 + n]), "4", "2+2") for n in range(2)]
    mask = numpy.array([False, False, True])
    sequences = dataclasses.replace(
        found, loss_mask=mask, lengths=(1, 2), routing=numpy.zeros(0, numpy.uint8)
    )
    return [Group(prompts[0], (found, empty)), Group(prompts[1], (plain, sequences))]


def test_groups_come_back_as_they_were():
    assert groups_in(b"".join(group_frames(enumerate(groups())))) == groups()
    assert groups_in(b"".join(group_frames([]))) == []


def test_a_judged_groups_verifier_data_is_not_kept():
    (first, _) = groups()
    odd = dataclasses.replace(first.prompt, metadata={"any": object()}, tools=({"name": "f"},))
    assert groups_in(b"".join(group_frames([(0, Group(odd, first.rollouts))]))) == [first]


def test_every_byte_of_a_frame_is_guarded():
    whole = frame(groups()[0].rollouts[0], number=1)
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x20
        found = list(read_frames(bytes(damaged) + whole))
        assert isinstance(found[0], InvalidBytes) and found[1].extra == {"number": 1}, place
        assert len(found) == 2
    content = bytearray(b"".join(group_frames(enumerate(groups()))))
    content[-1] ^= 1
    with pytest.raises(ValueError, match="is damaged"):
        list(whole_frames(bytes(content)))
