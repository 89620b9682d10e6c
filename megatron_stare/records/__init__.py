"""The records that flow through one training step, in order:
Prompt -> Rollout -> Group -> TokenBatch -> MicroBatch.
"""

from megatron_stare.records.batches import (
    BoundLoss,
    LossPlan,
    LossTokens,
    MicroBatch,
    Nucleus,
    Signals,
    TokenBatch,
)
from megatron_stare.records.rollouts import (
    EVERY_RANK,
    ROLLOUT_ARRAYS,
    Group,
    Prompt,
    Rollout,
    RolloutMeta,
    RoutingShape,
    SequenceMeta,
    Status,
    TrainedSequence,
    fixed_array,
    readable,
    trained_sequences,
    turns_of,
)
