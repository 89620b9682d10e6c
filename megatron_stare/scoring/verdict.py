"""The interface of verifiers: plain functions (response, label, metadata) -> Verdict.

Verifier processes import this file, so it uses the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

VerdictKind = Literal["correct", "wrong", "unverifiable"]


@dataclass(frozen=True)
class Verdict:
    """A verifier's result.

    An unverifiable sample has no value: it is masked out of the loss and left out of its group's
    mean and standard deviation.
    """

    value: float | None  # the reward counts it; in [0, 1] for every built-in verifier
    verdict: VerdictKind
    extracted: str | None = None  # the answer that was judged; None: the response holds none
    parts: dict[str, float] = field(default_factory=dict)  # the verifiers' values in a weighted sum
    # Why it is unverifiable, or wrong without having been read to the end; what a judge wrote.
    reason: str = ""
    kills: int = 0  # verifier processes that this sample cost
    counts: dict[str, float] = field(default_factory=dict)  # what judging cost


@dataclass(frozen=True)
class Sample:
    """One response to judge."""

    response: str
    label: str
    metadata: dict[str, Any] = field(default_factory=dict)
    prompt: str = ""  # the problem as text, which remote reward models read
    void: str = ""  # why there is nothing to judge; empty: there is something
    outcome: float | None = None  # reward that the episode itself returned

    @property
    def group(self) -> tuple[str, str, str]:
        """The values that all responses to one prompt share."""
        return self.prompt, self.label, repr(self.metadata)


def groups_of(samples: Sequence[Sample], grouped: bool = True) -> list[list[int]]:
    """The places of all responses to each prompt, or each sample alone if not `grouped`. A sample
    without a prompt is alone.
    """
    groups: dict[Any, list[int]] = {}
    for place, one in enumerate(samples):
        key = one.group if grouped and one.prompt else place
        groups.setdefault(key, []).append(place)
    return list(groups.values())


Verifier = Callable[[str, str, dict[str, Any]], Verdict | float]


def judged(right: bool, extracted: str | None, reason: str = "") -> Verdict:
    """1 and correct, or 0 and wrong; `reason`: why a response could not be read."""
    return Verdict(float(right), "correct" if right else "wrong", extracted, reason=reason)


def unverifiable(reason: str, extracted: str | None = None, kills: int = 0) -> Verdict:
    """No value: whether the response is right is unknown, for this reason."""
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
    """Set the verdict that holds if time or memory runs out from here on. A verifier calls this
    before work whose cost the response alone decides. Outside a verifier process it does nothing.
    """
    for announce in _announce:
        announce(verdict)


def announce_with(announce: Callable[[Verdict], None]) -> None:
    """Connect `provisionally` to the pool; for verifier processes."""
    _announce[:] = [announce]


def in_worker(function: Verifier) -> Verifier:
    """Mark a verifier that may hang, crash or eat memory:
    it runs in the pool, under its deadline and limits.
    """
    function.in_worker = True  # type: ignore[attr-defined]
    return function
