"""Results of the stages: rows of figures, one result file per stage."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_stare.config import UserError
from megatron_stare.system import atomic_write

Verdict = Literal["OK", "WARN", "FAIL", "-"]
Status = Literal["finished", "failed", "timed out", "skipped", "unfinished"]


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


@dataclass
class Result:
    """The result file of one stage: its rows so far, and how it ended."""

    stage: str
    status: Status = "unfinished"
    seconds: float = 0.0
    machine: str = ""
    reason: str = ""  # why it failed or was skipped
    rows: list[Measurement] = field(default_factory=list)

    @property
    def faulty(self) -> bool:
        """Whether the stage failed as a whole, or one of its rows did."""
        return self.status not in ("finished", "skipped") or self.count("FAIL") > 0

    def count(self, verdict: Verdict) -> int:
        """The number of rows with this verdict."""
        return sum(row.verdict == verdict for row in self.rows)

    def write(self, directory: Path) -> None:
        """Write the result file atomically."""
        content = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
        atomic_write(directory / f"{self.stage}.json", content)


def read_result(directory: Path, stage: str) -> Result | None:
    """The stage's result; None if there is none. UserError: the file is damaged."""
    file = directory / f"{stage}.json"
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        rows = [Measurement(**row) for row in content.pop("rows")]
        return Result(**content, rows=rows)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} is not a result of a stage ({error}); remove it") from error
