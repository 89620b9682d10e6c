"""Weights & Biases. WANDB_MODE=offline writes to `<run.dir>/wandb` alone, for `wandb sync`."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import yaml

from megatron_stare.reporting.logbooks.mirror import Row, Sent, missing, numbers


class WeightsAndBiases:
    """One run there for one run directory, however often it is continued: its id is kept."""

    name = "wandb"

    def __init__(self, directory: Path, project: str) -> None:
        self.directory, self.project = directory, project
        self._run: Any = None

    def open(self, last_step: int | None) -> None:
        try:
            import wandb
        except ImportError:
            raise missing("run.logbooks=[wandb]", "wandb") from None
        self._sent = Sent(self.directory, self.name)
        if not self._sent.id:
            self._sent.note(id=uuid.uuid4().hex)
        settings = self.directory / "config.yaml"
        self._run = wandb.init(
            project=self.project,
            name=self.directory.name,
            id=self._sent.id,
            resume="allow",
            dir=str(self.directory),
            config=yaml.safe_load(settings.read_text()) if settings.is_file() else None,
        )

    def write(self, row: Row) -> None:
        step = int(row["step"])
        if self._sent.begin(step):
            self._run.log(numbers(row), step=step, commit=True)

    def close(self) -> None:
        self._run.finish()
