"""The ways in which a command of the pages is executed."""

from __future__ import annotations

from dataclasses import dataclass

SLOW = ("slow",)


@dataclass(frozen=True)
class Run:
    """Run for real in tests/docs/world.py; exit code 0 is expected.

    `more` is appended; `instead` replaces words, or what follows their `=`. `needs` are commands
    that go before. `copy_of_the_run`: a copy of runs/math, so that others find that as it was.
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
    """Executed by another test, by its node id; that it exists is checked.

    `run`: how, where that test leaves it to tests/docs/world.py.
    """

    test: str
    run: Run | None = None
