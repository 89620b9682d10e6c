"""The names of checkpoints' directories: step_00000050."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_stare.config import UserError

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


def require_named(load: str, directory: Path, newest_first: Sequence[str]) -> None:
    """UserError: the checkpoint that --load names is none of these, which the directory has."""
    if load not in newest_first:
        there = ", ".join(newest_first) or "none"
        raise UserError(f"--load {load}: not in {directory}; there are {there}")


def checkpoint_before(run: Path, step: int) -> Path | None:
    """A run's newest checkpoint that leads to the step; None: its first weights do."""
    every = listed(run / "checkpoints")
    return next((path for path in reversed(every) if step_of(path) < step), None)
