"""The heads of a run's records and the places of the records, without reading any."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from megatron_stare import config as configuration
from megatron_stare.config import Config, UserError

HEAD_NAME = "step.json"
MODEL_NAME, REFERENCE_NAME = "model", "reference"  # of a bundle, in the place of the run's own


@dataclasses.dataclass(frozen=True)
class Head:
    """The facts of a recorded step that every rank knows. `holders`: of each group, the rank that
    has it; `weights`: the fingerprint of the weights it began with.
    """

    step: int
    attempt: str
    ranks: int
    holders: tuple[int, ...]
    signal: bool
    weights: str


def records_directory(run: Path) -> Path:
    """The directory of the records of a run."""
    return run / "records"


def recorded_steps(directory: Path) -> list[int]:
    """The steps whose record is whole, in order."""
    heads = directory.glob(f"step_*/{HEAD_NAME}")
    return sorted(int(head.parent.name.removeprefix("step_")) for head in heads)


def read_head(directory: Path, step: int) -> Head:
    """UserError: there is no record of the step, or it cannot be read."""
    file = folder_of(directory, step) / HEAD_NAME
    try:
        fields = json.loads(file.read_text())
        return Head(**fields | {"holders": tuple(fields["holders"])})
    except FileNotFoundError:
        steps = recorded_steps(directory)
        there = f"{steps[0]} to {steps[-1]}" if steps else "none"
        raise UserError(
            f"step {step} has no record in {directory} (there: {there}); run.record=replayable "
            "keeps those since the oldest checkpoint, run.record=all keeps every one"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} cannot be read ({error}); choose another step") from None


def read_config(directory: Path, head: Head) -> Config:
    """The configuration that the step was taken under."""
    return configuration.load(directory / f"{head.attempt}.yaml")


def folder_of(directory: Path, step: int) -> Path:
    """The folder of one step's record."""
    return directory / f"step_{step:08d}"
