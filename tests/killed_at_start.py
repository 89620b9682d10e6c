"""A Python module whose import kills its process: by a signal, as where memory runs out."""

from __future__ import annotations

from pathlib import Path

MODULE = "short_of_memory"
_IMPORT = """
import os, pathlib, signal
marks = pathlib.Path({directory!r})
killed = len(list(marks.glob("*.mark")))
if killed < {kills}:
    (marks / f"{{killed}}.mark").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def write_module(directory: Path, kills: int, rest: str) -> None:
    """Write MODULE, which kills the first `kills` processes that import it."""
    start = _IMPORT.format(directory=str(directory), kills=kills)
    (directory / f"{MODULE}.py").write_text(start + rest)


def killed(directory: Path) -> int:
    """The number of processes that it has killed."""
    return len(list(directory.glob("*.mark")))
