"""Tokens from logits at given random numbers.

Shape legend: B sequences, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    weight_BV = logprob_BV.double().exp()
    if top_p < 1 or 0 < top_k < weight_BV.shape[-1]:
        ordered_BV, order_BV = weight_BV.sort(dim=-1, descending=True, stable=True)
        if top_p < 1:
            before_BV = ordered_BV.cumsum(-1) - ordered_BV
            ordered_BV = ordered_BV.where(before_BV < top_p, 0.0)
        if top_k > 0:
            ordered_BV[:, top_k:] = 0.0
        weight_BV = torch.zeros_like(weight_BV).scatter(-1, order_BV, ordered_BV)
    cumulative_BV = weight_BV.cumsum(-1)
    threshold_B1 = (uniform_B * cumulative_BV[:, -1])[:, None]
    token_B1 = torch.searchsorted(cumulative_BV, threshold_B1, right=True)
    # Rounding may land one past the last token of positive weight.
    last_B1 = (weight_BV > 0).long().cumsum(-1).argmax(-1, keepdim=True)
    token_B1 = torch.minimum(token_B1, last_B1)
    return token_B1[:, 0], logprob_BV.gather(-1, token_B1)[:, 0]
