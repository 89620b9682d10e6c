"""The embedded engine: a transformers model in the trainer's own process. The default on one machine.

Sampling inverts the cumulative distribution at a uniform number that depends only on the request's seed and the
position, so a rollout does not depend on what is decoded beside it, and a resumed run repeats it.

Shape legend: B sequences still decoding, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from megatron_stare.records import Rollout, Status
from megatron_stare.rollout.engine import Limits, Request, SamplingParams, State
from megatron_stare.rollout.stops import stop_ids


@dataclass
class _Sequence:
    """One response being decoded."""

    request: Request
    uniforms: numpy.ndarray
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    status: Status = "truncated"


class EmbeddedEngine:
    """Batched decoding with a key-value cache on this process's device; finished sequences leave the batch."""

    def __init__(
        self,
        hf_checkpoint: str,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        config = AutoConfig.from_pretrained(hf_checkpoint, local_files_only=True)
        self.model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
        self.tokenizer, self.batch_size, self.device = tokenizer, batch_size, device
        context_length = int(config.max_position_embeddings)
        self.limits = Limits(int(config.vocab_size), context_length, context_length)
        self.stop_ids = stop_ids(hf_checkpoint, tokenizer)
        self.version = -1
        self._going = threading.Event()
        self._going.set()
        self._aborted: set[tuple[int, ...]] = set()
        self._in_flight: set[tuple[int, ...]] = set()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy every weight in by name. RuntimeError: a name this model lacks, or one that never came."""
        with torch.no_grad():
            missing = dict(_places(self.model))
            for name, tensor in weights:
                if name not in missing:
                    raise RuntimeError(f"weight sync sent {name}, which the engine's model lacks")
                missing.pop(name).copy_(tensor)
        if missing:
            raise RuntimeError(f"weight sync never sent {', '.join(sorted(missing))}")
        self.version = version

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Rollout]:
        """One rollout per request, in order. UserError: a prompt without room for a response, or with a foreign id."""
        for request in requests:
            self.limits.check(request, params)
        sequences = [_Sequence(r, numpy.random.default_rng(r.seed).random(params.max_new_tokens)) for r in requests]
        by_length = sorted(sequences, key=lambda s: len(s.request.prompt_ids))
        self._in_flight = {request.seed for request in requests}
        for start in range(0, len(by_length), self.batch_size):
            self._decode(by_length[start : start + self.batch_size], params)
        self._in_flight, self._aborted = set(), set()
        return [self._rollout(sequence, params) for sequence in sequences]

    def pause(self) -> None:
        """Hold decoding at its next token."""
        self._going.clear()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._going.set()

    def abort(self, requests: Sequence[Request] | None = None) -> None:
        """End these requests, or all in flight, at their next token."""
        self._aborted |= self._in_flight if requests is None else {request.seed for request in requests}

    def health(self) -> dict[str, State]:
        """This process is alive: ready or paused."""
        return {"embedded": State.READY if self._going.is_set() else State.PAUSED}

    def counts(self) -> dict[str, float]:
        """Nothing can fail here without ending the run."""
        return {}

    def close(self) -> None:
        """Nothing was started."""

    @torch.inference_mode()
    def _decode(self, live: list[_Sequence], params: SamplingParams) -> None:
        prompt_BS, mask_BS = self._left_padded(live)
        position_B = mask_BS.sum(1)
        cache = DynamicCache(config=self.model.config)
        token_BS, position_BS = prompt_BS, (mask_BS.cumsum(1) - 1).clamp(min=0)
        for step in range(params.max_new_tokens):
            self._going.wait()
            logits_BV = self.model(
                token_BS,
                attention_mask=mask_BS,
                position_ids=position_BS,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            uniform_B = torch.tensor([s.uniforms[step] for s in live], dtype=torch.float64, device=self.device)
            chosen_B, logprob_B = sample(logits_BV, uniform_B, params.temperature, params.top_p)
            keep = []
            for row, (sequence, token, logprob) in enumerate(
                zip(live, chosen_B.tolist(), logprob_B.tolist(), strict=True)
            ):
                sequence.ids.append(token)
                sequence.logprobs.append(logprob)
                if token in self.stop_ids:
                    sequence.status = "completed"
                elif sequence.request.seed in self._aborted and step + 1 < params.max_new_tokens:
                    sequence.status = "aborted"
                else:
                    keep.append(row)
            if not keep:
                return
            if len(keep) < len(live):
                kept = torch.tensor(keep, device=self.device)
                cache.batch_select_indices(kept)
                live = [live[row] for row in keep]
                mask_BS, position_B, chosen_B = mask_BS[kept], position_B[kept], chosen_B[kept]
            token_BS, position_BS = chosen_B[:, None], position_B[:, None]
            mask_BS = torch.cat([mask_BS, mask_BS.new_ones(len(live), 1)], dim=1)
            position_B = position_B + 1

    def _left_padded(self, live: list[_Sequence]) -> tuple[Tensor, Tensor]:
        width = max(len(s.request.prompt_ids) for s in live)
        token_BS = torch.zeros((len(live), width), dtype=torch.long)
        mask_BS = torch.zeros_like(token_BS)
        for row, sequence in enumerate(live):
            prompt = torch.tensor(sequence.request.prompt_ids)
            token_BS[row, width - len(prompt) :] = prompt
            mask_BS[row, width - len(prompt) :] = 1
        return token_BS.to(self.device), mask_BS.to(self.device)

    def _rollout(self, sequence: _Sequence, params: SamplingParams) -> Rollout:
        return Rollout(
            response_ids=tuple(sequence.ids),
            logprobs=tuple(sequence.logprobs),
            loss_mask=(1,) * len(sequence.ids),
            status=sequence.status,
            weight_version=self.version,
            text=self.tokenizer.decode(sequence.ids, skip_special_tokens=params.skip_special_tokens),
        )


def _places(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Where each checkpoint tensor goes: its parameter, or its slice of one.

    transformers holds a layer's experts as gate_up_proj [E, 2F, H] and down_proj [E, H, F], which its checkpoints name
    expert by expert.
    """
    for name, parameter in model.named_parameters():
        prefix, marker, matrix = name.partition(".mlp.experts.")
        if not marker:
            yield name, parameter
            continue
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[matrix]
        for expert, weight in enumerate(parameter):
            for part, rows in zip(parts, weight.chunk(len(parts)), strict=True):
                yield f"{prefix}{marker}{expert}.{part}.weight", rows


def sample(logits_BV: Tensor, uniform_B: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """Token and log-prob by inverse cumulative distribution at `uniform_B` in [0, 1).

    The log-prob is ln softmax(logits / temperature) of the full vocabulary. top_p < 1 keeps the smallest set of most
    likely tokens whose mass reaches top_p, and samples within it.
    """
    logprob_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    weight_BV = logprob_BV.double().exp()
    if top_p < 1:
        ordered_BV, order_BV = weight_BV.sort(dim=-1, descending=True)
        before_BV = ordered_BV.cumsum(-1) - ordered_BV
        weight_BV = torch.zeros_like(weight_BV).scatter(-1, order_BV, ordered_BV.where(before_BV < top_p, 0.0))
    cumulative_BV = weight_BV.cumsum(-1)
    threshold_B1 = (uniform_B * cumulative_BV[:, -1])[:, None]
    token_B1 = torch.searchsorted(cumulative_BV, threshold_B1, right=True)
    # Rounding may land one past the last token of positive weight.
    last_B1 = (weight_BV > 0).long().cumsum(-1).argmax(-1, keepdim=True)
    token_B1 = torch.minimum(token_B1, last_B1)
    return token_B1[:, 0], logprob_BV.gather(-1, token_B1)[:, 0]
