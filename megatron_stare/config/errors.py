"""What goes wrong for a reason that only the user can fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something only the user can fix. One line:
    the field, the value, the remedy. Exit code 2.
    """


class EngineError(RuntimeError):
    """A rollout engine failed, and trying again did not help."""


class NoSignalError(UserError):
    """Too few groups with differing rewards.
    Raised on every rank alike, so that they can save together first.
    """


class RunAlarm(RuntimeError):
    """An alarm that ends the run (alarms.stop). Raised on every rank alike."""


class MismatchAlarm(RunAlarm):
    """Trainer and rollout log-probs differ by more than mismatch.alarm allows.
    Raised on every rank alike.
    """


class NonFiniteError(FloatingPointError):
    """The statistics of a batch or its gradient are not finite. Raised on every rank alike, before
    the update they are for. `rollout`: the first that has to do with it, as the index of its prompt
    and its number.
    """

    def __init__(self, message: str, rollout: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.rollout = rollout


def nearest(name: str, valid: Iterable[str]) -> str:
    """`; did you mean 'x'? valid: ...` for an error message."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (valid: {', '.join(names)})"
