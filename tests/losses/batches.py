"""Random tokens and batches that the tests of losses share."""

import dataclasses
import functools

import torch

from megatron_stare.losses import find_objective
from megatron_stare.numerics.selection import Across
from megatron_stare.numerics.sequences import sequence_sum
from megatron_stare.records import LossTokens, TokenBatch

ALONE = Across()


def random_tokens(count=600, seed=0, dtype=torch.float64):
    """Tokens whose ratios lie everywhere:
    at 1, inside and beyond the clips, and beyond the clamp at e^20.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    old = normal(2.0).abs() + 25.0
    gap = torch.where(
        torch.arange(count) % 3 == 0,
        normal(0.2),
        torch.where(torch.arange(count) % 3 == 1, normal(2.0), normal(15.0)),
    )
    gap[:20] = 0.0
    advantage = normal(1.0)
    advantage[::17] = 0.0
    values = (old - gap, normal(1.0).abs(), old, advantage, 1 + normal(0.3).abs())
    surprisal, entropy, old, advantage, weight = (value.to(dtype) for value in values)
    return LossTokens(surprisal.requires_grad_(), entropy.requires_grad_(), old, advantage, weight)


def in_sequences(tokens, sequence):
    """The tokens as a loss over whole sequences gets them, all on this rank."""
    sequence = torch.as_tensor(sequence)
    count = int(sequence.max()) + 1 if sequence.numel() else 0
    return dataclasses.replace(
        tokens,
        sequence=sequence,
        sequence_tokens=torch.bincount(sequence, minlength=count)[sequence],
        sequence_sum=functools.partial(sequence_sum, sequence_N=sequence, count=count),
    )


def run(name, tokens, config):
    """Losses and their gradient by the surprisal."""
    loss = find_objective(name).loss(tokens, config)
    assert loss.shape == tokens.surprisal.shape, "a loss does not reduce"
    return loss.detach(), torch.autograd.grad(loss.sum(), tokens.surprisal)[0]


def batch_of(
    surprisal,
    advantage,
    entropy=None,
    sequence=None,
    microbatch=None,
    index=None,
    sequences=None,
    turn=None,
):
    """A scored TokenBatch without micro-batches: all that a plan looks at."""
    count = len(surprisal)
    sequence = (
        torch.zeros(count, dtype=torch.long) if sequence is None else torch.as_tensor(sequence)
    )
    return TokenBatch(
        microbatches=(),
        advantage_T=torch.as_tensor(advantage, dtype=torch.float32),
        rollout_logprob_T=torch.zeros(count),
        sequence_T=sequence,
        sequence_tokens_T=torch.bincount(sequence)[sequence] if count else sequence,
        token_index_T=torch.arange(count) if index is None else torch.as_tensor(index),
        microbatch_T=torch.zeros(count, dtype=torch.long)
        if microbatch is None
        else torch.as_tensor(microbatch),
        fresh_T=torch.ones(count, dtype=torch.bool),
        turn_T=None if turn is None else torch.as_tensor(turn),
        num_sequences=sequences or (int(sequence.max()) + 1 if count else 0),
        surprisal_T=torch.as_tensor(surprisal, dtype=torch.float32),
        entropy_T=torch.full((count,), 0.1)
        if entropy is None
        else torch.as_tensor(entropy, dtype=torch.float32),
    )
