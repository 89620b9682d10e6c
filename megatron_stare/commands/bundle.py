"""`bundle RUN STEP`: what somebody else needs to replay a step, in one tar file.

    <run>_step_12/  metrics.jsonl, records/ (of the steps since the checkpoint), checkpoints/ (one),
                    model/ and, for a KL term, reference/

Unpacked, `python -m megatron_stare train <run>_step_12 --replay 12` replays it.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from megatron_stare.config import Config, UserError
from megatron_stare.loop.recording.heads import (
    MODEL_NAME,
    REFERENCE_NAME,
    read_config,
    read_head,
    records_directory,
)
from megatron_stare.policy.checkpoints.names import checkpoint_before, step_of
from megatron_stare.reporting.logbook import METRICS_NAME
from megatron_stare.system import atomic_file


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
    config = read_config(records, read_head(records, step))
    checkpoint = checkpoint_before(run, step)
    start = step_of(checkpoint) if checkpoint else 0
    heads = [read_head(records, each) for each in range(start + 1, step + 1)]
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
