"""A model's weights in a Megatron distributed checkpoint, read under any layout."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader

from megatron_stare.config import UserError
from megatron_stare.policy.topology import Topology

# TransformerEngine's state other than weights (fp8 scales); that of grouped experts is numbered.
_EXTRA_STATE = re.compile(r".*_extra_state\d*")
_UNPICKLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def sharded_weights(chunks: list[Any], topology: Topology, numbered: bool = True) -> dict[str, Any]:
    """Megatron's description of this rank's weights, for saving and loading.

    `numbered`: every layer under its own number, so that stages of unequal size and mixed layers
    read each other's checkpoints; otherwise layers are stacked along a first axis, as Megatron once
    did.
    """
    metadata = {"non_homogeneous_layers": numbered, "dp_cp_group": topology.data}
    return {
        f"model{n}": chunk.sharded_state_dict(metadata=metadata) for n, chunk in enumerate(chunks)
    }


def into_model(chunks: list[Any], checkpoint: Path, topology: Topology) -> None:
    """Restore weights alone, from any checkpoint of this format. UserError: it cannot be read."""
    sharded = sharded_weights(chunks, topology)
    state = or_user_error(lambda: load(sharded, checkpoint, topology), checkpoint)
    fill(chunks, state, scales=False)


def fill(chunks: list[Any], state: dict[str, Any], *, scales: bool) -> None:
    """Put what `load` returned into the chunks. An extra state that the checkpoint lacks stays as
    the module made it: fp8 then begins with scales of 1, as a new model does.

    `scales`: the checkpoint is of the same run, so its extra states are loaded too. Those of
    delayed fp8 are pickles, which TransformerEngine unpickles only if they are trusted.
    """
    for number, chunk in enumerate(chunks):
        content = {
            key: value
            for key, value in state[f"model{number}"].items()
            if scales or not _EXTRA_STATE.fullmatch(key)
        }
        with _trusted_pickles() if scales else contextlib.nullcontext():
            missing, unexpected = chunk.load_state_dict(content, strict=False)
        lost = [name for name in (*missing, *unexpected) if not _EXTRA_STATE.fullmatch(name)]
        if lost:
            raise RuntimeError(
                f"no weights for {', '.join(lost)}: a defect of policy/model_state.py"
            )


@contextlib.contextmanager
def _trusted_pickles() -> Iterator[None]:
    """TransformerEngine asks the environment whether it may unpickle an extra state."""
    before = os.environ.get(_UNPICKLE)
    os.environ[_UNPICKLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_UNPICKLE]
        else:
            os.environ[_UNPICKLE] = before


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

    present = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    for name, content in sharded.items():
        if name.startswith("model"):
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
    """What `read` returns; UserError naming the checkpoint for whatever
    Megatron or torch raise over a bad one.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        return read()
    except (CheckpointingException, OSError, KeyError, EOFError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"checkpoint {checkpoint} cannot be loaded ({first}); choose another with --load"
        ) from None
