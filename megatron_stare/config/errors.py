"""The errors of a run, and hints for their messages."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_NAMES_OF_A_LINE = 18
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


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


def nearest(name: str, valid: Iterable[str], listing: str = "") -> str:
    """`; did you mean 'x'? (valid: ...)` for an error message. `listing`: the command that lists
    the names, if they are too many for a line.
    """
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    if listing and len(names) > _NAMES_OF_A_LINE:
        return f"{hint} (`{listing}` lists all {len(names)})"
    return f"{hint} (valid: {', '.join(names) or 'none'})"


def from_hub(name: str, data: bool = False) -> str:
    """`; ...` with the command that downloads what a name on the Hugging Face Hub stands for; empty
    if the name is none.
    """
    if not _HUB_NAME.fullmatch(name) or Path(name).parent.exists():
        return ""
    kind, target = ("--repo-type dataset ", "data") if data else ("", "models")
    target = f"{target}/{name.partition('/')[2]}"
    return (
        f"; if it is a Hub id: `hf download {kind}{name} --local-dir {target}`, and give {target}"
    )


def callable_at(path: str, what: str, form: str) -> Callable[..., Any]:
    """The user's function or class at package.module.name. UserError if there is none; it names
    the purpose (`what`) and the expected form.
    """
    name, _, attribute = path.rpartition(".")
    if not name:
        raise UserError(f"{what}={path!r} is unknown; give package.module.name of {form}")
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a module of the user's may raise anything
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise UserError(
            f"{what}={path!r} cannot be imported ({kind}{error}); check the path and PYTHONPATH"
        ) from None
    if not hasattr(module, attribute):
        public = [each for each in vars(module) if not each.startswith("_")]
        close = difflib.get_close_matches(attribute, public, n=1)
        hint = f"did you mean '{name}.{close[0]}'?" if close else f"name {form}"
        raise UserError(f"{what}={path!r}: {name} has no {attribute!r}; {hint}")
    found = getattr(module, attribute)
    if not callable(found):
        raise UserError(f"{what}={path!r} is not callable; name {form}")
    return found
