"""A checkpoint as GPTModel chunks, run through Megatron's schedules with our head in its hook."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_stare.config import AdaptersConfig, PolicyConfig, UserError
from megatron_stare.numerics.exchange import to_device
from megatron_stare.numerics.hashes import bit_hash
from megatron_stare.policy import build, model_state, runtime
from megatron_stare.policy.adapters import (
    STORED_SETTINGS,
    AdaptedWeights,
    attach,
    without_adapters,
)
from megatron_stare.policy.experts import Routers, release_routes, routing_shape
from megatron_stare.policy.head import HeadContext, HeadOutput, loss_head
from megatron_stare.policy.huggingface import weights as hf_weights
from megatron_stare.policy.packing import pack
from megatron_stare.policy.topology import Topology
from megatron_stare.policy.tuning import hardware, workspace_bytes
from megatron_stare.records import Group, MicroBatch, Nucleus, TokenBatch
from megatron_stare.system import digest

Shape = tuple[int, ...]  # of what one pipeline stage sends to another


class PolicyModel:
    """The model of `hf_checkpoint`, a Hugging Face directory or one converted from it.

    `temperature` divides its logits before every statistic.

    With `adapters` its weights are frozen, and adapters drawn from `seed` learn.

    `runnable` are the chunks as the schedules call them: wrapped for half precision here, for
    gradients by the Actor.
    """

    def __init__(
        self,
        hf_checkpoint: str,
        policy: PolicyConfig,
        topology: Topology,
        temperature: float,
        adapters: AdaptersConfig | None = None,
        seed: int = 0,
    ) -> None:
        from megatron.core.transformer.module import Float16Module

        self.policy, self.topology, self.temperature = policy, topology, temperature
        self.hf_checkpoint = hf_checkpoint
        self.hf = build.read_hf_config(hf_checkpoint)
        self.tuning = build.tuned(self.hf, policy, topology)
        self.chunks: list[Any] = build.build_model(self.hf, policy, topology)
        half = policy.dtype == "bf16"
        # Before they are loaded: it rounds buffers that a checkpoint holds in fp32.
        self.runnable: list[Any] = [Float16Module(c.config, c) if half else c for c in self.chunks]
        build.keep_precise(self.chunks)
        if model_state.is_distributed(hf_checkpoint):
            if model_state.common_state(Path(hf_checkpoint)).get("adapters"):
                raise UserError(
                    f"{hf_checkpoint} holds adapters without their base; merge them first: "
                    f"convert megatron-to-hf {hf_checkpoint} TARGET, and give TARGET"
                )
            model_state.into_model(self.chunks, Path(hf_checkpoint), topology)
        else:
            hf_weights.load_hf(self.chunks, hf_checkpoint, self.hf, topology)
        self.adapters = adapters or AdaptersConfig()
        if self.adapters.rank:
            attach(self.chunks, self.hf, policy, topology, self.adapters, seed)
        self.communicator = _pipeline_communicator(topology, self.chunks[0].config)
        self.routers: Routers | None = None  # the Actor's

    def weights(self) -> hf_weights.HFWeights:
        """(HF name, whole tensor) of every weight; all ranks must iterate together."""
        return hf_weights.HFWeights(self.chunks, self.hf, self.topology)

    def served_weights(self) -> hf_weights.HFWeights | AdaptedWeights:
        """`weights` as engines get them: with adapters.merge=false the adapters are apart."""
        if not self.adapters.apart:
            return self.weights()
        return AdaptedWeights(dataclasses.replace(self.weights(), merged=False), self.adapters)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A context in which the weights are on the device; before and after it, `rest`."""
        for chunk in self.chunks:
            chunk.to(runtime.device())
        try:
            yield
        finally:
            self.rest()

    def rest(self) -> None:
        """Move the weights of a model that only scores to host memory until `on_device`, with
        policy.offload_while_generating.
        """
        if self.policy.offload_while_generating:
            for chunk in self.chunks:
                chunk.cpu()

    def base(self) -> AbstractContextManager[None]:
        """A context in which the model runs without its adapters."""
        return without_adapters(self.chunks)

    @functools.cached_property
    def base_fingerprint(self) -> str:
        """The fingerprint of the frozen weights under the adapters, the same under every layout.
        Collective when it is first read.
        """
        return hf_weights.content_fingerprint(self.chunks, self.hf, self.topology)

    def described_adapters(self) -> dict[str, Any]:
        """The adapters, as a checkpoint describes them: their settings, and the weights that they
        belong to; empty without adapters. Collective.
        """
        if not self.adapters.rank:
            return {}
        settings = {name: getattr(self.adapters, name) for name in STORED_SETTINGS}
        base = str(Path(self.hf_checkpoint).resolve())
        return settings | {"base": base, "fingerprint": self.base_fingerprint}

    def check_adapters(self, checkpoint: Path, stored: dict[str, Any]) -> None:
        """UserError: the checkpoint's adapters are other ones than this model's, are of other
        weights, or there are none. `stored`: as described_adapters. Collective.
        """
        if bool(stored) != bool(self.adapters.rank):
            kind = "adapters alone" if stored else "whole weights"
            raise UserError(
                f"checkpoint {checkpoint} holds {kind}, and adapters.rank={self.adapters.rank}; "
                "set adapters.rank as in the run that wrote it, or choose another run.dir"
            )
        own = self.described_adapters()
        for name in STORED_SETTINGS if stored else ():
            if stored[name] != own[name]:
                raise UserError(
                    f"checkpoint {checkpoint} holds adapters with adapters.{name}={stored[name]}, "
                    f"and adapters.{name}={own[name]}; set it as in the run that wrote it"
                )
        if stored and stored["fingerprint"] != own["fingerprint"]:
            raise UserError(
                f"checkpoint {checkpoint} holds adapters of other weights "
                f"({stored['fingerprint']}) than those of policy.hf_checkpoint "
                f"({own['fingerprint']}); set policy.hf_checkpoint and policy.dtype as in the run "
                "that wrote it"
            )

    def fingerprint(self) -> str:
        """16 hex digits of every weight's name, shape and bits, the same on all ranks. Collective.

        Each rank hashes its own shards where they lie, and only the hashes travel. Equal weights
        under another parallel layout, or in another dtype, have another fingerprint.
        """
        named = [
            (number, name, parameter)
            for number, chunk in enumerate(self.chunks)
            for name, parameter in hf_weights.weights_of(chunk)
        ]
        hashes = torch.stack([bit_hash(parameter) for _, _, parameter in named]).tolist()
        own = [
            (number, name, str(parameter.dtype), list(parameter.shape), value)
            for (number, name, parameter), value in zip(named, hashes, strict=True)
        ]
        of_ranks = self.topology.gather(digest(json.dumps(own)))
        return digest(json.dumps(of_ranks))[:16]

    def steer(self) -> None:
        """In a model with experts, connect our routers, which replay choices and count, to
        Megatron's. Megatron's fused router has no hook for them.
        """
        if routing_shape(self.hf) and not self.tuning.moe_router_fusion:
            self.routers = Routers(self.chunks, self.hf, self.topology)

    def pack(self, groups: Sequence[Group], weight_version: int) -> TokenBatch:
        """This rank's share of the groups as micro-batches (policy/packing.py)."""
        batch = pack(
            groups,
            self.topology,
            self.policy,
            hidden_size=self.hf.hidden_size,
            weight_version=weight_version,
            routing=self.routers.shape if self.routers else None,
        )
        return batch if self.routers is None else self.routers.own(batch)

    def score(
        self,
        batch: TokenBatch,
        *,
        sensitivity: bool = False,
        proxy_kappa: float = 0.0,
        nucleus: Nucleus | None = None,
        tempering: float | None = None,
    ) -> TokenBatch:
        """The batch with surprisal and entropy [nats] of every
        loss token under the present weights.

        With `sensitivity` also the entropy sensitivity g, with `proxy_kappa` above 0 the log of the
        mass of tokens with p >= proxy_kappa max p (numerics/token_stats.py), with `nucleus` the
        entropy of that one, with `tempering` ln(pi^T(a) / pi(a)) at that T; the last two take a
        second projection each.
        """
        context = functools.partial(
            self.context,
            sensitivity=sensitivity,
            proxy_kappa=proxy_kappa,
            nucleus=nucleus,
            tempering=tempering,
        )
        with torch.no_grad():
            found = self.run(batch, context, lambda output: output, forward_only=True)
        if self.routers is not None and self.policy.routing_replay == "old_policy":
            batch = self.routers.recorded(batch)
        if self.routers is not None and self.policy.moe_aux_loss_coeff:
            batch = self.routers.with_tokens(batch)
        wanted = {
            "sensitivity": sensitivity,
            "proxy_mass": proxy_kappa > 0,
            "nucleus_entropy": nucleus is not None,
            "tempered": tempering is not None,
        }
        return self.with_statistics(batch, found, [name for name in wanted if wanted[name]])

    def likeliest(self, batch: TokenBatch, count: int) -> tuple[Tensor, Tensor]:
        """[T, K]: the ids [int32] with the highest logits in the place of every loss token, the
        likeliest first, and their log-probs [fp32].
        """
        count = min(count, self.hf.vocab_size)

        def read(logits_NV: Tensor, _: slice) -> Tensor:
            top_NK, ids_NK = torch.log_softmax(logits_NV, dim=-1).topk(count, dim=-1)
            return torch.stack([ids_NK.double(), top_NK.double()])

        ids_TK, logprob_TK = self._from_logits(batch, read, 2, count)
        return ids_TK.int(), logprob_TK.float()

    def logprobs_of(self, batch: TokenBatch, ids_TK: Tensor) -> Tensor:
        """[T, K]: the log-probs [fp32] of these ids in the place of every loss token."""

        def read(logits_NV: Tensor, rows: slice) -> Tensor:
            log_NV = torch.log_softmax(logits_NV, dim=-1)
            return log_NV.gather(1, ids_TK[rows].long()).double()[None]

        return self._from_logits(batch, read, 1, ids_TK.shape[1])[0].float()

    def _from_logits(
        self,
        batch: TokenBatch,
        read: Callable[[Tensor, slice], Tensor],
        kinds: int,
        count: int,
    ) -> Tensor:
        """[kinds, T, count] fp64: what `read` makes of a micro-batch's logits, which are held
        whole, and its place among the T tokens.
        """
        found: list[Tensor] = []

        def context(micro: MicroBatch) -> HeadContext:
            def noted(
                surprisal_n: Tensor, entropy_n: Tensor, rows: slice, logits: Tensor | None = None
            ) -> Tensor:
                assert logits is not None, "they are asked for"
                found.append(read(logits, micro.rows))
                return surprisal_n

            return self.context(micro, loss=noted, whole_logits=True)

        with torch.no_grad():
            self.run(batch, context, lambda output: output, forward_only=True)
        tokens = batch.sequence_T.numel()
        empty = batch.sequence_T.new_empty((kinds, tokens, count), dtype=torch.float64)
        return self.topology.from_last_stage(torch.cat(found, dim=1) if found else empty)

    def with_statistics(
        self, batch: TokenBatch, found: list[HeadOutput], further: Sequence[str] = ()
    ) -> TokenBatch:
        """The batch with what the heads of its micro-batches found, surprisal, entropy,
        variance and `further` statistics, sent from the last pipeline stage to all.
        """
        names = ["surprisal", "entropy", "variance", *further]
        columns = batch.advantage_T.new_empty((len(names), batch.advantage_T.numel()))
        if found:
            columns = torch.stack(
                [torch.cat([getattr(o, f"{name}_N") for o in found]) for name in names]
            ).float()
        columns = self.topology.from_last_stage(columns)
        filled: dict[str, Any] = {
            f"{name}_T": column for name, column in zip(names, columns, strict=True)
        }
        return dataclasses.replace(batch, **filled)

    def run(
        self,
        batch: TokenBatch,
        context: Callable[[MicroBatch], HeadContext],
        reduce: Callable[[HeadOutput], Any],
        forward_only: bool,
    ) -> list[Any]:
        """Megatron's forward(-backward) schedule over the micro-batches.

        `reduce` gets each head's output. Its results are returned, on the last pipeline stage; the
        list of the other stages is empty.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(
            microbatches: Iterator[MicroBatch], model: nn.Module
        ) -> tuple[Any, Callable[..., Any]]:
            micro = next(microbatches)
            output = model(
                micro.token_BS,
                micro.position_BS,
                None,
                packed_seq_params=_packed(micro, self.policy.shared_prompts),
                output_processor=loss_head,
                output_processor_context=context(micro),
            )
            return output, lambda output, non_loss_data=False: reduce(output)

        chunks = len(self.runnable)
        self.communicator.expect([self._sent(micro) for micro in batch.microbatches], forward_only)
        schedule = get_forward_backward_func(
            self.topology.pipeline_size, chunks if chunks > 1 else None
        )
        with self._steered(batch, forward_only):
            found: list[Any] = schedule(
                forward_step_func=forward_step,
                data_iterator=[iter(batch.microbatches) for _ in self.runnable],
                model=self.runnable,
                num_microbatches=len(batch.microbatches),
                seq_length=batch.microbatches[0].token_BS.shape[1],
                micro_batch_size=batch.microbatches[0].token_BS.shape[0],
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
                pg_collection=self.topology.groups,
                p2p_communicator=self.communicator,
            )
        self.communicator.done()
        release_routes(self.chunks)
        return found

    def _steered(self, batch: TokenBatch, forward_only: bool) -> AbstractContextManager[None]:
        """A context in which routers go over the batch's micro-batches."""
        if self.routers is None:
            return nullcontext()
        if forward_only:
            return self.routers.at(batch, record=self.policy.routing_replay == "old_policy")
        scored = batch.expert_tokens_LE is not None  # a cold start's batch is not
        return self.routers.at(batch, coefficient=scored * self.policy.moe_aux_loss_coeff)

    def _sent(self, micro: MicroBatch) -> tuple[int, int, int]:
        """[S, B, H] of a micro-batch between pipeline stages; S is this rank's share of it."""
        batch, positions = micro.token_BS.shape
        share = self.topology.tensor_size if self.policy.sequence_parallel else 1
        return positions // share, batch, self.hf.hidden_size

    def context(self, micro: MicroBatch, *, way: str = "recompute", **special: Any) -> HeadContext:
        """The context of the head for one micro-batch."""
        return HeadContext(
            row_N=micro.row_N,
            target_N=micro.target_N,
            temperature=self.temperature,
            vocab_size=self.hf.vocab_size,
            tensor_group=self.topology.tensor,
            way=way,
            workspace_bytes=workspace_bytes(self.policy, hardware().memory_bytes),
            fp32_logits=self.policy.fp32_logits,
            sequence_parallel=self.policy.sequence_parallel,
            **special,
        )


