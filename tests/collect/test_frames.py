"""Rollouts as bytes and back, and groups as a checkpoint of version 0.1.0 has them."""

from __future__ import annotations

import dataclasses
import json
import zlib
from typing import Any

import numpy
import pytest

from megatron_stare.collect.frames import (
    _LENGTHS,
    MAGIC,
    Frame,
    Spoilt,
    frame,
    group_frames,
    groups_in,
    read_frames,
    whole_frames,
)
from megatron_stare.records import ROLLOUT_ARRAYS, Group, Prompt, Rollout


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
    prompts = [Prompt(n, numpy.array([1, 2 + n]), "4", "set", "2+2") for n in range(2)]
    return [Group(prompts[0], (found, empty)), Group(prompts[1], (plain,))]


def test_groups_come_back_as_they_were():
    assert groups_in(group_frames(groups())) == groups()
    assert groups_in(group_frames([])) == []


def test_of_a_prompt_that_is_judged_its_verifiers_data_is_not_kept():
    (first, _) = groups()
    odd = dataclasses.replace(first.prompt, metadata={"any": object()}, tools=({"name": "f"},))
    assert groups_in(group_frames([Group(odd, first.rollouts)])) == [first]


def test_groups_of_a_checkpoint_of_version_0_1_0_are_read():
    def listed(record: Prompt | Rollout) -> dict[str, Any]:
        values = {
            each.name: getattr(record, each.name)
            for each in dataclasses.fields(record)
            if each.init
        }
        arrays = {name: tuple(values[name].tolist()) for name in values if name in kinds}
        return values | arrays

    kinds = {"token_ids", *ROLLOUT_ARRAYS}
    old = [
        {"prompt": listed(group.prompt), "rollouts": tuple(map(listed, group.rollouts))}
        for group in groups()
    ]
    assert groups_in(old) == groups()


def test_every_byte_of_a_frame_is_guarded():
    whole = frame(groups()[0].rollouts[0], number=1)
    for place in range(len(whole)):
        spoilt = bytearray(whole)
        spoilt[place] ^= 0x20
        found = list(read_frames(bytes(spoilt) + whole))
        assert isinstance(found[0], Spoilt) and found[1].beside == {"number": 1}, place
        assert len(found) == 2
    content = group_frames(groups())
    content[-1] ^= 1
    with pytest.raises(ValueError, match="is spoilt"):
        list(whole_frames(content))


def test_a_rollout_written_before_there_was_routing_is_read():
    rollout = dataclasses.replace(groups()[0].rollouts[0], routing=())
    whole = frame(rollout)
    begin = len(MAGIC) + _LENGTHS.size
    count, size, _ = _LENGTHS.unpack_from(whole, len(MAGIC))
    head, beside, plain = json.loads(whole[begin : begin + count])
    assert head["lengths"].pop() == 0, "none was kept"
    line = json.dumps([head, beside, plain]).encode() + b"\n"
    body = line + whole[begin + count :]
    older = MAGIC + _LENGTHS.pack(len(line), size, zlib.crc32(body)) + body
    (found,) = read_frames(older)
    assert isinstance(found, Frame) and found.record == rollout
