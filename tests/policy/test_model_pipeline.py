"""The order in which a stage is sent micro-batches, against one played from the schedule itself."""

from __future__ import annotations

import pytest

from megatron_stare.policy import runtime
from megatron_stare.policy.model import received


def sent(count: int, stage: int, stages: int, chunks: int, forward: bool) -> list[int]:
    """The tensors that stage `stage` sends, in the order of its own steps: every micro-batch of a
    chunk in groups of as many as there are stages, chunk after chunk (arXiv 2104.04473, figure 4).
    """
    order = []
    for first in range(0, count, stages):
        for chunk in range(chunks):
            turn = range(first, min(first + stages, count))
            order += [(micro, chunk if forward else chunks - 1 - chunk) for micro in turn]
    end = (stages - 1, chunks - 1) if forward else (0, 0)
    return [micro for micro, chunk in order if (stage, chunk) != end]


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_stage_receives_the_tensors_of_its_neighbour(stages: int, chunks: int) -> None:
    runtime.prepare()
    for count in (stages, 2 * stages, 5 * stages):
        for stage in range(stages):
            before, after = received(count, stage, stages, chunks, stages)
            # one after the other without chunks; round the ring with them
            closed = chunks > 1
            assert before == (
                sent(count, (stage - 1) % stages, stages, chunks, True) if stage or closed else []
            )
            assert after == (
                sent(count, (stage + 1) % stages, stages, chunks, False)
                if stage < stages - 1 or closed
                else []
            )
