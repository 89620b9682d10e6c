"""The errors of a run, and hints for their messages."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from typing import Any


class UserError(Exception):
    """A fault that only the user can fix, in one line: field, value and remedy. Exit code 2."""


class EngineError(RuntimeError):
    """A rollout engine failed, and retries did not help."""


class NoSignalError(UserError):
    """Too few groups with differing rewards.
    Raised on every rank alike, so that they can save together first.
    """


class TaskSolved(NoSignalError):
    """Too few groups with differing rewards, because nearly every response is right: a success,
    which ends a run with exit code 0. Raised on every rank alike.
    """


class RunAlarm(RuntimeError):
    """An alarm that ends the run (alarms.stop). Raised on every rank alike."""


class MismatchAlarm(RunAlarm):
    """Trainer and rollout log-probs differ by more than mismatch.alarm allows.
    Raised on every rank alike.
    """


class NonFiniteError(FloatingPointError):
    """The statistics of a batch or its gradient are not finite. Raised on every rank alike, before
    the update. `rollout`: the first rollout with such values, as its prompt's index and its number
    in the group.
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


def callable_at(path: str, what: str, form: str) -> Callable[..., Any]:
    """The user's function or class at package.module.name. UserError if there is none; it names
    the purpose (`what`) and the expected form.
    """
    module, _, attribute = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{what} {path!r} cannot be imported ({error}); check the path and PYTHONPATH"
        ) from None
    if not callable(found):
        raise UserError(f"{what} {path!r} is not callable; name {form}")
    return found
