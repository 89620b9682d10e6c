"""The ways in which a command of the pages is executed."""

from __future__ import annotations

from dataclasses import dataclass

PYTHON = "python -m megatron_stare"
SLOW = ("slow",)


@dataclass(frozen=True)
class Run:
    """Run for real in tests/docs/world.py; exit code 0 is expected.

    `more` is appended; `instead` replaces words, or the value after their `=`. `needs` are commands
    that run before. `copy_of_the_run`: a copy of runs/math, so that other commands find it
    unchanged.
    """

    more: tuple[str, ...] = ()
    instead: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()
    copy_of_the_run: str = ""
    seconds: float = 300.0
    markers: tuple[str, ...] = ()
    in_world: bool = True


@dataclass(frozen=True)
class Elsewhere:
    """Executed by another test, given by its node id; a test checks that it exists.

    `run`: how to run it, if that test uses tests/docs/world.py.
    """

    test: str
    run: Run | None = None
