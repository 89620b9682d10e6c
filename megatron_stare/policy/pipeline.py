"""A pipeline communicator that knows the shapes to come: every rank of a batch has the lengths of
its micro-batches.

Megatron's own communicator sends the shape of every tensor ahead where lengths vary, waits for the
whole device and reads the shape on the host: twice a micro-batch, forward and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_stare.policy.topology import Topology

Shape = tuple[int, ...]


def received(
    count: int, stage: int, stages: int, chunks: int, turn: int
) -> tuple[list[int], list[int]]:
    """The micro-batches whose activations come from the stage before, and whose gradients come from
    the stage after, in the order in which they are received.

    1F1B: every one in turn. Interleaved over `chunks` in turns of `turn` (Megatron's
    get_schedule_table; arXiv 2104.04473, section 2.2): in the order of the schedule, which is the
    sender's too. What the last chunk makes ends on the last stage, and what the first one makes, of
    gradients, on the first: the other end is sent nothing of it.
    """
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    if chunks == 1:
        every = list(range(count))
        return (every if stage else []), (every if stage < stages - 1 else [])
    table = get_schedule_table(count, chunks, turn)
    whole = [number for number, _ in table]
    around = [number for number, chunk in table if chunk != chunks - 1]
    return (whole if stage else around), (whole if stage < stages - 1 else around)


def pipeline_communicator(topology: Topology, transformer: Any) -> Any:
    """A P2PCommunicator of this pipeline group; `expect` says what one run of a schedule is sent,
    and `done` that it was all of it.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    class Communicator(P2PCommunicator):
        forward: Iterator[Shape] = iter(())
        backward: Iterator[Shape] = iter(())

        def expect(self, shapes: Sequence[Shape], forward_only: bool) -> None:
            """One shape for every micro-batch of the coming run."""
            before, after = received(
                len(shapes),
                topology.pipeline_rank,
                topology.pipeline_size,
                topology.virtual_size,
                transformer.microbatch_group_size_per_vp_stage or topology.pipeline_size,
            )
            self.forward = iter([shapes[number] for number in before])
            self.backward = iter([] if forward_only else [shapes[number] for number in after])

        def done(self) -> None:
            """RuntimeError: the schedule left something that was expected."""
            if (left := len([*self.forward, *self.backward])) > 0:
                raise RuntimeError(f"the schedule received {left} tensors less than it should")

        def _communicate_shapes(
            self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
        ) -> Any:
            return (
                next(self.forward) if recv_prev else None,
                next(self.backward) if recv_next else None,
            )

    return Communicator(topology.pipeline, transformer)
