"""Experts as bytes and back."""

from __future__ import annotations

import numpy
import pytest

from megatron_stare.records import Rollout, RoutingShape


@pytest.mark.parametrize(("experts", "size"), [(8, 1), (256, 1), (257, 2), (1000, 2)])
def test_choices_come_back(experts: int, size: int):
    shape = RoutingShape((0, 2, 3), 4, experts)
    dice = numpy.random.default_rng(experts)
    orders = dice.permuted(numpy.tile(numpy.arange(experts), (11, 3, 1)), axis=-1)
    choices = orders[..., -4:]
    choices[0, 0] = [experts - 1, 0, 1, 2]
    routing = shape.encoded(choices)
    assert routing.dtype == numpy.uint8 and len(routing) == 11 * shape.width == 11 * 12 * size
    assert (shape.decoded(routing) == choices).all()
    assert shape.positions(len(routing)) == 11
    for wrong in (choices[:, :2], numpy.full_like(choices, experts), -1 - choices, choices * 0):
        with pytest.raises(ValueError, match="expert choices"):
            shape.encoded(wrong)
    with pytest.raises(ValueError, match="no multiple of"):
        shape.decoded(routing[1:])


def test_a_continued_part_keeps_its_choices():
    first = Rollout((1, 2), (0, 0), (1, 1), status="aborted", weight_version=3, routing=[4, 5])
    whole = first.continued(
        Rollout((3,), (0,), (1,), status="completed", weight_version=4, routing=[6])
    )
    assert whole.routing.tolist() == [4, 5, 6] and whole.routing_bytes == 3
    assert first != Rollout(
        (1, 2), (0, 0), (1, 1), status="aborted", weight_version=3, routing=[4, 6]
    )
    with pytest.raises(ValueError, match="routing: 256 is not of type uint8"):
        Rollout((1,), (0,), (1,), status="completed", weight_version=0, routing=[256])
