"""The rows of a stage: what was measured, what was expected, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["OK", "WARN", "FAIL", "-"]


class Skipped(Exception):
    """The stage does not apply to this machine; the text says why."""


@dataclass(frozen=True)
class Day:
    """The settings of one acceptance day."""

    path: Path  # the directory of the results
    gpus: int  # that the stages may use; 0: none is seen
    model: str = ""  # a Hugging Face directory; "": a random model that the kit writes
    rehearsal: bool = False  # tiny shapes
    overrides: tuple[str, ...] = ()  # of every run that a stage starts


@dataclass(frozen=True)
class Measurement:
    """One line of the report. `figure` names the field of planning.machine.Machine that the
    measured value replaces; `rated` marks a verdict that depends on the machine's speed.
    """

    what: str
    measured: float | str
    expected: float | str = ""
    unit: str = ""
    verdict: Verdict = "-"
    figure: str = ""
    rated: bool = False

    @property
    def ratio(self) -> float | None:
        """Measured / expected, where both are numbers."""
        if isinstance(self.measured, str) or isinstance(self.expected, str) or not self.expected:
            return None
        return self.measured / self.expected


def at_least(
    what: str, measured: float, expected: float, unit: str, figure: str = ""
) -> Measurement:
    """A figure that is better if higher: OK from 85 % of the expected one, WARN from 60 %."""
    ratio = measured / expected
    verdict: Verdict = "OK" if ratio >= 0.85 else "WARN" if ratio >= 0.6 else "FAIL"
    return Measurement(what, measured, expected, unit, verdict, figure, rated=True)


def at_most(
    what: str, measured: float, expected: float, unit: str, figure: str = ""
) -> Measurement:
    """A figure that is better if lower: OK up to 120 % of the expected one, WARN up to 200 %."""
    ratio = measured / expected
    verdict: Verdict = "OK" if ratio <= 1.2 else "WARN" if ratio <= 2.0 else "FAIL"
    return Measurement(what, measured, expected, unit, verdict, figure, rated=True)


def within(what: str, measured: float, limit: float, unit: str = "") -> Measurement:
    """An error against its limit: FAIL beyond it, and for NaN."""
    return Measurement(what, measured, limit, unit, "OK" if measured <= limit else "FAIL")


def holds(what: str, true: bool, found: str = "", otherwise: Verdict = "FAIL") -> Measurement:
    """A statement that must be true."""
    return Measurement(what, found or str(true).lower(), verdict="OK" if true else otherwise)
