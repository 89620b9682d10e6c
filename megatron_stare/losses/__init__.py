"""The objectives: pure functions of tokens, one loss per token,
and the plans that do their batch-wide work once per step.
"""

from megatron_stare.losses import families, grpo, stare  # importing registers them
from megatron_stare.losses.compute import advantages, compute
from megatron_stare.losses.registry import (
    Objective,
    find_objective,
    objective_of,
    policy_loss,
    reading,
)
