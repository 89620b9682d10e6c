"""Training checkpoints through megatron.core.dist_checkpointing: weights, optimizer, schedule, the loop's own state.

A checkpoint is written to a temporary directory, renamed when whole, and only then named by the `latest` pointer: a
kill at any moment leaves the previous one.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_stare.config import UserError
from megatron_stare.policy.actor import Actor

_LATEST = "latest"


def latest(directory: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None. UserError: the pointer names one that is not there."""
    pointer = directory / _LATEST
    if not pointer.is_file():
        return None
    found = directory / pointer.read_text().strip()
    if not found.is_dir():
        raise UserError(f"{pointer} names {found.name}, which is missing; write an existing step_* directory into it")
    return found


def save(actor: Actor, directory: Path, step: int, loop_state: dict[str, Any], keep_last: int) -> Path:
    """Write checkpoint `step` and point `latest` to it; older ones beyond `keep_last` go. Collective."""
    from megatron.core import dist_checkpointing

    final, temporary = directory / f"step_{step:08d}", directory / f".writing_{step:08d}"
    if actor.topology.is_first:
        for leftover in directory.glob(".writing_*"):
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
    dist.barrier()
    scheduler = actor.scheduler.state_dict()
    state = _sharded_state(actor, scheduler, is_loading=False) | {"loop": loop_state, "scheduler": scheduler}
    dist_checkpointing.save(state, str(temporary))
    dist.barrier()
    if actor.topology.is_first:
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _point_to(final)
        for old in sorted(directory.glob("step_*"))[: -max(1, keep_last)]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def load(actor: Actor, checkpoint: Path) -> dict[str, Any]:
    """Restore model, optimizer and schedule in place; returns the loop's state. UserError: it cannot be read."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        scheduler = dist_checkpointing.load_common_state_dict(str(checkpoint))["scheduler"]
        state = dist_checkpointing.load(_sharded_state(actor, scheduler, is_loading=True), str(checkpoint))
    except (CheckpointingException, OSError, KeyError, EOFError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"checkpoint {checkpoint} cannot be loaded ({first}); name an older one in its `latest`"
        ) from None
    for number, chunk in enumerate(actor.chunks):
        chunk.load_state_dict(state[f"model{number}"])
    if "optimizer" in state:
        _load_optimizer(actor.optimizer, state["optimizer"])
    actor.scheduler.load_state_dict(state["scheduler"])
    return state["loop"]


def _sharded_state(actor: Actor, scheduler: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    """Model and optimizer; an optimizer that has never stepped has no moments yet and is left out."""
    metadata = {
        "dp_cp_group": actor.topology.data,
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }
    state = {f"model{number}": chunk.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(actor.chunks)}
    if not scheduler["num_steps"]:
        return state
    if is_loading:
        _make_room(actor.optimizer)
    return state | {"optimizer": actor.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)}


def _load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Megatron's loading, made to work with torch's Adam under the distributed optimizer.

    That Adam keeps its step as a tensor beside the moments, and Megatron asks the checkpoint for every tensor it finds
    there, though it saves the step elsewhere: so the moments are loaded with the step out of sight. It also gives all
    parameters one step tensor, which each of them would advance: so each gets its own.
    """
    moments = state.pop("param_state", None)
    optimizer.load_state_dict(state)
    if moments is None:
        return
    (part,) = optimizer.chained_optimizers
    values = list(part.optimizer.state.values())
    steps = [value.pop("step", None) for value in values]
    part.load_parameter_state_from_fully_reshardable(moments)
    for value, step in zip(values, steps, strict=True):
        if step is not None:
            value["step"] = step.clone()


def _make_room(optimizer: Any) -> None:
    """Zero moments and step 0 for torch's Adam under the distributed optimizer, which asks for them before it loads."""
    for part in optimizer.chained_optimizers:
        if part.config.use_distributed_optimizer:
            part.init_state_fn(part.optimizer, part.config)
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.zeros((), dtype=torch.float32))


def _point_to(checkpoint: Path) -> None:
    pointer = checkpoint.parent / _LATEST
    temporary = pointer.with_name(f".{_LATEST}")
    with temporary.open("w") as file:
        file.write(checkpoint.name)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(pointer)
