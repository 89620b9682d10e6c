"""A model's weights in a Megatron distributed checkpoint, read under any layout."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron_stare.config import UserError
from megatron_stare.policy.topology import Topology

_MODEL = "model"  # and its number: a chunk's part of the state
# Beginnings of the names of tensors that a run's checkpoint holds besides the model.
LOOP_PREFIX, REFERENCE_PREFIX = "loop.", "reference."
TRAINING_PREFIXES = ("optimizer.", "chained_", LOOP_PREFIX, REFERENCE_PREFIX)
# TransformerEngine's state other than weights (fp8 scales); that of grouped experts is numbered.
_EXTRA_STATE = re.compile(r".*_extra_state\d*")
_UNPICKLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
_ONLY_DATA = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_METADATA = {
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
}
_DAMAGE = (OSError, KeyError, EOFError, RuntimeError, pickle.UnpicklingError)
# Names that the .metadata of a checkpoint may contain, besides dtypes.
_NAMES = {("torch.distributed.checkpoint.metadata", name) for name in _METADATA} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")),
    *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
}


def sharded_weights(
    chunks: list[Any], topology: Topology, numbered: bool = True, prefix: str = ""
) -> dict[str, Any]:
    """Megatron's description of this rank's weights, for saving and loading.

    `numbered`: every layer under its own number, so that stages of unequal size and mixed layers
    read each other's checkpoints; otherwise layers are stacked along a first axis, as Megatron once
    did. Of a chunk with adapters only these: its other weights never change. `prefix` begins the
    names of a second model in the same checkpoint.
    """
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    metadata = {"non_homogeneous_layers": numbered, "dp_cp_group": topology.data}
    found = {}
    for number, chunk in enumerate(chunks):
        content = chunk.sharded_state_dict(metadata=metadata)
        if hasattr(chunk, "adapters"):
            content = {name: item for name, item in content.items() if _is_adapter(name)}
        add_prefix_for_sharding(content, prefix)
        found[f"{prefix}{_MODEL}{number}"] = content
    return found


def _is_adapter(name: str) -> bool:
    return name.startswith("adapters.")


def into_model(chunks: list[Any], checkpoint: Path, topology: Topology) -> None:
    """Restore weights alone, from any checkpoint of this format. UserError: it cannot be read."""
    sharded = sharded_weights(chunks, topology)
    state = or_user_error(lambda: load(sharded, checkpoint, topology), checkpoint)
    fill(chunks, state, scales=False)


def common_state(checkpoint: Path) -> dict[str, Any]:
    """The content of a checkpoint apart from tensors. UserError: it cannot be read."""
    from megatron.core import dist_checkpointing

    return or_user_error(
        lambda: dist_checkpointing.load_common_state_dict(str(checkpoint)), checkpoint
    )


def fill(chunks: list[Any], state: dict[str, Any], *, scales: bool, prefix: str = "") -> None:
    """Put what `load` returned into the chunks. An extra state that the checkpoint lacks stays as
    the module made it: fp8 then begins with scales of 1, as a new model does.

    `scales`: the checkpoint is of the same run, so its extra states are loaded too. Those of
    delayed fp8 are pickles, which TransformerEngine unpickles only if they are trusted.
    """
    for number, chunk in enumerate(chunks):
        found = state.get(f"{prefix}{_MODEL}{number}", {})  # Megatron drops what is empty
        content = {
            key: value for key, value in found.items() if scales or not _EXTRA_STATE.fullmatch(key)
        }
        with _environment(_UNPICKLE) if scales else contextlib.nullcontext():
            missing, unexpected = chunk.load_state_dict(content, strict=False)
        lost = [
            name
            for name in (*missing, *unexpected)
            if not _EXTRA_STATE.fullmatch(name)
            and (_is_adapter(name) or not hasattr(chunk, "adapters"))
        ]
        if lost:
            raise RuntimeError(
                f"no weights for {', '.join(lost)}: a defect of policy/model_state.py"
            )


def copy_weights(source: list[Any], target: list[Any]) -> None:
    """Put the weights and fp8 scales of chunks into those of a second copy of their model."""
    state = {f"{_MODEL}{number}": chunk.state_dict() for number, chunk in enumerate(source)}
    fill(target, state, scales=True)


@contextlib.contextmanager
def _environment(name: str) -> Iterator[None]:
    """A variable of the environment at 1. TransformerEngine reads one of them before it unpickles
    an extra state. Another one limits torch.load to plain data, even if its caller allows objects.
    """
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles what torch.distributed.checkpoint writes, and nothing that runs code."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong there")
        return super().find_class(module, name)


def read_metadata(directory: Path) -> Metadata:
    """The .metadata of a checkpoint, read as data. Call it before Megatron or torch unpickle the
    file, which would run what a prepared one names. UserError: damaged, or not of a checkpoint.
    """
    try:
        with (directory / ".metadata").open("rb") as file:
            found = _MetadataUnpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds an object of type {type(found).__name__}")
    except Exception as error:  # a damaged pickle may raise anything
        raise UserError(
            f"{directory}/.metadata is damaged ({type(error).__name__}: {error}); restore it"
        ) from None
    return found


def is_distributed(directory: str | Path) -> bool:
    """Whether the directory holds a Megatron distributed checkpoint."""
    return (Path(directory) / "metadata.json").is_file() and (
        Path(directory) / ".metadata"
    ).is_file()


def load(sharded: dict[str, Any], checkpoint: Path, topology: Topology) -> dict[str, Any]:
    """Megatron's load, in place where the tensors are there. Ranks that want the same tensors share
    the reading and send each other what they read. Extra states (TransformerEngine's fp8 scales)
    that the checkpoint lacks are not asked for.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    present = read_metadata(checkpoint).state_dict_metadata
    for name, content in sharded.items():
        if name.removeprefix(REFERENCE_PREFIX).startswith(_MODEL):
            for key, item in list(content.items()):
                if (
                    isinstance(item, ShardedObject)
                    and _EXTRA_STATE.fullmatch(key)
                    and item.unique_key not in present
                ):
                    del content[key]
    strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), topology.data)
    return dist_checkpointing.load(sharded, str(checkpoint), strategy)


def or_user_error(read: Callable[[], dict[str, Any]], checkpoint: Path) -> dict[str, Any]:
    """The result of `read`, with no pickle but of data. UserError: Megatron or torch cannot read
    the checkpoint, which the message names.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingException

    read_metadata(checkpoint)
    try:
        with _environment(_ONLY_DATA):
            return read()
    except (*_DAMAGE, CheckpointingException, CheckpointException) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):  # what several ranks raised
            cause = next(iter(error.failures.values()))[0]
        if not isinstance(cause, Exception):  # Ctrl-C, which says nothing of the checkpoint
            raise cause from None
        lines = str(cause).strip().splitlines()
        first = lines[0] if lines else type(cause).__name__
        if isinstance(cause, pickle.UnpicklingError):
            first = "it holds objects that are no data, or is damaged"
        raise UserError(
            f"checkpoint {checkpoint} cannot be loaded ({first}); choose another with --load"
        ) from None
