"""The output hook: hidden states of the loss rows -> surprisal, entropy and loss,
through numerics/.

`GPTModel.forward(output_processor=loss_head, output_processor_context=HeadContext(...))` hands us
the last hidden states and the output weight; what is returned is the model's output. Prompt, tool
and padding rows are never projected. Three ways, one contract (policy.head):

    fused      logits, statistics, token loss and gradients chunk by chunk in the forward pass:
               three matrix products, no logits kept. Runs any loss that is a function of one
               token's values.
    recompute  logits again in the backward pass: four products, no logits kept. Runs any loss; the
               fused way falls back to it for a loss over whole sequences.
    logits     logits kept, gradient written over them: three products, N x V / TP kept.

With policy.fp32_logits the logits are fp32 sums, else they are rounded to policy.dtype.

The host waits for the device once: to see that all tensor ranks were given the same sound targets.
Statistics that are not finite are left to the loop, which looks at those of a whole batch at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_stare.numerics import vocab_statistics
from megatron_stare.numerics.fused_loss import ChunkLoss, fused_loss
from megatron_stare.numerics.token_stats import TokenStats, VocabShard, nucleus_entropy, token_stats
from megatron_stare.numerics.vocab_shard import compute_dtype
from megatron_stare.records import Nucleus


@dataclass(frozen=True)
class HeadOutput:
    """The hook's result: the N rows' summed loss, if there is one, and their statistics [nats]."""

    surprisal_N: Tensor
    entropy_N: Tensor
    variance_N: Tensor  # of the surprisal under the policy [nats^2]
    sensitivity_N: Tensor | None = None
    proxy_mass_N: Tensor | None = None
    nucleus_entropy_N: Tensor | None = None
    tempered_N: Tensor | None = None
    loss: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Megatron's schedules ask it of what a model with experts returns."""
        return self.surprisal_N.device

    def detached(self) -> HeadOutput:
        """The same values without their graph."""
        loss = None if self.loss is None else self.loss.detach()
        return dataclasses.replace(
            self,
            surprisal_N=self.surprisal_N.detach(),
            entropy_N=self.entropy_N.detach(),
            loss=loss,
        )


@dataclass(frozen=True)
class HeadContext:
    """The inputs of the head beyond the model: rows, targets, the loss, and how to run it."""

    row_N: Tensor
    target_N: Tensor
    temperature: float
    vocab_size: int
    tensor_group: ProcessGroup
    way: str
    workspace_bytes: int
    fp32_logits: bool = False
    loss: ChunkLoss | None = None
    entropy_gradient: bool = False
    sensitivity: bool = False
    whole_logits: bool = False
    proxy_kappa: float = 0.0
    nucleus: Nucleus | None = None
    tempering: float | None = None
    sequence_parallel: bool = False


def loss_head(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: HeadContext,
    **unused: Any,
) -> HeadOutput:
    """Statistics of the N rows and, where there is a loss, its sum, a differentiable scalar."""
    weight = output_layer.weight if output_weight is None else output_weight
    if context.sequence_parallel:
        hidden_states = _whole_sequences(hidden_states, context.tensor_group)
    hidden_NH = hidden_states.flatten(0, 1)[context.row_N]
    reduce_hidden_grad = not context.sequence_parallel  # else the gather's backward scatters it
    if context.loss is not None and context.whole_logits:
        return _with_logits(hidden_NH, weight, context, context.loss)
    shard = VocabShard(weight, context.tensor_group, context.vocab_size, context.fp32_logits)
    if context.loss is not None and context.way == "fused":
        # The coefficients carry every denominator, so that the backward receives 1, as it must.
        loss, surprisal_N, entropy_N, variance_N = fused_loss(
            hidden_NH,
            shard,
            context.target_N,
            context.loss,
            temperature=context.temperature,
            needs_entropy_grad=context.entropy_gradient,
            workspace_bytes=context.workspace_bytes,
            reduce_hidden_grad=reduce_hidden_grad,
        )
        return HeadOutput(surprisal_N, entropy_N, variance_N, loss=loss)
    statistics = functools.partial(
        token_stats,
        hidden_NH,
        shard,
        context.target_N,
        way="logits" if context.way == "logits" else "recompute",
        workspace_bytes=context.workspace_bytes,
        reduce_hidden_grad=reduce_hidden_grad,
    )
    stats = statistics(
        temperature=context.temperature, collision=context.sensitivity, kappa=context.proxy_kappa
    )
    if context.loss is None:
        return HeadOutput(
            stats.surprisal_N,
            stats.entropy_N,
            stats.variance_N,
            sensitivity_N=stats.sensitivity_N if context.sensitivity else None,
            proxy_mass_N=stats.log_kept_mass_N,
            nucleus_entropy_N=_nucleus_entropy(hidden_NH, weight, context),
            tempered_N=_tempered(stats, statistics, context),
        )
    entropy_N = stats.entropy_N if context.entropy_gradient else stats.entropy_N.detach()
    loss = torch.sum(context.loss(stats.surprisal_N, entropy_N, slice(0, hidden_NH.shape[0])))
    return HeadOutput(stats.surprisal_N, stats.entropy_N, stats.variance_N, loss=loss)


