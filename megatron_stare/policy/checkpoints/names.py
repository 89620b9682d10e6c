"""The names of checkpoints' directories: step_00000050, and what a run or --load calls them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_stare.config import UserError

STEP = "step_"
LATEST, LATEST_GOOD, BEST = "latest", "latest-good", "best"
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


def best_in(directory: Path) -> tuple[str, float, str]:
    """The best checkpoint so far, its value of run.keep_best, and that metric; "" where there is
    none, or none any longer. UserError: the file that names it is damaged.
    """
    pointer = directory / BEST
    if not pointer.is_file():
        return "", 0.0, ""
    try:
        name, value, metric = pointer.read_text().split(maxsplit=2)
        return (name if (directory / name).is_dir() else ""), float(value), metric
    except ValueError as error:
        raise UserError(f"{pointer} is damaged ({error}); remove it") from None


def require_named(load: str, name: str, directory: Path, newest_first: Sequence[str]) -> None:
    """UserError: `name`, for which --load stands, is none of the checkpoints of the directory."""
    if not name:
        raise UserError(f"--load {load}: none in {directory}; set run.keep_best")
    if name not in newest_first:
        there = ", ".join(newest_first) or "none"
        raise UserError(f"--load {load}: not in {directory}; there are {there}")


def checkpoint_before(run: Path, step: int) -> Path | None:
    """A run's newest checkpoint that leads to the step; None: its first weights do."""
    every = listed(run / "checkpoints")
    return next((path for path in reversed(every) if step_of(path) < step), None)
