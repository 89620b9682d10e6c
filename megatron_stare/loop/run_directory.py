"""The directory of one run: config.yaml, metrics.jsonl, checkpoints, records of steps.
A run continues in it, never over it. Nothing here imports torch.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stare import config as configuration
from megatron_stare.config import Config, UserError
from megatron_stare.policy.checkpoints.names import checkpoint_before, step_of
from megatron_stare.system import atomic_write, json_line, try_lock

CONFIG_NAME, LOCK_NAME, HISTORY_NAME = "config.yaml", ".lock", "config_history.jsonl"
PROMPTS_NAME = "prompts.json"  # the number and the digest of the training prompts
HEAD_NAME = "step.json"  # of a step's record
MODEL_NAME, REFERENCE_NAME = "model", "reference"  # of a bundle, in the place of the run's own
SOLVED_NAME = "solved.txt"  # why a run ended early with nothing left to learn
LOCK_PATIENCE_SECONDS = 60.0

# The settings that identify a run: random numbers, data, model and task. All others may change
# when it is continued; a change is printed and kept in HISTORY_NAME.
FIXED = (
    "run.seed",
    "data.",
    "policy.hf_checkpoint",
    "policy.dtype",
    "loss.name",
    "scoring.reward",
    "scoring.rewards",
    "scoring.per_source",
    "tools.environment",
    "cold_start.",
)


def is_fixed(key: str) -> bool:
    """Whether a dotted field must stay what it was when a run is continued."""
    return any(
        key == name or key.startswith(name if name.endswith(".") else f"{name}.") for name in FIXED
    )


def claim(config: Config) -> None:
    """Write config.yaml into run.dir, which the caller holds (`locked`); of a run that is
    continued, print and keep the changed settings. UserError: another run is there, or the place
    cannot be written.
    """
    directory, changes = Path(config.run.dir), changes_of(config)
    with _written(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if changes:
            _keep(changes, directory / HISTORY_NAME)
        configuration.dump(config, directory / CONFIG_NAME)


@contextmanager
def _written(directory: Path) -> Iterator[None]:
    """UserError for an OSError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"run.dir={directory} cannot be written ({error.strerror}); choose another run.dir"
        ) from None


def changes_of(config: Config) -> dict[str, tuple[Any, Any]]:
    """Field -> values, old and new, of the settings under which the run in run.dir would continue;
    empty for a new run. UserError: the run there is another one.
    """
    directory = Path(config.run.dir)
    existing = directory / CONFIG_NAME
    changes: dict[str, tuple[Any, Any]] = {}
    if existing.is_file() and has_begun(directory):
        for key, old, new in configuration.differences(configuration.load(existing), config):
            if is_fixed(key):
                raise UserError(
                    f"{directory} holds a run with {key}={old!r}, not {new!r}; choose another "
                    "run.dir"
                )
            if key != "run.dir":
                changes[key] = (old, new)
    return changes


def claim_prompts(config: Config, count: int, digest: str) -> None:
    """Keep the number and the digest of the training prompts. UserError: as of check_prompts."""
    check_prompts(config, count, digest)
    place = Path(config.run.dir) / PROMPTS_NAME
    content = json_line({"prompts": count, "digest": digest})
    # A resumed run writes nothing here, so that a full disk does not end it.
    if not place.is_file() or place.read_text() != content:
        with _written(place.parent):
            place.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(place, content)


def check_prompts(config: Config, count: int, digest: str) -> None:
    """UserError: the run that would continue in run.dir has drawn from other prompts; its position
    and its rollouts name prompts by their place.
    """
    directory, place = Path(config.run.dir), Path(config.run.dir) / PROMPTS_NAME
    known: dict[str, Any] = {}
    if place.is_file() and has_begun(directory):
        try:
            known = json.loads(place.read_text())
        except ValueError as error:
            raise UserError(f"{place} is damaged ({error}); restore it, or remove it") from None
    if known and known != {"prompts": count, "digest": digest}:
        raise UserError(
            f"{directory} holds a run on other training prompts: {known['prompts']} with digest "
            f"{known['digest']}, and now {count} with digest {digest}; restore the data, the "
            "packages that make it and the tokenizer (with data.drop_evaluation_prompts also "
            "evaluation.eval_data), or choose another run.dir"
        )


