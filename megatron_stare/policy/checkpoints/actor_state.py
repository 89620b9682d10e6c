"""What a training checkpoint keeps of the actor: model, optimizer, schedule;
restored under any layout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader

from megatron_stare.policy import model_state
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.checkpoints import optimizer_state, spread
from megatron_stare.policy.optimizer import resume_schedule


def of_actor(actor: Actor, loop_state: dict[str, Any]) -> dict[str, Any]:
    """Everything of the actor that a checkpoint must keep, and the loop's state beside it."""
    scheduler = actor.scheduler.state_dict()
    beside = {"scheduler": scheduler, "loop": spread.described(loop_state)}
    return _sharded(actor, bool(scheduler["num_steps"])) | beside


def into_actor(actor: Actor, checkpoint: Path) -> dict[str, Any]:
    """Restore model, optimizer and schedule;
    returns the loop's state. UserError: it cannot be read.
    """
    from megatron.core import dist_checkpointing

    def read() -> dict[str, Any]:
        common = dist_checkpointing.load_common_state_dict(str(checkpoint))
        steps = common["scheduler"]["num_steps"]
        if steps:
            optimizer_state.make_room(actor.optimizer, steps)
        keys = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        sharded = _sharded(actor, bool(steps), optimizer_state.master_of(keys))
        sharded["loop"] = spread.room(keys, actor.topology.rank)
        room = {name: piece.data for name, piece in sharded.get("optimizer_state", {}).items()}
        state = model_state.load(sharded, checkpoint, actor.topology)
        for name, tensor in room.items():  # what another rank read and sent is not in place yet
            tensor.copy_(state["optimizer_state"][name])
        return state

    state = model_state.or_user_error(read, checkpoint)
    model_state.fill(actor.chunks, state, scales=True)
    actor.experts.round()  # of a run that did not
    lines = resume_schedule(actor.scheduler, state["scheduler"])
    if lines and actor.topology.is_first:
        print("\n".join(lines), file=sys.stderr, flush=True)
    return state["loop"]


def _sharded(
    actor: Actor, has_stepped: bool, master: str = optimizer_state.MASTER
) -> dict[str, Any]:
    """Model and optimizer; an optimizer that has never stepped
    has no moments yet and is left out.
    """
    state = model_state.sharded_weights(actor.chunks, actor.topology)
    if has_stepped:
        state["optimizer_state"] = optimizer_state.pieces(actor.optimizer, state, master)
    return state
