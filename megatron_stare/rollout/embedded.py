"""The embedded engine: a transformers model in the trainer's own process.
The default on one machine.

The uniform number of a token depends only on the request's seed and the position, so a rollout does
not depend on the rest of its batch, and a resumed run repeats it.

Shape legend: B sequences still decoding, V vocabulary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_stare.records import Rollout, Status
from megatron_stare.rollout.embedded_model import (
    ADAPTER_PREFIX,
    AppliedAdapters,
    build_model,
    empty_cache,
    noted_choices,
    places_of,
)
from megatron_stare.rollout.engine import (
    Limits,
    Request,
    SamplingParams,
    ends_with_stop,
    still_open,
    stop_ids,
)

_REPLACING_SECONDS = 1e-3
ROWS = 8  # sampled at a time on a CPU
BLOCK = 256  # tokens


@dataclass(eq=False)
class _Sequence:
    """One response being decoded; `versions` has the weight version of each token."""

    request: Request
    params: SamplingParams
    future: Future[Rollout]
    uniforms: numpy.ndarray
    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    routing: list[numpy.ndarray]  # [P, L, K] of the first positions, in pieces
    status: Status = "truncated"

    @classmethod
    def of(cls, request: Request, params: SamplingParams) -> _Sequence:
        """A sequence with the tokens of the request's part, if it has one."""
        uniforms = numpy.random.default_rng(request.seed).random(params.max_new_tokens)
        part = request.part or Rollout.inserted((), "aborted", -1)
        known = (part.response_ids.tolist(), part.logprobs.tolist(), part.versions.tolist())
        routing = [params.routing.decoded(part.routing)] if params.routing else []
        return cls(request, params, Future(), uniforms, *known, routing)

    def route(self, chosen_SLK: numpy.ndarray) -> None:
        """Note the experts of the last S positions that the model has read, if they are new."""
        read = len(self.request.prompt_ids) + len(self.ids)
        noted = sum(map(len, self.routing))
        self.routing.append(chosen_SLK[len(chosen_SLK) - (read - noted) :])

    @property
    def done(self) -> bool:
        return self.status != "truncated" or len(self.ids) >= self.params.max_new_tokens