def _packed(micro: MicroBatch, shared_prompts: bool) -> Any:
    """Megatron's PackedSeqParams of a packed micro-batch with its prefixes, None for a padded one.

    TransformerEngine's attention reads the lengths on the device; for ours the host does, layer by
    layer, and would wait for a device each time.
    """
    if micro.cumulative_lengths is None:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    cumulative = micro.cumulative_lengths
    if hardware().has_transformer_engine and not shared_prompts:
        cumulative = to_device(cumulative, micro.token_BS.device)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        cu_seqlens_q_padded=cumulative,
        cu_seqlens_kv_padded=cumulative,
        max_seqlen_q=micro.longest,
        max_seqlen_kv=micro.longest,
        pad_between_seqs=False,  # else each layer compares the lengths on the host
    )
    params.prefixes = micro.prefixes  # for cpu_layers/attention.py
    return params


def received(
    count: int, stage: int, stages: int, chunks: int, turn: int
) -> tuple[list[int], list[int]]:
    """The micro-batches whose activations come from the stage before, and whose gradients come from
    the stage after, in the order in which they are received.

    1F1B: every one in turn. Interleaved over `chunks` in turns of `turn` (Megatron's
    get_schedule_table; arXiv 2104.04473, section 2.2): in the order of the schedule, which is the
    sender's too. Activations of the last chunk stay on the last stage, and gradients of the first
    chunk on the first stage: neither is sent around to the other end.
    """
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    if chunks == 1:
        every = list(range(count))
        return (every if stage else []), (every if stage < stages - 1 else [])
    table = get_schedule_table(count, chunks, turn)
    whole = [number for number, _ in table]
    around = [number for number, chunk in table if chunk != chunks - 1]
    return (whole if stage else around), (whole if stage < stages - 1 else around)


