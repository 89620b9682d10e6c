"""What a verifier is: a plain function (response, label, metadata) -> Verdict.
Standard library only.

Worker processes import this file, so nothing here may import torch or the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

VerdictKind = Literal["correct", "wrong", "unverifiable"]


@dataclass(frozen=True)
class Verdict:
    """What a verifier found. `value` is what the reward counts, in [0,
    1] for every built-in verifier.

    An unverifiable sample has no value: it is masked out of the loss and left out of its group's
    mean and spread. `extracted` is the answer that was judged, None where the response holds none;
    `parts` are the values of the single verifiers behind a weighted sum; `reason` says why a sample
    is unverifiable, or wrong although no one could read it to the end; `kills` counts the verifier
    processes that this sample cost.
    """

    value: float | None
    verdict: VerdictKind
    extracted: str | None = None
    parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    kills: int = 0


@dataclass(frozen=True)
class Sample:
    """One response to judge. `prompt` is the problem as text, which remote reward models read.
    `void` says why there is nothing to judge; empty: there is.
    """

    response: str
    label: str
    metadata: dict[str, Any] = field(default_factory=dict)
    prompt: str = ""
    void: str = ""


Verifier = Callable[[str, str, dict[str, Any]], Verdict | float]


def judged(right: bool, extracted: str | None, reason: str = "") -> Verdict:
    """1 and correct, or 0 and wrong; `reason`: why a response is wrong that could not be read."""
    return Verdict(float(right), "correct" if right else "wrong", extracted, reason=reason)


def unverifiable(reason: str, extracted: str | None = None, kills: int = 0) -> Verdict:
    """No value: no one can tell whether the response is right, and `reason` says why."""
    return Verdict(None, "unverifiable", extracted, reason=reason, kills=kills)


def as_verdict(result: Any) -> Verdict:
    """A Verdict as it is; a number as a value, right where it is positive;
    anything else is unverifiable.
    """
    if isinstance(result, Verdict):
        return result
    try:
        value = float(result)
    except Exception:  # of an object's __float__, or OverflowError of a huge integer
        return unverifiable(
            f"the verifier returned {type(result).__name__}, neither a number nor a Verdict"
        )
    if not math.isfinite(value):
        return unverifiable(f"the verifier returned {value}")
    return Verdict(value, "correct" if value > 0 else "wrong")


def printable(text: str) -> str:
    """Foreign text for a message: at most 300 characters, without line breaks and escapes."""
    return repr(text[:300])[1:-1]


_announce: list[Callable[[Verdict], None]] = []


def provisionally(verdict: Verdict) -> None:
    """Tell the pool, from a verifier in a worker, what is to hold if no verdict comes in time or
    memory runs out: what follows is the response's own doing. Elsewhere nothing happens.
    """
    for announce in _announce:
        announce(verdict)


def announce_with(announce: Callable[[Verdict], None]) -> None:
    """How `provisionally` reaches the pool; for worker processes."""
    _announce[:] = [announce]


def in_worker(function: Verifier) -> Verifier:
    """Mark a verifier that may hang, crash or eat memory:
    it runs in the pool, under its deadline and limits.
    """
    function.in_worker = True  # type: ignore[attr-defined]
    return function