class EmbeddedEngine:
    """Batched decoding with a key-value cache on this process's device; finished sequences leave
    the batch.

    A thread of the engine decodes; requests that come meanwhile wait for the batch to end. Weights
    may change between any two tokens: the thread then computes the cache again under the new
    weights, and continues.
    """

    def __init__(
        self,
        hf_checkpoint: str,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        dtype: torch.dtype,
        device: torch.device,
        sources: int = 1,
        fp32_logits: bool = False,
        adapter_scale: float = 1.0,
    ) -> None:
        self.model = build_model(hf_checkpoint, dtype, device, fp32_logits)
        config = self.model.config
        self.adapters = AppliedAdapters(self.model, adapter_scale)
        self.tokenizer, self.batch_size = tokenizer, batch_size
        self.device, self.sources = device, sources
        context_length = int(config.max_position_embeddings)
        self.limits = Limits(int(config.vocab_size), context_length, context_length)
        self.stop_ids = stop_ids(hf_checkpoint, tokenizer)
        self.version = -1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embedded-engine")
        self._weights = threading.Lock()  # held while the weights are read or replaced
        # A lock alone is not fair: the decoder would acquire it again at once.
        self._replacing = threading.Event()
        self._waiting: list[_Sequence] = []
        self._live: list[_Sequence] = []
        self._book = threading.Lock()  # guards the lists and the aborted seeds
        self._aborted: set[tuple[int, ...]] = set()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy every weight in by name, and adapters that come with them. RuntimeError: this model
        lacks a name, or a name never came.
        """
        self._replacing.set()
        try:
            with self._weights, torch.no_grad():
                missing = dict([*places_of(self.model), *self.adapters.places()])
                for name, tensor in weights:
                    if name.startswith(ADAPTER_PREFIX) and name not in missing:
                        self.adapters.add(name, tensor)
                        continue
                    if name not in missing:
                        raise RuntimeError(
                            f"weight sync sent {name}, which the engine's model lacks"
                        )
                    missing.pop(name).copy_(tensor)
                if missing:
                    raise RuntimeError(f"weight sync never sent {', '.join(sorted(missing))}")
                self.version = version
        finally:
            self._replacing.clear()

    def submit(self, requests: Sequence[Request], params: SamplingParams) -> list[Future[Rollout]]:
        """One future per request. UserError: a prompt without room for a response, or with an id
        outside the vocabulary.
        """
        for request in requests:
            self.limits.check(request, params)
        sequences = [_Sequence.of(request, params) for request in requests]
        for sequence in sequences:
            sequence.future.set_running_or_notify_cancel()  # `abort` ends it, not Future.cancel
        with self._book:
            self._waiting += sequences
        self._thread.submit(self._work)
        return [sequence.future for sequence in sequences]

    def wait(self, futures: Sequence[Future[Any]]) -> None:
        """Wait until all are done; raise the first failure."""
        wait(futures, return_when=FIRST_EXCEPTION)
        still_open(futures)

    def release_memory(self) -> None:
        """Nothing to do: the memory is the trainer's own."""

    def abort(self, requests: Sequence[Request] | None = None) -> None:
        """End these requests, or all in flight, at their next token."""
        with self._book:
            known = {sequence.request.seed for sequence in [*self._waiting, *self._live]}
            self._aborted |= (
                known if requests is None else known & {request.seed for request in requests}
            )

    def counts(self) -> dict[str, float]:
        """No counts: a failure of this engine ends the run."""
        return {}

    def close(self) -> None:
        """End what is in flight, and the thread."""
        self.abort()
        self._thread.shutdown()

    def _work(self) -> None:
        """Decode all waiting sequences, shortest prompts first; in the engine's thread."""
        with self._book:
            taken, self._waiting = self._waiting, []
            self._live += taken
        # sort() is stable, and keeps the order in which requests of one length came.
        taken.sort(key=lambda sequence: len(sequence.request.prompt_ids))
        for params in dict.fromkeys(sequence.params for sequence in taken):
            alike = [sequence for sequence in taken if sequence.params == params]
            for batch in _batches(alike, self.batch_size):
                try:
                    self._decode(batch, params)
                except BaseException as error:
                    self._leave(batch)
                    for sequence in batch:
                        if not sequence.future.done():
                            sequence.future.set_exception(error)

    def _decode(self, live: list[_Sequence], params: SamplingParams) -> None:
        """Decode until every sequence has ended, one version of the weights after the other."""
        live = self._without_ended(live, params)
        while live:
            live = self._stretch(live, params)

    @torch.inference_mode()
    def _stretch(self, live: list[_Sequence], params: SamplingParams) -> list[_Sequence]:
        """Decode until all sequences have ended, or the weights have changed: then the rest, whose
        caches must be computed again.
        """
        version = self.version
        cache = empty_cache(self.model.config, growing=self.device.type == "cpu")
        known, row_B = _beginnings(live)  # a group's prompt is read once
        token_BS, mask_BS = self._left_padded(known)
        position_B, position_BS = mask_BS.sum(1), (mask_BS.cumsum(1) - 1).clamp(min=0)
        while True:
            while self._replacing.is_set():
                time.sleep(_REPLACING_SECONDS)
            with self._weights:
                if self.version != version:
                    return live
                with noted_choices(self.model, params.routing) as choices:
                    logits_BV = self.model(
                        token_BS,
                        attention_mask=mask_BS,
                        position_ids=position_BS,
                        past_key_values=cache,
                        use_cache=True,
                        logits_to_keep=1,
                    ).logits[:, -1]
            _route(live, choices, token_BS.shape, row_B)
            if row_B is not None:
                logits_BV, mask_BS, position_B = logits_BV[row_B], mask_BS[row_B], position_B[row_B]
                cache.batch_select_indices(row_B)
                row_B = None
            chosen_B = self._sampled(live, logits_BV, params, version)
            going = self._without_ended(live, params)
            if not going:
                return []
            if len(going) < len(live):
                rows = _filled([not sequence.future.done() for sequence in live])
                kept = torch.tensor(rows, device=self.device)
                cache.batch_select_indices(kept)
                live = [live[row] for row in rows]
                mask_BS, position_B, chosen_B = mask_BS[kept], position_B[kept], chosen_B[kept]
            token_BS, position_BS = chosen_B[:, None], position_B[:, None]
            mask_BS = torch.cat([mask_BS, mask_BS.new_ones(len(live), 1)], dim=1)
            position_B = position_B + 1

    def _sampled(
        self, live: list[_Sequence], logits_BV: Tensor, params: SamplingParams, version: int
    ) -> Tensor:
        """Append one token to every sequence; returns the tokens."""
        uniform_B = torch.tensor(
            [s.uniforms[len(s.ids)] for s in live], dtype=torch.float64, device=self.device
        )
        chosen_B, logprob_B = next_tokens(logits_BV, uniform_B, params)
        for sequence, token, logprob in zip(
            live, chosen_B.tolist(), logprob_B.tolist(), strict=True
        ):
            sequence.ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(version)
            at_stop = params.stop and ends_with_stop(self.tokenizer, sequence.ids, params.stop)
            if token in self.stop_ids or at_stop:
                sequence.status = "completed"
        return chosen_B

    def _without_ended(self, live: list[_Sequence], params: SamplingParams) -> list[_Sequence]:
        """The sequences that continue; the futures of the others are done."""
        with self._book:
            for sequence in live:
                if not sequence.done and sequence.request.seed in self._aborted:
                    sequence.status = "aborted"
        ended = [sequence for sequence in live if sequence.done]
        if not ended:
            return live
        self._leave(ended)
        for sequence in ended:
            sequence.future.set_result(self._rollout(sequence, params))
        return [sequence for sequence in live if not sequence.future.done()]

    def _leave(self, ended: list[_Sequence]) -> None:
        """Remove these sequences: their seeds may be used again."""
        gone = set(ended)
        with self._book:
            self._live = [sequence for sequence in self._live if sequence not in gone]
            self._aborted -= {sequence.request.seed for sequence in ended}

    def _left_padded(self, known: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        width = max(len(ids) for ids in known)
        token_BS = torch.zeros((len(known), width), dtype=torch.long)
        mask_BS = torch.zeros_like(token_BS)
        for row, ids in enumerate(known):
            token_BS[row, width - len(ids) :] = torch.tensor(ids)
            mask_BS[row, width - len(ids) :] = 1
        return token_BS.to(self.device), mask_BS.to(self.device)

    def _rollout(self, sequence: _Sequence, params: SamplingParams) -> Rollout:
        versions, part = sequence.versions, sequence.request.part
        mask = numpy.ones(len(sequence.ids), numpy.bool_)
        if part:
            mask[: len(part.loss_mask)] = part.loss_mask
        return Rollout(
            response_ids=numpy.array(sequence.ids, numpy.int32),
            logprobs=numpy.array(sequence.logprobs, numpy.float32),
            loss_mask=mask,
            status=sequence.status,
            weight_version=versions[-1] if versions else self.version,
            token_versions=numpy.array(versions, numpy.int32),
            routing=params.routing.encoded(numpy.concatenate(sequence.routing))
            if params.routing
            else numpy.zeros(0, numpy.uint8),
            text=self.tokenizer.decode(
                sequence.ids, skip_special_tokens=params.skip_special_tokens
            ),
        )


def _route(
    live: list[_Sequence], choices: list[Tensor], shape_BS: torch.Size, row_B: Tensor | None
) -> None:
    """Note the routers' choices for the tokens of these sequences, if they were recorded. `row_B`:
    the row of each sequence, unless each has its own.
    """
    if choices:
        chosen_BSLK = torch.stack(choices, 1).unflatten(0, shape_BS)
        chosen_BSLK = chosen_BSLK if row_B is None else chosen_BSLK[row_B]
        for sequence, chosen_SLK in zip(live, chosen_BSLK.cpu().numpy(), strict=True):
            sequence.route(chosen_SLK)


def _beginnings(live: list[_Sequence]) -> tuple[list[tuple[int, ...]], Tensor | None]:
    """The different beginnings of the sequences, and the number of each sequence's; None: no two
    are equal.
    """
    known = [(*s.request.prompt_ids.tolist(), *s.ids) for s in live]
    numbers = {ids: number for number, ids in enumerate(dict.fromkeys(known))}
    if len(numbers) == len(known):
        return known, None
    return list(numbers), torch.tensor([numbers[ids] for ids in known])


def _filled(continues: list[bool]) -> list[int]:
    """The rows that continue: the places of the others are filled from the end, so that few rows
    move.
    """
    count = sum(continues)
    moved = (row for row in range(count, len(continues)) if continues[row])
    return [row if continues[row] else next(moved) for row in range(count)]


def _batches(sequences: list[_Sequence], size: int) -> Iterator[list[_Sequence]]:
    """Up to `size` sequences at a time. The responses to one prompt, whose seeds differ in the last
    number, stay together if possible: the composition of a batch decides the last bits of
    log-probs, which must not depend on the distribution of prompts over ranks.
    """
    start = 0
    while start < len(sequences):
        end = min(start + size, len(sequences))
        while start < end < len(sequences) and _of_one_prompt(sequences[end - 1 : end + 1]):
            end -= 1
        end = end if end > start else min(start + size, len(sequences))
        yield sequences[start:end]
        start = end


def _of_one_prompt(pair: list[_Sequence]) -> bool:
    return pair[0].request.seed[:-1] == pair[1].request.seed[:-1]


def next_tokens(
    logits_BV: Tensor, uniform_B: Tensor, params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """The next token of each sequence and its log-prob, by `likeliest` or `sample`.

    On a CPU few rows at a time: new memory for all of them takes several times as long as the
    arithmetic.
    """
    rows = ROWS if logits_BV.device.type == "cpu" else len(logits_BV)
    parts = [
        likeliest(logits)
        if params.greedy
        else sample(logits, uniform, params.temperature, params.top_p, params.top_k)
        for logits, uniform in zip(logits_BV.split(rows), uniform_B.split(rows), strict=True)
    ]
    token_B, logprob_B = (torch.cat(part) for part in zip(*parts, strict=True))
    return token_B, logprob_B


def likeliest(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the most likely tokens, and its ln softmax(logits): greedy sampling."""
    logprob_B, token_B = torch.log_softmax(logits_BV.float(), dim=-1).max(-1)
    return token_B, logprob_B


def sample(
    logits_BV: Tensor, uniform_B: Tensor, temperature: float, top_p: float, top_k: int = 0
) -> tuple[Tensor, Tensor]:
    """Token and log-prob by inverse cumulative distribution at `uniform_B` in [0, 1).

    The log-prob is ln softmax(logits / temperature) of the full vocabulary. top_p < 1 keeps the
    smallest set of most likely tokens whose mass (of the full vocabulary) reaches top_p, top_k > 0
    at most this many of them, of equal ones the first; what is sampled lies in both.
    """
    logprob_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    if top_p >= 1 and not 0 < top_k < logprob_BV.shape[-1]:
        token_B = _inverse_by_blocks(logprob_BV.exp(), uniform_B)
        return token_B, logprob_BV.gather(-1, token_B[:, None])[:, 0]
    ordered_BV, order_BV = logprob_BV.double().exp().sort(dim=-1, descending=True, stable=True)
    if top_p < 1:
        before_BV = ordered_BV.cumsum(-1) - ordered_BV
        ordered_BV = ordered_BV.where(before_BV < top_p, 0.0)
    if top_k > 0:
        ordered_BV[:, top_k:] = 0.0
    weight_BV = torch.zeros_like(ordered_BV).scatter(-1, order_BV, ordered_BV)
    token_B = _inverse(weight_BV, uniform_B * weight_BV.sum(-1))
    return token_B, logprob_BV.gather(-1, token_B[:, None])[:, 0]


def _inverse_by_blocks(weight_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The token at which the cumulative weight passes its share `uniform_B`: first the block of the
    vocabulary, by sums in fp64, then the token in it.
    """
    padded_BV = torch.nn.functional.pad(weight_BV, (0, -weight_BV.shape[1] % BLOCK))
    block_BNV = padded_BV.unflatten(1, (-1, BLOCK))
    sum_BN = block_BNV.sum(-1).double()
    threshold_B = uniform_B * sum_BN.sum(-1)
    number_B = _inverse(sum_BN, threshold_B)
    rows_B = torch.arange(len(number_B), device=number_B.device)
    before_B = sum_BN.cumsum(-1)[rows_B, number_B] - sum_BN[rows_B, number_B]
    inside_B = _inverse(block_BNV[rows_B, number_B].double(), threshold_B - before_B)
    return number_B * BLOCK + inside_B


def _inverse(weight_BN: Tensor, threshold_B: Tensor) -> Tensor:
    """The first column with a cumulative weight above the threshold; where rounding finds none, the
    last one of positive weight.
    """
    found_B = torch.searchsorted(weight_BN.cumsum(-1), threshold_B[:, None], right=True)[:, 0]
    last_B = weight_BN.shape[1] - 1 - (weight_BN > 0).flip(-1).int().argmax(-1)
    return torch.minimum(found_B, last_B)