def reopen(directory: Path) -> None:
    """A run that continues is not solved any more."""
    (directory / SOLVED_NAME).unlink(missing_ok=True)


def end_solved(directory: Path, sentence: str, step: int) -> None:
    """Print, and keep for a comparison, why a run ends before train.num_rollout."""
    advice = "; harder problems would teach more"
    if not step:
        advice = " before the first step; choose harder problems, or check scoring.reward"
    atomic_write(directory / SOLVED_NAME, f"{sentence}{advice}")
    print(f"the run ends after {step} steps: {sentence}{advice}", flush=True)


def say_complete(directory: Path, step: int, total: int) -> None:
    """Print that a run has nothing to continue."""
    print(
        f"{directory} is complete: {step} steps, and train.num_rollout={total}; raise it to train "
        "on, or choose another run.dir",
        flush=True,
    )


def solved(directory: Path) -> str:
    """The sentence that `end_solved` kept; empty: the run there did not end so."""
    place = directory / SOLVED_NAME
    return place.read_text() if place.is_file() else ""


def has_begun(directory: Path) -> bool:
    """Whether a run has left anything there that a continued run would use: a row of metrics, a
    checkpoint, a rollout. A start that failed before, for example by a typo, claims nothing.
    """
    kept = ("metrics.jsonl", "checkpoints/*", "rollouts/*", "seed*/*")
    return any(
        not place.is_file() or place.stat().st_size
        for pattern in kept
        for place in directory.glob(pattern)
    )


def _keep(changes: dict[str, tuple[Any, Any]], history: Path) -> None:
    """One line of JSON for this continuation, and one on the terminal for each change."""
    for key, (old, new) in changes.items():
        print(f"{history.parent}: {key}: {old!r} -> {new!r}", file=sys.stderr, flush=True)
    line = {"time": datetime.datetime.now(datetime.UTC).isoformat(), "changes": changes}
    with history.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@contextmanager
def locked(directory: Path, enabled: bool = True) -> Iterator[None]:
    """Hold the directory of a run against a second process. Waits for one that is just ending.
    UserError: it does not end, or the place cannot be written. Not `enabled`: nothing, as on every
    rank but the first.
    """
    if not enabled:
        yield
        return
    deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
    with _written(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / LOCK_NAME).open("w")
    with lock as file:
        while not try_lock(file):
            if time.monotonic() > deadline:
                raise UserError(
                    f"another process is training in {directory}; stop it or choose another run.dir"
                )
            time.sleep(0.5)
        yield  # closing the file gives the lock back, and so does the end of the process


@dataclass(frozen=True)
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


def replayed_heads(run: Path, step: int) -> tuple[Path | None, list[Head]]:
    """The checkpoint from which a replay of the step starts, None for the run's first weights, and
    the records of all steps from there to this one. UserError: one is missing, or cannot be read.
    """
    directory, checkpoint = records_directory(run), checkpoint_before(run, step)
    read_head(directory, step)
    first, known = _first_replayed(checkpoint), set(recorded_steps(directory))
    if missing := [each for each in range(first, step) if each not in known]:
        usable = [
            each
            for each in sorted(known)
            if known.issuperset(range(_first_replayed(checkpoint_before(run, each)), each))
        ]
        start = f"checkpoint {checkpoint.name}" if checkpoint else "the run's first weights"
        there = f"one of the steps {usable[0]} to {usable[-1]}" if usable else "another run"
        raise UserError(
            f"step {step} is computed again from {start}, and step {missing[0]} has no record in "
            f"{directory}; choose {there} (run.record=all keeps every record)"
        )
    return checkpoint, [read_head(directory, each) for each in range(first, step + 1)]


def _first_replayed(checkpoint: Path | None) -> int:
    return step_of(checkpoint) + 1 if checkpoint else 1


def read_config(directory: Path, head: Head) -> Config:
    """The configuration that the step was taken under."""
    return configuration.load(directory / f"{head.attempt}.yaml")


def folder_of(directory: Path, step: int) -> Path:
    """The folder of one step's record."""
    return directory / f"step_{step:08d}"
