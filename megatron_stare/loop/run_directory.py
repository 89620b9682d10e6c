"""The directory of one run: config.yaml, metrics.jsonl, checkpoints.
A run continues in it, never over it.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from megatron_stare import config as configuration
from megatron_stare.config import Config, UserError

CONFIG_NAME, LOCK_NAME = "config.yaml", ".lock"
LOCK_PATIENCE_SECONDS = 60.0

# What may change when a run is continued: where and how long it runs and how often it looks, not
# what it computes.
_FREE = (
    "run.",
    "evaluation.",
    "compare.",
    "train.num_rollout",
    "policy.tensor_model_parallel_size",
    "policy.pipeline_model_parallel_size",
    "policy.virtual_pipeline_model_parallel_size",
    "policy.num_layers_in_",
    "policy.recompute_granularity",
    "policy.context_parallel_size",
    "policy.expert_model_parallel_size",
    "policy.expert_tensor_parallel_size",
    "policy.sequence_parallel",
    "policy.max_tokens_per_gpu",
    "policy.packed_sequences",
    "policy.head",
    "rollout.max_generation_rounds",
    "rollout.accept_partial_batch",
    "rollout.over_sampling_batch_size",
    "rollout.engine_batch_size",
    "sglang.",
)


def claim(config: Config) -> None:
    """Write config.yaml into run.dir. UserError:
    another config's run is there, or the place cannot be written.
    """
    directory = Path(config.run.dir)
    existing = directory / CONFIG_NAME
    if existing.is_file():
        for key, old, new in configuration.differences(configuration.load(existing), config):
            if not key.startswith(_FREE) or key == "run.seed":
                raise UserError(
                    f"{directory} holds a run with {key}={old!r}, not {new!r}; choose another "
                    "run.dir"
                )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        configuration.dump(config, existing)
    except OSError as error:
        raise UserError(
            f"run.dir={directory} cannot be written ({error.strerror}); choose another run.dir"
        ) from None


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory against a second process. Waits for one that is just ending;
    UserError if it does not end.
    """
    deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
    with (directory / LOCK_NAME).open("w") as file:
        while not _try_lock(file):
            if time.monotonic() > deadline:
                raise UserError(
                    f"another process is training in {directory}; stop it or choose another run.dir"
                )
            time.sleep(0.5)
        yield  # closing the file gives the lock back, and so does the end of the process


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
