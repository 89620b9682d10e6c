"""Weights by way of a disk that the servers read too (sglang.sync_method=disk), in directories that
belong to the run alone.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_stare.config import SGLangConfig, UserError
from megatron_stare.policy.huggingface.files import copy_companions
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.server import Server
from megatron_stare.rollout.sglang.weights import results
from megatron_stare.sync.weight_sync import Transport, WeightBucket
from megatron_stare.system import atomic_write, digest

# Below sglang.sync_directory: a directory of a run's own, and the file that says so.
OWN_PREFIX, OWN_MARKER = "megatron_stare-weights-", ".written_by_megatron_stare"
INDEX = "model.safetensors.index.json"


def check_own(directory: Path, remedy: str) -> None:
    """UserError: the directory exists, and no run wrote it: it has no marker."""
    if not os.path.lexists(directory):
        return
    marked = (directory / OWN_MARKER).is_file()
    if (
        directory.is_symlink()
        or not directory.is_dir()
        or (any(directory.iterdir()) and not marked)
    ):
        raise UserError(
            f"{directory} is in the way and was not written by a run (it has no {OWN_MARKER}); "
            f"move it, or {remedy}"
        )


def save_for_servers(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a safetensors file with the user's default permissions: servers may run as another
    user, and the package makes files that only their owner can read. OSError: the disk is full.
    """
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from None
    file.chmod(mode)


def load_directories(
    pool: SGLangPool, directories: Mapping[Server, str], tag: str, timeout: float
) -> None:
    """Have each server load the weights `tag` from its directory. Returns when all have."""
    answers = []
    for server, directory in directories.items():
        body = {
            "model_path": directory,
            "weight_version": tag,
            "flush_cache": not pool.keeps_cache,
            # By default a server uses the format that it was started with: "dummy" would load no
            # weights.
            "load_format": "auto",
        }
        path = "/update_weights_from_disk"
        answers.append(pool.run(server.client.update_weights(path, body, timeout)))
    results(answers, timeout)


class DiskTransport(Transport):
    """One safetensors file per bucket and an index; loaded when the last one is written, then
    removed.

    All files are in one directory of this run below sync_directory, with a marker. A directory
    without the marker belongs to the user and is never changed.
    """

    session = False

    def __init__(
        self, pool: SGLangPool, settings: SGLangConfig, model: str, directory: Path
    ) -> None:
        """`model`: the directory with the other files of what servers hold."""
        self.pool, self.settings, self.model = pool, settings, model
        place = Path(settings.sync_directory) if settings.sync_directory else directory
        self.directory = place.resolve() / f"{OWN_PREFIX}{_name_of_run(directory)}"
        self.files: dict[str, str] = {}

    def send(self, bucket: WeightBucket, servers: Sequence[Server], tag: str | None) -> None:
        """Write the bucket; with the last one, have every server read the whole. UserError: it
        cannot be written.
        """
        try:
            self._write(bucket, last=tag is not None)
        except OSError as error:
            raise UserError(
                f"{self.directory} cannot be written ({error}); make room, or choose another "
                "sglang.sync_directory"
            ) from None
        if tag is None:
            return
        self.files = {}
        directories = dict.fromkeys(servers, str(self.directory))
        load_directories(self.pool, directories, tag, self.settings.sync_timeout)
        self._remove()

    def _write(self, bucket: WeightBucket, *, last: bool) -> None:
        """Write the bucket as a file; after the last one also the model's other files."""
        if not self.files:
            self._remove()
            self.directory.mkdir(parents=True)
            (self.directory / OWN_MARKER).touch()
        file = f"model-{len(set(self.files.values())):05d}.safetensors"
        tensors = {
            name: tensor.detach().cpu().contiguous().clone() for name, tensor in bucket.tensors
        }
        save_for_servers(tensors, self.directory / file)
        self.files |= dict.fromkeys(tensors, file)
        if last:
            index = {"metadata": {}, "weight_map": self.files}
            (self.directory / INDEX).write_text(json.dumps(index))
            shutil.copyfile(Path(self.model) / "config.json", self.directory / "config.json")
            copy_companions(Path(self.model), self.directory)

    def abandon(self, error: Exception) -> None:
        """The next stream starts with an empty directory."""
        self.files = {}

    def _remove(self) -> None:
        """Remove this run's files. UserError: another program made the directory."""
        own, marker = self.directory, self.directory / OWN_MARKER
        check_own(own, "choose another sglang.sync_directory")
        if not own.is_dir():
            return
        for file in own.iterdir():  # the marker last: a kill must not leave weights without it
            if file.is_dir():
                shutil.rmtree(file)
            elif file != marker:
                file.unlink()
        marker.unlink(missing_ok=True)
        own.rmdir()


def _name_of_run(directory: Path) -> str:
    """The same name in every attempt of a run, on any machine, so that the next one removes what a
    killed one has left. A random number, which the run's `directory` keeps, decides it: the path
    may be another run's on another machine.
    """
    number = directory / "number"
    if not number.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        atomic_write(number, uuid.uuid4().hex)
    return digest(f"{number.read_text()}:{directory.resolve()}", 12)  # a copied run has another
