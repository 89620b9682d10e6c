"""The policy as the loop sees it: pack a batch, score it, update on it, hand out its weights."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.config import Config
from megatron_stare.numerics.sequences import sequence_scan, sequence_sum
from megatron_stare.policy import layout, runtime
from megatron_stare.policy.head import HeadContext, HeadOutput
from megatron_stare.policy.huggingface.fp8_weights import RoundedWeights
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.model_state import copy_weights
from megatron_stare.policy.optimizer import (
    build_optimizer,
    build_scheduler,
    free_gradients,
    restore_gradients,
    to_device,
    to_host,
    wrap,
)
from megatron_stare.policy.topology import Topology
from megatron_stare.records import BoundLoss, LossTokens, MicroBatch, Signals, TokenBatch


class Actor(PolicyModel):
    """The policy's model with Megatron's gradient buffers, optimizer and learning-rate schedule.
    The schedule decays over `total_steps`.
    """

    def __init__(self, config: Config, topology: Topology, total_steps: int) -> None:
        super().__init__(
            config.policy.hf_checkpoint,
            config.policy,
            topology,
            config.rollout.rollout_temperature,
            config.adapters,
            config.run.seed,
        )
        self.config = config
        self.steer()
        self.runnable = wrap(self.chunks, self.runnable, config.policy, self.tuning, topology)
        self.optimizer = build_optimizer(
            config.optimizer, config.policy, self.tuning, self.runnable, topology
        )
        self.scheduler = build_scheduler(config.optimizer, self.optimizer, total_steps)
        self.is_on_host = False
        self._host_block = torch.empty(0, dtype=torch.uint8)  # of what is on the host
        self.rounded = RoundedWeights(self.chunks, self.hf, config.policy)
        self.rounded.round()  # the optimizer has its copies already
        # The model that a loss with a KL term or a teacher reads; the Actor itself stands for the
        # base of its adapters.
        self.reference: PolicyModel | None = None
        self.reference_moved = False  # it is not that of the configuration any more

    def add_reference(self) -> None:
        """Load the reference model: policy.ref_hf_checkpoint, or the model that the run starts
        from. Without its adapters that is this one, and no second copy of the weights is needed.
        """
        if self.adapters.rank and not self.config.reference:
            self.reference = self
            return
        source = self.config.reference or self.config.policy.hf_checkpoint
        self.reference = PolicyModel(source, self.policy, self.topology, self.temperature)
        self.reference.rest()

    def update_reference(self) -> None:
        """The reference model gets the weights that the policy has now."""
        assert self.reference is not None, "the loss reads one"
        copy_weights(self.chunks, self.reference.chunks)
        self.reference_moved = True

    def make_room(self) -> None:
        """Free device memory for the rollout engine until the next update. No bit of the update
        changes.

        With colocated servers the gradient buffers are freed. With policy.offload_while_generating
        they are too, and the optimizer's state moves to host memory. The weights stay, because a
        server that restarts in the meantime receives them.
        """
        if self.policy.offload_while_generating and not self.is_on_host:
            self._host_block = to_host(self.optimizer, self._host_block)
            self.is_on_host = True
        colocated = self.config.rollout.engine == "sglang" and self.config.sglang.colocated
        if self.is_on_host or colocated:
            free_gradients(self.runnable)

    def update(
        self, batch: TokenBatch, loss: BoundLoss, signals: Signals
    ) -> tuple[dict[str, float], TokenBatch]:
        """One optimizer step on sum over all ranks of coefficient * loss.

        Returns the metrics (loss, grad_norm, lr, and the load of experts), and the batch with the
        surprisal and entropy that the step itself saw, before the weights moved. If the gradient is
        not finite the metrics are empty, and weights, optimizer and schedule are unchanged.
        """
        if self.is_on_host:
            to_device(self.optimizer)
            self.is_on_host = False
        restore_gradients(self.runnable)
        found = self._gradient(batch, loss, signals)
        if not self._gradient_is_finite():
            return {}, self.with_statistics(batch, found)
        self.scheduler.step(1)
        _, grad_norm, _ = self.optimizer.step()
        self.rounded.round()
        losses = batch.advantage_T.new_empty(0, dtype=torch.float64)
        if found:  # one wait for all of them
            losses = torch.stack([_loss(output) for output in found]).double()
        local = losses.new_full((), self.topology.across.sum(losses))
        metrics = {
            "loss": self.topology.from_last_stage(local).item(),
            "grad_norm": float(grad_norm),
            "lr": float(self.optimizer.param_groups[0]["lr"]),
        }
        if self.routers is not None:
            metrics |= self.routers.load_metrics()
        return metrics, self.with_statistics(batch, found)

    def token_gradient(self, batch: TokenBatch, loss: BoundLoss, signals: Signals) -> Tensor:
        """[T, 2]: the batch loss's derivatives by the surprisal and by the entropy of each of this
        rank's tokens, at their scores. No pass through the model, so none of a loss that reads the
        logits. Collective.
        """
        assert batch.surprisal_T is not None and batch.entropy_T is not None, "a scored batch"
        assert not loss.logits, "its derivatives are those of a distribution"
        found = []
        for micro in batch.microbatches:
            surprisal_N = batch.surprisal_T[micro.rows].detach().requires_grad_()
            entropy_N = batch.entropy_T[micro.rows].detach()
            entropy_N.requires_grad_(loss.entropy_gradient)
            leaves = [surprisal_N, entropy_N] if loss.entropy_gradient else [surprisal_N]
            tokens = _loss_tokens(surprisal_N, entropy_N, batch, signals, micro.rows)
            if not loss.per_token:
                tokens = self._with_sequences(tokens, batch, micro)
            total = (signals.coefficient_T[micro.rows] * loss.function(tokens)).sum()
            by_surprisal, *by_entropy = torch.autograd.grad(total, leaves, materialize_grads=True)
            other = by_entropy[0] if by_entropy else torch.zeros_like(by_surprisal)
            found.append(torch.stack([by_surprisal, other], dim=1))
        return torch.cat(found)

    def first_without_finite_gradient(
        self, batch: TokenBatch, loss: BoundLoss, signals: Signals
    ) -> int | None:
        """The number of the first sequence with which the batch's gradient is not finite any more;
        None where it is not even without any. The same on every rank.

        Found by bisection over the sequences: log2 of their number passes over the whole batch.
        """
        low, high = -1, batch.num_sequences
        while high - low > 1:
            middle = (low + high) // 2
            self._gradient(batch, loss, signals, sequences=middle)
            low, high = (middle, high) if self._gradient_is_finite() else (low, middle)
        return high - 1 if high else None

    def _gradient(
        self, batch: TokenBatch, loss: BoundLoss, signals: Signals, sequences: int | None = None
    ) -> list[HeadOutput]:
        """Fill the gradient buffers from the first `sequences` sequences, or from all of them."""
        for chunk in self.runnable:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def context(micro: MicroBatch) -> HeadContext:
            def chunk_loss(
                surprisal_n: Tensor, entropy_n: Tensor, rows: slice, logits: Tensor | None = None
            ) -> Tensor:
                place = slice(micro.rows.start + rows.start, micro.rows.start + rows.stop)
                if sequences is not None:
                    kept_n = batch.sequence_T[place] < sequences
                    surprisal_n, entropy_n = _cut(kept_n, surprisal_n), _cut(kept_n, entropy_n)
                    logits = None if logits is None else _cut(kept_n[:, None], logits)
                tokens = _loss_tokens(surprisal_n, entropy_n, batch, signals, place)
                tokens = dataclasses.replace(tokens, logits=logits)
                if not loss.per_token:
                    tokens = self._with_sequences(tokens, batch, micro)
                return signals.coefficient_T[place] * loss.function(tokens)

            way = self.policy.head if loss.per_token else "recompute"
            return self.context(
                micro,
                way=way,
                loss=chunk_loss,
                entropy_gradient=loss.entropy_gradient,
                whole_logits=loss.logits,
            )

        def with_count(output: HeadOutput) -> tuple[Tensor, Tensor, HeadOutput]:
            return _loss(output), torch.ones((), dtype=torch.int), output.detached()

        return self.run(batch, context, with_count, False)

    def _with_sequences(
        self, tokens: LossTokens, batch: TokenBatch, micro: MicroBatch
    ) -> LossTokens:
        """All tokens of a micro-batch, with their sequences, and sums and scans over the ranks that
        share them. The recompute head takes a loss over all of them at once, on every rank alike.
        """
        shared: dict[str, Any] = {
            "sequence_N": micro.sequence_N,
            "count": micro.num_sequences,
            "group": self.topology.context,
        }
        index_N = batch.token_index_T[micro.rows]
        position_N = layout.response_position(index_N) - micro.offset_B[micro.sequence_N]
        return dataclasses.replace(
            tokens,
            sequence=micro.sequence_N,
            sequence_tokens=micro.loss_tokens_B[micro.sequence_N],
            position=position_N,
            sequence_sum=functools.partial(sequence_sum, **shared),
            sequence_scan=functools.partial(sequence_scan, position_N=position_N, **shared),
        )

    def _gradient_is_finite(self) -> bool:
        """Whether the gradient is finite on all ranks. They agree before any rank steps: Megatron's
        fp32 optimizer would step on NaN.
        """
        buffers = [
            buffer
            for chunk in self.runnable
            for buffer in chunk.buffers + chunk.expert_parallel_buffers
        ]
        largest = [torch.linalg.vector_norm(each.grad_data, float("inf")) for each in buffers]
        # A pipeline stage without adapters has no buffer.
        largest.append(torch.zeros((), device=runtime.device()))
        broken = (~torch.isfinite(torch.stack(largest))).any().int()
        dist.all_reduce(broken, op=dist.ReduceOp.MAX)
        return not broken


def _loss(output: HeadOutput) -> Tensor:
    assert output.loss is not None, "the context had a loss"
    return output.loss


def _cut(kept: Tensor, value: Tensor) -> Tensor:
    """The same values; no gradient passes where they are not kept, not even one that is NaN."""
    return torch.where(kept, value, value.detach())


def _loss_tokens(
    surprisal_n: Tensor, entropy_n: Tensor, batch: TokenBatch, signals: Signals, rows: slice
) -> LossTokens:
    """The statistics with their graph, and the constants of the same tokens. A batch without old
    values is on-policy: pi_old = pi.
    """

    def of(value_T: Tensor | None) -> Tensor | None:
        return None if value_T is None else value_T[rows]

    old, old_entropy = of(batch.old_surprisal_T), of(batch.old_entropy_T)
    return LossTokens(
        surprisal=surprisal_n,
        entropy=entropy_n,
        old_surprisal=surprisal_n.detach() if old is None else old,
        advantage=batch.advantage_T[rows],
        weight=signals.weight_T[rows],
        reference_surprisal=of(batch.reference_surprisal_T),
        top_ids=None if batch.top_ids_TK is None else batch.top_ids_TK[rows].long(),
        teacher_top=of(batch.teacher_top_TK),
        correction=of(signals.correction_T),
        old_entropy=entropy_n.detach() if old_entropy is None else old_entropy,
        rollout_surprisal=-batch.rollout_logprob_T[rows],
        values={name: value_T[rows] for name, value_T in signals.values.items()},
        numbers=signals.numbers,
    )
