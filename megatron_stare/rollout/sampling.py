"""Sampling of tokens from logits: the cumulative distribution is inverted at a uniform number.

Shape legend: B sequences, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stare.rollout.engine import SamplingParams

ROWS = 8  # sampled at a time on a CPU
BLOCK = 256  # tokens


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
