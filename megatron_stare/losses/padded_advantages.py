"""`advantages(name, rewards, group_ids, response_mask)`: a padded batch in one process, by the
estimators that the trainer uses (numerics/advantages.py has their formulas).

Shape legend: B responses, T padded length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_stare.config import UserError
from megatron_stare.numerics.advantages import Outcomes, find_estimator, whitened


def advantages(
    name: str,
    rewards: Tensor,
    group_ids: Tensor | Sequence[Any],
    response_mask: Tensor,
    *,
    correct: Tensor | None = None,
    baselines: Tensor | None = None,
    gamma: float = 1.0,
    **settings: Any,
) -> Tensor:
    """The advantage of every token [B, T], 0 where `response_mask` is; in the dtype of `rewards`.

    `rewards` are [B] of whole responses, or [B, T] of tokens, which are added up except by
    reinforce_plus_plus and remax: these count what is still to come at each token. `group_ids`
    names the group of each response. `correct` says which are right, for w_reinf, psr and nsr;
    without it those with a reward above 0. `baselines` [B] are remax's. `gamma` discounts
    reinforce_plus_plus per loss token; a masked span passes a return on as it is. psr and nsr give
    0 to responses that must leave the loss too: mask them there. UserError: a name or a setting
    that is unknown or missing, or shapes that differ.
    """
    estimator = find_estimator(name)
    mask_BT = response_mask.bool()
    reward_B = _summed(rewards, mask_BT)
    ids = group_ids.tolist() if hasattr(group_ids, "tolist") else list(group_ids)
    _require_rows(mask_BT.shape[0], group_ids=ids, correct=correct, baselines=baselines)
    if gamma != 1.0 and name != "reinforce_plus_plus":
        raise UserError(f"gamma={gamma} is for reinforce_plus_plus; leave it out for {name!r}")
    numbers = {one: number for number, one in enumerate(dict.fromkeys(ids))}
    outcomes = Outcomes(
        reward_B=reward_B,
        group_B=torch.tensor([numbers[one] for one in ids], device=reward_B.device).long(),
        tokens_B=mask_BT.sum(1).double(),
        correct_B=reward_B > 0 if correct is None else correct.bool(),
        baseline_B=None if baselines is None else baselines.double(),
    )
    advantage_BT = estimator(outcomes, **settings)[:, None].expand(mask_BT.shape)
    if name == "reinforce_plus_plus" and (gamma != 1.0 or rewards.dim() == 2):
        to_come = _returns(rewards, mask_BT, gamma)[mask_BT]
        advantage_BT = torch.zeros_like(advantage_BT).masked_scatter(
            mask_BT, whitened(to_come, torch.ones_like(to_come))
        )
    elif name == "remax" and rewards.dim() == 2:
        own_BT = torch.where(mask_BT, rewards.double(), 0.0)
        missing_BT = own_BT.sum(1, keepdim=True) - own_BT.flip(1).cumsum(1).flip(1)
        advantage_BT = estimator(dataclasses.replace(outcomes, reward_B=own_BT.sum(1)))[:, None]
        advantage_BT = advantage_BT - missing_BT
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    return torch.where(mask_BT, advantage_BT, 0.0).to(dtype)


def _summed(rewards: Tensor, mask_BT: Tensor) -> Tensor:
    """One reward [fp64] per response."""
    if mask_BT.dim() != 2 or rewards.shape not in (mask_BT.shape[:1], mask_BT.shape):
        raise UserError(
            f"rewards {tuple(rewards.shape)} and response_mask {tuple(mask_BT.shape)} must be [B] "
            "or [B, T], and [B, T]"
        )
    return rewards.double() if rewards.dim() == 1 else rewards.double().sum(1)


def _require_rows(count: int, **columns: Any) -> None:
    for name, column in columns.items():
        if column is not None and len(column) != count:
            raise UserError(
                f"{name} has {len(column)} entries for {count} responses; give one each"
            )


def _returns(rewards: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """[B, T]: the discounted rewards from each token on; a reward of a whole response falls on its
    last loss token. Tokens that are masked neither collect nor discount.
    """
    reward_BT = rewards.double()
    if rewards.dim() == 1:
        last_BT = mask_BT & (mask_BT.flip(1).cumsum(1).flip(1) == 1)
        reward_BT = torch.where(last_BT, reward_BT[:, None], 0.0)
    column_B, columns = torch.zeros_like(reward_BT[:, 0]), []
    for place in reversed(range(mask_BT.shape[1])):
        ahead_B = reward_BT[:, place] + gamma * column_B
        column_B = torch.where(mask_BT[:, place], ahead_B, column_B)
        columns.append(column_B)
    return torch.stack(columns[::-1], dim=1)
