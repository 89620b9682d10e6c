"""Ctrl-C, SIGTERM and SIGUSR1 end a run after the step in progress, with a checkpoint."""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupt:
    """While entered, the first signal asks for a stop; a second Ctrl-C takes effect at once."""

    def __init__(self) -> None:
        self.noted: int = 0  # the signal this process got, 0 for none
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def asked(self) -> bool:
        """Whether any rank was signalled; the same answer on every rank. Collective."""
        asked = torch.tensor([int(bool(self.noted))], dtype=torch.int32)
        if dist.get_world_size() > 1:
            asked = asked.cuda() if dist.get_backend() == "nccl" else asked
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked.item())

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.noted = number
