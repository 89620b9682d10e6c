"""On-policy distillation: a teacher's log-probs of the policy's own tokens, as an advantage.

    A'_t = reward_coef A_t + distillation_coef (ln pi_teacher(y_t) - ln pi(y_t))

Its policy gradient is that of reward_coef times the rewards' minus distillation_coef times
KL(pi || pi_teacher) of each position, on prefixes that the policy sampled: reverse KL with a
discount of 0 (arXiv 2306.13649, on-policy with lambda = 1). Both log-probs are at the temperature
of the rollouts; pi is the policy before the step's first update.
"""

from __future__ import annotations

import dataclasses

from megatron_stare.config import LossConfig
from megatron_stare.records import TokenBatch


def distilled(batch: TokenBatch, config: LossConfig) -> TokenBatch:
    """The batch with these advantages [T, nats]; itself with distillation_coef = 0."""
    if not config.distillation_coef:
        return batch
    assert batch.surprisal_T is not None and batch.reference_surprisal_T is not None, "scored"
    teacher_T = batch.surprisal_T - batch.reference_surprisal_T
    advantage_T = (
        config.reward_coef * batch.advantage_T.double()
        + config.distillation_coef * teacher_T.double()
    )
    return dataclasses.replace(batch, advantage_T=advantage_T.to(batch.advantage_T.dtype))
