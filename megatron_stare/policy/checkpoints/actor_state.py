"""What a training checkpoint keeps of the actor: model, optimizer, schedule;
restored under any layout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from megatron_stare.config import UserError
from megatron_stare.policy import model_state
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.optimizer import resume_schedule


def of_actor(actor: Actor) -> dict[str, Any]:
    """Everything of the actor that a checkpoint must keep."""
    scheduler = actor.scheduler.state_dict()
    return _sharded(actor, bool(scheduler["num_steps"]), is_loading=False) | {
        "scheduler": scheduler
    }


def into_actor(actor: Actor, checkpoint: Path) -> dict[str, Any]:
    """Restore model, optimizer and schedule;
    returns the loop's state. UserError: it cannot be read.
    """
    from megatron.core import dist_checkpointing

    def read() -> dict[str, Any]:
        common = dist_checkpointing.load_common_state_dict(str(checkpoint))
        has_stepped = bool(common["scheduler"]["num_steps"])
        # Megatron finds a saved param group by these; `resume_schedule` sets them to the config's.
        for group in actor.optimizer.param_groups:
            group["max_lr"] = common["scheduler"]["max_lr"]
            group["min_lr"] = common["scheduler"]["min_lr"]
        if has_stepped:
            _check_optimizers(common["optimizer"], actor, checkpoint)
        return model_state.load(_sharded(actor, has_stepped, is_loading=True), checkpoint)

    state = model_state.or_user_error(read, checkpoint)
    for number, chunk in enumerate(actor.chunks):
        chunk.load_state_dict(state[f"model{number}"])
    if "optimizer" in state:
        _load_optimizer(actor.optimizer, state["optimizer"])
    lines = resume_schedule(
        actor.config.optimizer, actor.optimizer, actor.scheduler, state["scheduler"]
    )
    if lines and actor.topology.is_first:
        print("\n".join(lines), file=sys.stderr, flush=True)
    return state["loop"]


def _check_optimizers(saved: dict[Any, Any], actor: Actor, checkpoint: Path) -> None:
    """Megatron gives experts an optimizer of their own where they are spread over ranks,
    and only there.
    """
    spread_before, spread_now = 0 in saved, len(actor.optimizer.chained_optimizers) > 1
    if spread_before != spread_now:
        size = actor.policy.expert_model_parallel_size
        raise UserError(
            f"policy.expert_model_parallel_size={size}: {checkpoint} was saved with it "
            f"{'above 1' if spread_before else 'at 1'}, and its optimizer state is for that; set "
            "it so"
        )


def _sharded(actor: Actor, has_stepped: bool, is_loading: bool) -> dict[str, Any]:
    """Model and optimizer; an optimizer that has never stepped
    has no moments yet and is left out.
    """
    metadata = {
        "dp_cp_group": actor.topology.data,
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }
    state = model_state.sharded_weights(actor.chunks, actor.topology)
    if not has_stepped:
        return state
    if is_loading:
        _make_room(actor.optimizer)
    return state | {
        "optimizer": actor.optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
    }


def _load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Megatron's loading, made to work with torch's Adam under the distributed optimizer.

    That Adam keeps its step as a tensor beside the moments, and Megatron asks the checkpoint for
    every tensor it finds there, though it saves the step elsewhere: so the moments are loaded with
    the step out of sight. It also gives all parameters one step tensor, which each of them would
    advance: so each gets its own.
    """
    parts = optimizer.chained_optimizers  # experts have an optimizer of their own
    states: list[dict[str, Any]] = [state] if len(parts) == 1 else list(state.values())
    moments = [part_state.pop("param_state", None) for part_state in states]
    optimizer.load_state_dict(state)
    for part, its_moments in zip(parts, moments, strict=True):
        if its_moments is None:
            continue
        values = list(part.optimizer.state.values())
        steps = [value.pop("step", None) for value in values]
        part.load_parameter_state_from_fully_reshardable(its_moments)
        for value, step in zip(values, steps, strict=True):
            if step is not None:
                value["step"] = step.clone()


def _make_room(optimizer: Any) -> None:
    """Zero moments and step 0 for torch's Adam under the distributed optimizer,
    which asks for them before it loads.
    """
    for part in optimizer.chained_optimizers:
        if part.config.use_distributed_optimizer:
            part.init_state_fn(part.optimizer, part.config)
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.zeros((), dtype=torch.float32))
