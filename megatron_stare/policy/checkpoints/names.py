"""What a checkpoint's directory is called: step_00000050."""

from __future__ import annotations

from pathlib import Path

STEP = "step_"


def step_of(checkpoint: Path) -> int:
    """The rollout batches that were trained when it was saved."""
    return int(checkpoint.name.removeprefix(STEP))


def checkpoint_before(run: Path, step: int) -> Path | None:
    """A run's newest checkpoint that leads to the step; None: its first weights do."""
    every = sorted((run / "checkpoints").glob(f"{STEP}*"))
    return next((path for path in reversed(every) if step_of(path) < step), None)
