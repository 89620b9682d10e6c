"""The names of checkpoints' directories: step_00000050."""

from __future__ import annotations

import re
from pathlib import Path

STEP = "step_"
_NAME = re.compile(rf"{STEP}\d{{8,}}", re.ASCII)


def listed(directory: Path) -> list[Path]:
    """The checkpoints in a run's checkpoints/, oldest first. Other names, such as those of copies,
    are no checkpoints.
    """
    found = (path for path in directory.glob(f"{STEP}*") if _NAME.fullmatch(path.name))
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The rollout batches that were trained when it was saved."""
    return int(checkpoint.name.removeprefix(STEP))


def checkpoint_before(run: Path, step: int) -> Path | None:
    """A run's newest checkpoint that leads to the step; None: its first weights do."""
    every = listed(run / "checkpoints")
    return next((path for path in reversed(every) if step_of(path) < step), None)