def _with_logits(
    hidden_NH: Tensor, weight_VH: Tensor, context: HeadContext, loss: ChunkLoss
) -> HeadOutput:
    """A loss that reads every token's whole distribution: [N, V] logits on every tensor rank. What
    needs no gradient is summed up without a second [N, V].
    """
    from megatron.core import tensor_parallel

    group = context.tensor_group
    if not context.sequence_parallel:  # else the gather's backward sums over the ranks
        hidden_NH = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_NH, group=group)
    logits_NV = _whole_logits(hidden_NH, weight_VH, context)
    target_N, own_N = context.target_N, logits_NV.gather(1, context.target_N[:, None]).squeeze(1)
    surprisal_N = logits_NV.logsumexp(-1) - own_N
    with torch.no_grad():
        partial_NF = vocab_statistics.empty_partials(
            logits_NV.shape[0], False, logits_NV.dtype, logits_NV.device
        )
        vocab_statistics.add_tile_(partial_NF, logits_NV, 0, target_N, None)
        alone = VocabShard(weight_VH, None, context.vocab_size)
        found = vocab_statistics.finish(partial_NF, alone)
    entropy_N = found.entropy_n
    if context.entropy_gradient:
        log_NV = torch.log_softmax(logits_NV, dim=-1)
        entropy_N = -(torch.exp(log_NV) * log_NV).sum(-1)
    total = loss(surprisal_N, entropy_N, slice(0, hidden_NH.shape[0]), logits_NV).sum()
    return HeadOutput(surprisal_N, entropy_N, found.variance_n, loss=total)


def _whole_logits(hidden_NH: Tensor, weight_VH: Tensor, context: HeadContext) -> Tensor:
    """[N, V] of the whole vocabulary, in fp32, divided by the temperature."""
    from megatron.core import tensor_parallel

    logits_NV = tensor_parallel.gather_from_tensor_model_parallel_region(
        torch.nn.functional.linear(_factor(hidden_NH, context), _factor(weight_VH, context)),
        group=context.tensor_group,
    )
    logits_NV = logits_NV[:, : context.vocab_size].float()
    return logits_NV if context.temperature == 1 else logits_NV / context.temperature


def _factor(tensor: Tensor, context: HeadContext) -> Tensor:
    """A factor of the logits, in the dtype that they are to have."""
    return tensor.to(compute_dtype(tensor)) if context.fp32_logits else tensor


def _nucleus_entropy(hidden_NH: Tensor, weight_VH: Tensor, context: HeadContext) -> Tensor | None:
    """The entropy within the nucleus where it is asked for, in chunks that fit the workspace."""
    if context.nucleus is None:
        return None
    weight_VH = _factor(weight_VH, context)  # once for all chunks
    rows = max(1, context.workspace_bytes // (4 * context.vocab_size))
    found = [
        nucleus_entropy(_whole_logits(part_NH, weight_VH, context), *context.nucleus)
        for part_NH in hidden_NH.split(rows)
    ]
    return torch.cat(found)


def _tempered(
    stats: TokenStats, statistics: Callable[..., TokenStats], context: HeadContext
) -> Tensor | None:
    """ln(pi^T(a) / pi(a)), where a T is given."""
    if context.tempering is None:
        return None
    tempered = statistics(temperature=context.temperature * context.tempering)
    return stats.surprisal_N - tempered.surprisal_N


def _whole_sequences(hidden_states: Tensor, group: ProcessGroup) -> Tensor:
    """[S / TP, B, H] of each rank -> [S, B, H]; the backward sums over ranks and scatters."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    return gather_from_sequence_parallel_region(
        hidden_states, tensor_parallel_output_grad=True, group=group
    )
