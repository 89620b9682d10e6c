"""The records of a run, for use elsewhere: `bundle` and `rollouts`.

`rollouts RUN` writes a step's rollouts, or the responses of an evaluation, as rows of text.

`bundle RUN STEP` writes what somebody else needs to replay a step, in one tar file.

    <run>_step_12/  metrics.jsonl, records/ (of the steps since the checkpoint), checkpoints/ (one),
                    model/ and, for a KL term, reference/

Unpacked, `python -m megatron_stare train <run>_step_12 --replay 12` replays it.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from megatron_stare.config import Config, UserError
from megatron_stare.loop.run_directory import (
    MODEL_NAME,
    REFERENCE_NAME,
    read_config,
    read_head,
    recorded_steps,
    records_directory,
    replayed_heads,
)
from megatron_stare.policy.checkpoints.names import step_of
from megatron_stare.reporting.logbook import METRICS_NAME, read_metrics
from megatron_stare.reporting.problem_scores import responses_directory
from megatron_stare.system import atomic_file


def trained(run: Path, step: int | None) -> Iterator[dict[str, Any]]:
    """The rollouts of a step; None: of the newest recorded one (`_newest`). UserError: there is no
    record.
    """
    # These modules import torch, which `bundle` does not need.
    from megatron_stare.loop.record import recorded_groups
    from megatron_stare.records import Rollout, readable

    records = records_directory(run)
    head = read_head(records, _newest(run, recorded_steps(records)) if step is None else step)
    for number, group in enumerate(recorded_groups(records, head)):
        for sample, rollout in enumerate(cast(tuple[Rollout, ...], group.rollouts)):
            place = {"step": head.step, "group": number, "sample": sample}
            yield (
                place
                | readable(group.prompt, rollout)
                | {
                    "reward": rollout.reward,
                    "verdict": rollout.verdict,
                    "reward_parts": rollout.reward_parts,
                    "advantage": rollout.advantage,
                    "weight_version": rollout.weight_version,
                    "episode": rollout.episode,
                }
            )


def evaluated(run: Path, step: int | None, name: str) -> list[dict[str, Any]]:
    """The responses of the evaluation of a set after a step; None: of the newest evaluation
    (`_newest`). UserError: there are none.
    """
    kept = responses_directory(run, 0).parent
    found = {step_of(each.parent): each for each in kept.glob("step_*/*") if each.name == name}
    if not found:
        names = ", ".join(sorted({each.name for each in kept.glob("step_*/*")})) or "none"
        raise UserError(
            f"--evaluation {name}: {kept} has no responses of this set (there: {names}); choose a "
            "set that was evaluated, or evaluate it"
        )
    if step is not None and step not in found:
        steps = ", ".join(map(str, sorted(found)))
        raise UserError(f"--step {step}: {name} was evaluated after the steps {steps}; choose one")
    place = found[_newest(run, sorted(found)) if step is None else step]
    rows: list[dict[str, Any]] = []
    for each in place.glob("*.jsonl"):
        with each.open(encoding="utf-8") as file:
            rows += map(json.loads, file)
    return sorted(rows, key=lambda row: (row["index"], row["sample"]))


def _newest(run: Path, steps: Sequence[int]) -> int:
    """The last of these steps, 0 of none, without those after the last line of metrics.jsonl: the
    run went back from them, or has not finished them. If all are such steps, the last one.
    """
    file = run / METRICS_NAME
    rows = read_metrics(file) if file.is_file() else []
    last = rows[-1]["step"] if rows else 0
    return max((step for step in steps if step <= last), default=max(steps, default=0))


def bundle(run: Path, step: int, output: Path | None) -> tuple[Path, int]:
    """Write the file; its place and its bytes. UserError: something is missing, or in the way."""
    target = output or Path(f"{run.name}_step_{step}.tar")
    if target.exists():
        raise UserError(f"{target} is there already; choose another --output")
    parts = _parts(run, step)
    for source in parts.values():
        if not source.exists():
            raise UserError(f"{source} is missing, and the step cannot be replayed without it")
    try:
        with (
            atomic_file(target, "wb") as file,
            # a model of the Hugging Face cache is a directory of links
            tarfile.open(fileobj=file, mode="w", dereference=True) as archive,
        ):
            for name, source in parts.items():
                archive.add(source.resolve(), f"{run.name}_step_{step}/{name}")
    except OSError as error:
        raise UserError(
            f"{target} cannot be written ({error.strerror}); choose another --output"
        ) from None
    return target, target.stat().st_size


def _parts(run: Path, step: int) -> dict[str, Path]:
    """The files of the bundle: the name of each in the archive -> the path of its source."""
    records = records_directory(run)
    checkpoint, heads = replayed_heads(run, step)
    config = read_config(records, heads[-1])
    names = [f"records/step_{head.step:08d}" for head in heads]
    names += sorted({f"records/{head.attempt}.yaml" for head in heads})
    names += [METRICS_NAME, *([f"checkpoints/{checkpoint.name}"] if checkpoint else [])]
    return {name: run / name for name in names} | _models(config, run)


def _models(config: Config, run: Path) -> dict[str, Path]:
    """The weights a run starts from: those of the bundle that this run was unpacked from, or its
    own.
    """
    wanted = {MODEL_NAME: config.policy.hf_checkpoint}
    if config.reference:
        wanted[REFERENCE_NAME] = config.reference
    return {
        name: run / name if (run / name).is_dir() else Path(path) for name, path in wanted.items()
    }
