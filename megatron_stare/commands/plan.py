"""`plan SOURCE`: memory and time of a run, and whether it fits its GPUs, before any launch."""

from __future__ import annotations

import argparse
import os

from megatron_stare.config import Config, UserError
from megatron_stare.planning.machine import H100, read_machine, whole_gpu
from megatron_stare.planning.plan import make_plan, placements
from megatron_stare.planning.shapes import model_shape
from megatron_stare.planning.suggest import changes, suggest
from megatron_stare.planning.tables import (
    BASIS,
    SUMMARY_HEADER,
    aligned,
    cost_text,
    plan_text,
    summary_row,
)
from megatron_stare.recipes import CLUSTERS, Cluster, cluster_of, find_recipe


def listed() -> tuple[str, bool]:
    """One line per recipe, and whether all fit."""
    plans = {name: make_plan(find_recipe(name), cluster) for name, cluster in CLUSTERS.items()}
    rows = [SUMMARY_HEADER, *(summary_row(name, plan) for name, plan in plans.items())]
    return f"{aligned(rows)}\n{BASIS}", not any(plan.faults for plan in plans.values())


def planned(config: Config, options: argparse.Namespace) -> tuple[str, bool]:
    """A run's plan as text, and whether it fits, by the options of `plan`. UserError: the number of
    GPUs is neither given nor known.
    """
    source, gpus, rollout_gpus = options.source, options.gpus, options.rollout_gpus
    known = cluster_of(source) or (Cluster(gpus, 0) if gpus else None)
    if known is None:
        raise UserError(
            f"{source} does not name its number of GPUs; give --gpus, and --rollout-gpus for "
            "servers"
        )
    cluster = Cluster(
        gpus or known.trainer_gpus, known.rollout_gpus if rollout_gpus < 0 else rollout_gpus
    )
    context = model_shape(config.policy.hf_checkpoint).max_position_embeddings
    if config.longest_sequence > context:
        raise UserError(
            f"data.rollout_max_prompt_len={config.data.rollout_max_prompt_len} + "
            f"rollout.rollout_max_response_len={config.rollout.rollout_max_response_len} = "
            f"{config.longest_sequence} exceed the model's max_position_embeddings={context}, "
            "which `train` refuses; lower one of the lengths or raise the limit"
        )
    limit, response = config.rollout.rollout_max_response_len, options.response_tokens
    if gpus < 0 or not 0 <= response <= limit:
        raise UserError(
            f"--gpus {gpus} must be positive, and --response-tokens {response:g} lie in "
            f"[0, rollout.rollout_max_response_len={limit}]"
        )
    machine = read_machine(options.machine) if options.machine else H100
    if options.suggest:
        plan = suggest(config, cluster, machine, response)
        words = " ".join(changes(config, plan)) or "as it is"
        found = plan.cluster
        placed = f"--gpus {found.trainer_gpus} --rollout-gpus {found.rollout_gpus} {words}"
        return f"{plan_text(source, plan)}\n\n{placed}", True
    plan, *others = (
        make_plan(changed, placed, machine, response_tokens=response)
        for changed, placed in [(config, cluster), *placements(config, cluster)]
    )
    return "\n".join([plan_text(source, plan), *map(cost_text, others)]), not plan.faults


def refuse_on_gpus(config: Config) -> None:
    """Call `refuse_what_cannot_fit` on GPUs, before servers or models are loaded."""
    import torch

    if torch.cuda.is_available():
        memory, gpus = torch.cuda.get_device_properties(0).total_memory, torch.cuda.device_count()
        world, local = (
            int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        )
        refuse_what_cannot_fit(config, world, local, memory, gpus)


def refuse_what_cannot_fit(
    config: Config, world_size: int, local_size: int, memory_bytes: float, gpus: int
) -> None:
    """UserError if a rank needs more memory than its GPU has, or if launched servers would use GPUs
    that train or that this node does not have. `local_size` is the number of its ranks.
    """
    served, servers = config.rollout.engine == "sglang", config.sglang
    launched = served and not (servers.urls or servers.router_url)
    placed = "base-gpu-id" in servers.server_args or "CUDA_VISIBLE_DEVICES" in servers.command
    apart = not servers.colocated
    first = local_size * apart if servers.first_gpu is None else servers.first_gpu
    if launched and apart and not placed and first < local_size:
        raise UserError(
            f"sglang.first_gpu={first} is one of the {local_size} GPUs that train here; leave it "
            "out, or give running servers in sglang.urls"
        )
    count = len(servers.urls) or servers.num_servers
    last = first + count * servers.gpus_per_server - 1
    if launched and not placed and last >= gpus:
        raise UserError(
            f"sglang.num_servers={count} with sglang.gpus_per_server={servers.gpus_per_server} "
            f"need the GPUs {first} to {last}, and this node has {gpus}; lower them"
            f"{', set sglang.colocated=true,' * apart} or give running servers in sglang.urls"
        )
    if not config.policy.hf_checkpoint:
        return  # a quickstart, which makes its model
    cluster = Cluster(world_size, count * servers.gpus_per_server)
    plan = make_plan(config, cluster, whole_gpu(memory_bytes))
    if plan.faults:
        raise UserError(
            f"{plan.faults[0]} (`plan` shows every part; --force starts the run anyway)"
        )
