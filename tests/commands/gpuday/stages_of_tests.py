"""A stage that ends in the way that the day's overrides name."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from megatron_stare.commands.gpuday.rows import Day, Measurement, Skipped, at_least, holds
from megatron_stare.commands.gpuday.stages import on_ranks

CABLE = os.environ.get("CABLE", "there")


def run(day: Day) -> Iterator[Measurement]:
    (way,) = day.overrides
    yield at_least("rate", 3.0, 4.0, "GB/s", "node_rate")
    if way == "raises":
        raise ValueError("the cable is loose")
    if way == "skips":
        raise Skipped("no second node")
    if way == "hangs":
        time.sleep(600)
    if way == "fails on a rank":
        on_ranks(1, {"CABLE": "loose"}, rank)
    yield holds("statement", way == "true")


def rank() -> None:
    raise ValueError(f"when this rank was loaded, the cable was {CABLE}")
