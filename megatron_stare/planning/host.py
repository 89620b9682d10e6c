"""Host memory of a node that trains.

A rank's process with torch and its libraries takes about 5 GiB; a colocated run that makes room on
the GPU keeps optimizer state here, and a checkpoint that is written beside training keeps weights
and optimizer state. The first node's first rank also has the finished rollouts of a step that its
shares did not take yet: ids, log-probs, mask and version, 13 bytes a token.
"""

from __future__ import annotations

from megatron_stare.planning.plan import Plan

PROCESS_BYTES = 5 * 2.0**30
BYTES_PER_TOKEN = 13


def host_bytes(plan: Plan) -> float:
    """Of the first node, at most."""
    config, rank = plan.config, plan.worst
    ranks = min(plan.machine.gpus_per_node, plan.cluster.trainer_gpus)
    each = PROCESS_BYTES
    if config.policy.offload_while_generating:
        each += rank.optimizer
    if config.run.async_save:
        each += rank.parameters + rank.optimizer
    batch = config.rollout.over_sampling_batch_size or config.rollout.rollout_batch_size
    sampled = batch * config.rollout.n_samples_per_prompt
    tokens = sampled * (plan.tokens.prompt + plan.tokens.response)
    return ranks * each + BYTES_PER_TOKEN * tokens
