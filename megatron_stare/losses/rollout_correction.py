"""Weights that correct for a rollout policy other than the one whose loss is taken.

The engine sampled with mu, the loss's ratio starts at pi_old: another kernel, another precision, or
older weights. With rho_t = pi_old(a_t) / mu(a_t), detached, and rho_s = prod of rho_t over the loss
tokens of a sequence:

    token_tis      w = min(rho_t, C)                         C = 2
                   fengyao.notion.site/off-policy-rl
    sequence_tis   w = min(rho_s, C)                         C = 2            the same, over
                   sequences
    token_mis      w = rho_t where c <= rho_t <= C, else 0   c, C = 0.5, 2    the same, masked
                   (arXiv 2512.01374)
    sequence_mis   w = rho_s where c <= rho_s <= C, else 0   c, C = 0.5, 2
    icepop         w = rho_t where c <= rho_t <= C, else 0   c, C = 0.5, 5    arXiv 2510.18855
    geo_rs         w = 1 where c <= rho_s^(1/n) <= C, else 0 c, C = 0.999, 1.001, n tokens of the
                   sequence

A bound that is not set is the table's; of token_mis, sequence_mis and geo_rs c is 1 / C where C
alone is set, as in verl (rollout_corr_helper.py). mismatch.normalize divides by the batch's mean
weight, over tokens, or over sequences where a weight is a sequence's, as verl does.

A weight multiplies the finished token loss once (losses/registry.py); of a loss with an entropy
term or a KL term, the surrogate alone. The denominator stays the whole batch's; with
mismatch.rejected=drop tokens of weight 0 leave it, and with mismatch.accepted=one the others of the
masks weigh 1: verl's rejection sampling. Shape legend: T loss tokens of one rank's batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_stare.config import MismatchAlarm, MismatchConfig
from megatron_stare.numerics.selection import Across
from megatron_stare.records import Signals, TokenBatch

# The bounds where mismatch.lower and mismatch.upper are 0.
BOUNDS = {
    "token_tis": (0.0, 2.0),
    "sequence_tis": (0.0, 2.0),
    "token_mis": (0.5, 2.0),
    "sequence_mis": (0.5, 2.0),
    "icepop": (0.5, 5.0),
    "geo_rs": (0.999, 1.001),
}
OF_SEQUENCES = ("sequence_tis", "sequence_mis", "geo_rs")
LARGEST_K3 = 10.0


def corrected(
    batch: TokenBatch,
    signals: Signals,
    config: MismatchConfig,
    across: Across,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Signals:
    """The signals with `correction_T`, and metrics of it. `reduce` gives the coefficients of the
    tokens in a mask, for mismatch.rejected=drop. Raises MismatchAlarm. Needs a scored batch.
    """
    difference_T = log_ratio(batch, config)
    metrics: dict[str, float] = {}
    weight_T: Tensor | None = None
    if config.correction != "none":
        weight_T = weights(batch, difference_T, config, across)
        metrics = _weight_metrics(weight_T, across)
    if config.alarm and across.count(batch.comparable_T):
        masked_T = _alarm(difference_T, batch.comparable_T, config, across)
        metrics["mismatch_alarm_masked"] = float(across.count(masked_T))
        ones_T = (
            torch.ones_like(difference_T, dtype=torch.float32) if weight_T is None else weight_T
        )
        weight_T = torch.where(masked_T, 0.0, ones_T)
    if config.rejected == "drop" and weight_T is not None and reduce is not None:
        kept_T = weight_T != 0 if signals.kept_T is None else (weight_T != 0) & signals.kept_T
        signals = dataclasses.replace(signals, coefficient_T=reduce(kept_T), kept_T=kept_T)
    return dataclasses.replace(signals, correction_T=weight_T, metrics=signals.metrics | metrics)


def log_ratio(batch: TokenBatch, config: MismatchConfig) -> Tensor:
    """ln pi_old - ln mu per token, clamped to [-20, 20]; 0, for a weight of 1, where mu had another
    temperature.

    pi_old is the current policy where the batch has no other, or where it is mu itself: of every
    token with mismatch.old_policy=rollout, of stale ones with auto and no correction.
    """
    surprisal_T, old_T = batch.surprisal_T, batch.old_surprisal_T
    assert surprisal_T is not None, "a correction needs a scored batch"
    if old_T is not None and config.old_policy != "rollout":
        mixed = config.old_policy == "auto" and config.correction == "none"
        surprisal_T = torch.where(batch.fresh_T, old_T, surprisal_T) if mixed else old_T
    difference_T = torch.clamp(-surprisal_T - batch.rollout_logprob_T, -20.0, 20.0)
    return torch.where(batch.comparable_T, difference_T, 0.0)


def k3(difference_T: Tensor) -> Tensor:
    """e^d - d - 1 with d = ln pi - ln mu, at most 10:
    an estimate of KL(mu || pi) that is never negative [nats].
    """
    return torch.clamp(torch.expm1(difference_T) - difference_T, max=LARGEST_K3)


def weights(
    batch: TokenBatch, difference_T: Tensor, config: MismatchConfig, across: Across
) -> Tensor:
    """w of every token [fp32], by the table above;
    with mismatch.normalize divided by its mean over the batch.
    """
    low, high = bounds(config)
    exponent_T = difference_T.double()
    if config.correction in OF_SEQUENCES:
        total_T = across.sum_by(exponent_T, batch.sequence_T, batch.num_sequences)
        exponent_T = total_T / batch.sequence_tokens_T if config.correction == "geo_rs" else total_T
    ratio_T = torch.exp(torch.clamp(exponent_T, -20.0, 20.0))
    if config.correction.endswith("tis"):
        weight_T = torch.clamp(ratio_T, max=high)
    else:
        inside_T = (ratio_T >= low) & (ratio_T <= high)
        accepted_T = torch.ones_like(ratio_T) if only_masks(config) else ratio_T
        weight_T = torch.where(inside_T, accepted_T, 0.0)
    if config.normalize:
        share_T = torch.ones_like(weight_T)
        if config.correction in OF_SEQUENCES:
            share_T = share_T / batch.sequence_tokens_T
        total = across.sum(weight_T * share_T)
        if total > 0:
            weight_T = weight_T * (across.sum(share_T) / total)
    return weight_T.float()


def only_masks(config: MismatchConfig) -> bool:
    """Whether a correction has no weights but 0 and 1."""
    is_mask = config.correction.endswith(("mis", "icepop")) and config.accepted == "one"
    return is_mask or config.correction == "geo_rs"


def bounds(config: MismatchConfig) -> tuple[float, float]:
    """c and C of a correction, those that are set before those of the table."""
    low, high = BOUNDS[config.correction]
    if config.upper and config.correction in ("token_mis", "sequence_mis", "geo_rs"):
        low = 1.0 / config.upper
    return config.lower or low, config.upper or high


def _weight_metrics(weight_T: Tensor, across: Across) -> dict[str, float]:
    """Mean and largest weight, the share at weight 0,
    and the effective share (sum w)^2 / (n sum w^2) of the batch.
    """
    count = across.count(weight_T.numel())
    if not count:
        return {}
    total, squares = across.sum(weight_T), across.sum(weight_T.double().square())
    return {
        "correction_weight_mean": total / count,
        "correction_weight_max": across.maximum(weight_T),
        "correction_masked_fraction": across.count(weight_T == 0) / count,
        "correction_effective_fraction": total**2 / (count * squares) if squares else 0.0,
    }


def _alarm(
    difference_T: Tensor, comparable_T: Tensor, config: MismatchConfig, across: Across
) -> Tensor:
    """The tokens that the alarm masks; none while the mean difference is within mismatch.alarm."""
    size_T = difference_T.abs()
    mean = across.mean(size_T[comparable_T])
    if mean <= config.alarm:
        return torch.zeros_like(size_T, dtype=torch.bool)
    if config.on_alarm == "stop":
        raise MismatchAlarm(
            f"trainer and rollout log-probs differ by {mean:.4g} nats on average, "
            f"{across.maximum(size_T):.4g} at most (mismatch.alarm={config.alarm:g}): the engine "
            "holds other weights, or computes otherwise; see logprob_diff in metrics.jsonl, check "
            "dtype and sglang.verify_weights, or set mismatch.on_alarm=mask"
        )
    return size_T > config.alarm
