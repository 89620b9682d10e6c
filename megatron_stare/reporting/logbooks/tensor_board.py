"""TensorBoard's event files, in `<run.dir>/tensorboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_stare.reporting.logbooks.mirror import Row, missing, numbers


class TensorBoard:
    """A resumed run purges the steps it is about to repeat."""

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "tensorboard"
        self._writer: Any = None

    def open(self, last_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise missing("run.logbooks=[tensorboard]", "tensorboard") from None
        purged = None if last_step is None else last_step + 1
        self._writer = SummaryWriter(str(self.directory), purge_step=purged)

    def write(self, row: Row) -> None:
        for key, value in numbers(row).items():
            self._writer.add_scalar(key, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
