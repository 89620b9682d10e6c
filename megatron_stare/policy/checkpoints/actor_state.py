"""The actor's part of a checkpoint: model, optimizer, schedule; loads under any layout."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_stare.policy import model_state
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.model_state import LOOP_PREFIX, REFERENCE_PREFIX
from megatron_stare.policy.optimizer import make_room, resume_schedule, state_pieces


def of_actor(actor: Actor, loop_state: dict[str, Any]) -> dict[str, Any]:
    """Everything of the actor that a checkpoint must keep, together with the loop's state. With
    adapters: these, their settings and the fingerprint of the weights that they belong to. With a
    reference model that was updated: this too.
    """
    scheduler = actor.scheduler.state_dict()
    rest = {"scheduler": scheduler, "loop": _described(loop_state)}
    rest |= {"adapters": actor.described_adapters()}
    reference = actor.reference if actor.reference_moved else None
    return _sharded(actor, bool(scheduler["num_steps"]), reference) | rest


def into_actor(actor: Actor, checkpoint: Path) -> dict[str, Any]:
    """Restore model, optimizer and schedule; the loop's state. UserError: it cannot be read."""
    from megatron.core import dist_checkpointing

    def read() -> dict[str, Any]:
        common = dist_checkpointing.load_common_state_dict(str(checkpoint))
        actor.check_adapters(checkpoint, common.get("adapters", {}))
        steps = common["scheduler"]["num_steps"]
        if steps:
            make_room(actor.optimizer, steps)
        sharded = _sharded(actor, bool(steps), reference)
        sharded["loop"] = _placeholders(stored, actor.topology.rank)
        room = {name: piece.data for name, piece in sharded.get("optimizer_state", {}).items()}
        state = model_state.load(sharded, checkpoint, actor.topology)
        for name, tensor in room.items():  # what another rank read and sent is not in place yet
            tensor.copy_(state["optimizer_state"][name])
        return state

    stored = model_state.read_metadata(checkpoint).state_dict_metadata
    actor.reference_moved = any(key.startswith(REFERENCE_PREFIX) for key in stored)
    reference = actor.reference if actor.reference_moved else None
    with nullcontext() if reference is None else reference.on_device():
        state = model_state.or_user_error(read, checkpoint)
        if reference is not None:
            model_state.fill(reference.chunks, state, scales=True, prefix=REFERENCE_PREFIX)
    model_state.fill(actor.chunks, state, scales=True)
    actor.rounded.round()  # of a run that did not
    lines = resume_schedule(actor.scheduler, state["scheduler"])
    if lines and actor.topology.is_first:
        print("\n".join(lines), file=sys.stderr, flush=True)
    return state["loop"]


def _sharded(actor: Actor, has_stepped: bool, reference: PolicyModel | None) -> dict[str, Any]:
    """Model, optimizer and the reference model that was updated. An optimizer that has never
    stepped has no moments yet and is left out.
    """
    state = model_state.sharded_weights(actor.chunks, actor.topology)
    if has_stepped:
        state["optimizer_state"] = state_pieces(actor.optimizer, state)
    if reference is not None:
        chunks, prefix = reference.chunks, REFERENCE_PREFIX
        state |= model_state.sharded_weights(chunks, actor.topology, prefix=prefix)
    return state


@dataclass(frozen=True, eq=False)
class ShardedBytes:
    """Bytes of which each rank holds a part: this rank `part` [n] uint8, from `begin` on, of `size`
    bytes in all. Parts overlap nowhere and leave nothing out. Each rank writes its own part into a
    checkpoint; every rank that loads reads the whole, under any number of ranks.
    """

    part: Tensor
    begin: int
    size: int


def _described(state: Mapping[str, Any], prefix: str = LOOP_PREFIX) -> dict[str, Any]:
    """The loop's state, with Megatron's description in the place of every ShardedBytes of which
    this rank holds a part.
    """
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, ShardedBytes):
            if len(value.part):
                found[name] = _piece(prefix + name, value.part, value.size, value.begin)
        elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
            found[name] = _described(value, f"{prefix}{name}.")
        else:
            found[name] = value
    return found


def _placeholders(keys: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Room for every ShardedBytes of a checkpoint with these keys: the whole, on every rank."""
    found: dict[str, Any] = {}
    for key, stored in keys.items():
        if key.startswith(LOOP_PREFIX):
            *parents, last = key.removeprefix(LOOP_PREFIX).split(".")
            inside = found
            for parent in parents:
                inside = inside.setdefault(parent, {})
            (size,) = stored.size
            inside[last] = _piece(key, torch.empty(size, dtype=torch.uint8), size, 0, rank)
    return found


def _piece(key: str, part: Tensor, size: int, begin: int, replica: int = 0) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return ShardedTensor(
        key=key,
        data=part,
        dtype=part.dtype,
        local_shape=tuple(part.shape),
        global_shape=(size,),
        global_offset=(begin,),
        axis_fragmentations=None,  # parts of any length
        replica_id=replica,
    )