def _pipeline_communicator(topology: Topology, transformer: Any) -> Any:
    """A P2PCommunicator of this pipeline group that knows the shapes to come, as every rank has the
    lengths of a batch's micro-batches: `expect` says what one run of a schedule is sent, and `done`
    that it was all of it.

    Megatron's own communicator sends the shape of every tensor ahead where lengths vary, waits for
    the whole device and reads the shape on the host: twice a micro-batch, forward and back.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    class Communicator(P2PCommunicator):
        forward: Iterator[Shape] = iter(())
        backward: Iterator[Shape] = iter(())

        def expect(self, shapes: Sequence[Shape], forward_only: bool) -> None:
            """One shape for every micro-batch of the coming run."""
            before, after = received(
                len(shapes),
                topology.pipeline_rank,
                topology.pipeline_size,
                topology.virtual_size,
                transformer.microbatch_group_size_per_vp_stage or topology.pipeline_size,
            )
            self.forward = iter([shapes[number] for number in before])
            self.backward = iter([] if forward_only else [shapes[number] for number in after])

        def done(self) -> None:
            """RuntimeError: the schedule left something that was expected."""
            if (left := len([*self.forward, *self.backward])) > 0:
                raise RuntimeError(f"the schedule received {left} tensors less than it should")

        def _communicate_shapes(
            self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
        ) -> Any:
            return (
                next(self.forward) if recv_prev else None,
                next(self.backward) if recv_next else None,
            )

    return Communicator(topology.pipeline, transformer)
