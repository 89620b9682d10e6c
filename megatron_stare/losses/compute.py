"""Any objective and any advantage on a padded batch, in one process: `compute`, `advantages`.

The plan, the loss, the reduction and the estimators (numerics/advantages.py has their formulas) are
those of the trainer; only what is around them differs.

Shape legend: B responses, T padded length, V vocabulary, N loss tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_stare.config import LossConfig, UserError, from_tree, nearest
from megatron_stare.losses.kl import distilled
from megatron_stare.losses.registry import Objective, find_objective, objective_of
from megatron_stare.losses.settings import FIELDS
from megatron_stare.numerics.advantages import Outcomes, find_estimator, whitened
from megatron_stare.numerics.selection import Across
from megatron_stare.numerics.sequences import sequence_scan, sequence_sum
from megatron_stare.numerics.token_stats import nucleus_entropy
from megatron_stare.records import LossTokens, Signals, TokenBatch

PADDED = (
    *("log_prob", "old_log_prob", "rollout_log_prob", "ref_log_prob", "advantages", "entropy"),
    *("old_entropy", "tempered_log_prob", "importance_weights", "turns", "response_mask"),
)
OF_ROWS = ("group_ids", "rewards")
KEYS = (*PADDED, "logits", "old_logits", *OF_ROWS)
_POSITION_BITS = 32


def compute(
    name: str,
    batch: Mapping[str, Tensor],
    *,
    state: MutableMapping[str, float] | None = None,
    **settings: Any,
) -> Tensor:
    """The scalar loss of a padded batch, differentiable in log_prob, entropy and logits.

    `batch` maps to [B, T] tensors: log_prob, advantages and response_mask always; old_log_prob
    (absent: the current policy's, r = 1 with a live gradient), rollout_log_prob (absent:
    old_log_prob's), ref_log_prob (for kl_loss_coef, distillation_coef), entropy [nats] where the
    objective needs it, old_entropy (absent: entropy), importance_weights (multiply the finished
    surrogate), logits [B, T, V] at the sampling temperature where it needs them, old_logits
    (absent: logits), tempered_log_prob (pi_old's with its logits divided by the T of this step;
    absent: made of the logits), turns (of the policy, from 0; absent: the stretches of the mask),
    group_ids [B], rewards [B]. Arithmetic is in the dtype of log_prob. Values outside of the mask
    are not read.

    `settings` are a configuration's, without their sections: fields of LossConfig (aggregation,
    eps_clip, gate, kl_loss_coef, reweight, ...) and the objective's own. padded_length is T unless
    given. `state` is what the last step left; the next one's replaces it in place.

    UserError: an unknown objective or setting, or a batch that lacks something. ValueError: shapes.
    """
    declared = find_objective(name).settings
    fields: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key, value in settings.items():
        is_field = declared[key].is_field if key in declared else key in FIELDS
        (fields if is_field else own)[key] = value
    _check_batch(batch)
    fields.setdefault("padded_length", batch["log_prob"].shape[1])
    config = from_tree({"loss": {**fields, "name": name, "settings": own}}).loss
    objective = objective_of(config)
    for key in fields:
        if not objective.reads(key):
            raise objective.refusal(key, key)
    mask_BT, left = batch["response_mask"].bool(), {} if state is None else state
    flat = {
        key: batch[key][mask_BT].to(batch["log_prob"].dtype)
        for key in (*PADDED[:-1], "logits", "old_logits")
        if batch.get(key) is not None
    }
    _complete(flat, objective, config)
    scored = _token_batch(flat, mask_BT, batch, objective, objective.proxy_threshold_of(config))
    scored = distilled(_with_further_scores(scored, flat, objective, config, left), config)
    signals = objective.plan(scored, config, Across(), left)
    if state is not None:
        state.clear()
        state.update(signals.state)
    tokens = _loss_tokens(flat, scored, signals)
    loss: Tensor = (signals.coefficient_T * objective.bind(config).function(tokens)).sum()
    return loss


def _check_batch(batch: Mapping[str, Tensor]) -> None:
    for key in ("log_prob", "advantages", "response_mask"):
        if batch.get(key) is None:
            raise UserError(
                f"the batch has no {key!r}; it is a [B, T] tensor that every loss needs"
            )
    shape = batch["log_prob"].shape
    for key, value in batch.items():
        if key not in KEYS:
            raise UserError(f"batch[{key!r}] is unknown{nearest(key, KEYS)}")
        expected = shape[:1] if key in OF_ROWS else shape
        found = value.shape[:-1] if key.endswith("logits") else value.shape
        if len(shape) != 2 or found != expected:
            raise ValueError(
                f"batch[{key!r}] has shape {tuple(value.shape)}, and log_prob {tuple(shape)}; all "
                f"are [B, T], logits [B, T, V], {' and '.join(OF_ROWS)} [B]"
            )


def _complete(flat: dict[str, Tensor], objective: Objective, config: LossConfig) -> None:
    """Fill in what follows from the rest. UserError for what does not and is needed."""
    needs = set(objective.needs) | ({"entropy"} if objective.reweight else set())
    sensitivity = objective.needs_sensitivity(config)
    if (sensitivity or needs & {"logits", "proxy"}) and "logits" not in flat:
        raise UserError(f"{objective.name} needs batch['logits'], [B, T, V]")
    if "entropy" not in flat and "logits" in flat:
        log_NV = torch.log_softmax(flat["logits"], dim=-1)
        flat["entropy"] = -(log_NV.exp() * log_NV).sum(-1)
    if "entropy" not in flat:
        if "entropy" in needs or sensitivity:
            raise UserError(f"{objective.name} needs batch['entropy'], [B, T] in nats")
        flat["entropy"] = torch.zeros_like(flat["log_prob"]).detach()
    if config.distillation_top_k:
        raise UserError(
            f"distillation_top_k={config.distillation_top_k} needs a teacher's distribution, which "
            "only the trainer reads; set it to 0"
        )
    for key in ("kl_loss_coef", "distillation_coef"):
        if getattr(config, key) and "ref_log_prob" not in flat:
            raise UserError(f"{key} needs batch['ref_log_prob'], [B, T]")
    flat.setdefault("rollout_log_prob", flat.get("old_log_prob", flat["log_prob"]))


def _token_batch(
    flat: Mapping[str, Tensor],
    mask_BT: Tensor,
    batch: Mapping[str, Tensor],
    objective: Objective,
    proxy_threshold: float,
) -> TokenBatch:
    row_T, column_T = mask_BT.nonzero(as_tuple=True)
    for key, what in (("group_ids", "prompt"), ("rewards", "reward")):
        if key in objective.needs and batch.get(key) is None:
            raise UserError(f"{objective.name} needs batch[{key!r}], [B]: the {what} of each row")
    group_B, reward_B = batch.get("group_ids"), batch.get("rewards")
    begins_BT = mask_BT & ~torch.nn.functional.pad(mask_BT, (1, 0))[:, :-1]
    turn_T = flat["turns"].long() if "turns" in flat else (begins_BT.cumsum(1) - 1)[mask_BT]

    def surprisal(key: str) -> Tensor | None:
        return -flat[key].detach() if key in flat else None

    old_T, entropy_T = surprisal("old_log_prob"), flat["entropy"].detach()
    old_entropy_T = flat["old_entropy"].detach() if "old_entropy" in flat else None
    group_Q = None if group_B is None else torch.unique(group_B, return_inverse=True)[1]
    surprisal_T = -flat["log_prob"].detach()
    start_T = surprisal_T if old_T is None else old_T
    distribution = flat.get("old_logits", flat.get("logits"))
    sensitivity_T = proxy_T = None
    if distribution is not None:
        log_TV = torch.log_softmax(distribution.detach(), dim=-1)
        chosen_T = start_T if "sensitivity" in objective.needs else surprisal_T
        before_T = entropy_T if old_entropy_T is None else old_entropy_T
        h_T = before_T if "sensitivity" in objective.needs else entropy_T
        sensitivity_T = _sensitivity(log_TV, chosen_T, h_T)
        proxy_T = _proxy_mass(log_TV, start_T, proxy_threshold) if proxy_threshold else None
    return TokenBatch(
        microbatches=(),
        advantage_T=flat["advantages"].detach(),
        rollout_logprob_T=flat["rollout_log_prob"].detach(),
        sequence_T=row_T,
        sequence_tokens_T=mask_BT.sum(1)[row_T],
        token_index_T=(row_T << _POSITION_BITS) + column_T,
        microbatch_T=torch.zeros_like(row_T),
        fresh_T=torch.ones_like(row_T, dtype=torch.bool),
        num_sequences=mask_BT.shape[0],
        group_Q=group_Q,
        turn_T=turn_T,
        reward_Q=None if reward_B is None else reward_B.detach(),
        surprisal_T=surprisal_T,
        entropy_T=entropy_T,
        sensitivity_T=sensitivity_T,
        proxy_mass_T=proxy_T,
        old_surprisal_T=old_T,
        old_entropy_T=old_entropy_T,
        reference_surprisal_T=surprisal("ref_log_prob"),
    )


def _with_further_scores(
    batch: TokenBatch,
    flat: Mapping[str, Tensor],
    objective: Objective,
    config: LossConfig,
    state: Mapping[str, float],
) -> TokenBatch:
    """The batch with what few objectives ask of the scoring pass."""
    nucleus, tempering = objective.nucleus_of(config), objective.tempering_of(config, state)
    if nucleus is not None:
        entropy_T = nucleus_entropy(flat["logits"].detach(), *nucleus)
        return dataclasses.replace(batch, nucleus_entropy_T=entropy_T)
    if tempering is None:
        return batch
    distribution = flat.get("old_logits", flat.get("logits"))
    old_T = flat.get("old_log_prob", flat["log_prob"]).detach()
    if "tempered_log_prob" in flat:
        tempered_T = flat["tempered_log_prob"].detach()
    elif distribution is not None:
        log_TV = torch.log_softmax(distribution.detach(), dim=-1) / tempering
        tempered_T = old_T / tempering - torch.logsumexp(log_TV, dim=-1)
    else:
        raise UserError(
            f"{objective.name} needs batch['tempered_log_prob'], [B, T]: pi_old's with its logits "
            f"divided by {tempering:g} in this step; or batch['logits'], [B, T, V]"
        )
    return dataclasses.replace(batch, tempered_T=tempered_T - old_T)


def _sensitivity(log_TV: Tensor, surprisal_T: Tensor, entropy_T: Tensor) -> Tensor:
    """g = p (s - H) - sum_v p_v^2 (s_v - H), of the token's p and s."""
    square_TV = torch.exp(2 * log_TV)
    offset_T = (square_TV * (-log_TV - entropy_T[:, None])).sum(-1)
    return torch.exp(-surprisal_T) * (surprisal_T - entropy_T) - offset_T


def _proxy_mass(log_TV: Tensor, surprisal_T: Tensor, threshold: float) -> Tensor:
    """ln of the mass of tokens with p >= threshold max p; inf where the token is not one."""
    largest_T = log_TV.max(-1).values + math.log(threshold)
    kept_TV = log_TV >= largest_T[:, None]
    mass_T = torch.logsumexp(torch.where(kept_TV, log_TV, -torch.inf), dim=-1)
    # its own log-prob comes rounded another way, so that the edge needs slack
    own_T = -surprisal_T >= largest_T - 1e-6
    return torch.where(own_T, mass_T, torch.inf)


def _loss_tokens(flat: Mapping[str, Tensor], batch: TokenBatch, signals: Signals) -> LossTokens:
    surprisal, entropy = -flat["log_prob"], flat["entropy"]
    shared: dict[str, Any] = {"sequence_N": batch.sequence_T, "count": batch.num_sequences}
    position = batch.token_index_T & ((1 << _POSITION_BITS) - 1)
    old, old_entropy = batch.old_surprisal_T, batch.old_entropy_T
    return LossTokens(
        surprisal=surprisal,
        entropy=entropy,
        old_surprisal=surprisal.detach() if old is None else old,
        advantage=batch.advantage_T,
        weight=signals.weight_T,
        reference_surprisal=batch.reference_surprisal_T,
        correction=flat.get("importance_weights"),
        old_entropy=entropy.detach() if old_entropy is None else old_entropy,
        rollout_surprisal=-batch.rollout_logprob_T,
        values=signals.values,
        numbers=signals.numbers,
        logits=flat.get("logits"),
        sequence=batch.sequence_T,
        sequence_tokens=batch.sequence_tokens_T,
        position=position,
        sequence_sum=functools.partial(sequence_sum, **shared),
        sequence_scan=functools.partial(sequence_scan, position_N=position, **shared),
    )


def advantages(
    name: str,
    rewards: Tensor,
    group_ids: Tensor | Sequence[Any],
    response_mask: Tensor,
    *,
    correct: Tensor | None = None,
    baselines: Tensor | None = None,
    earlier: Tensor | None = None,
    gamma: float = 1.0,
    **settings: Any,
) -> Tensor:
    """The advantage of every token [B, T], 0 where `response_mask` is; in the dtype of `rewards`.

    `rewards` are [B] of whole responses, or [B, T] of tokens, which are added up except by
    reinforce_plus_plus and remax: these count what is still to come at each token. `group_ids`
    names the group of each response. `correct` says which are right, for w_reinf, psr and nsr;
    without it those with a reward above 0. `baselines` [B] are remax's. `earlier` [B, 3] are
    dcpo's: earlier visits to the response's prompt, and mean and standard deviation of their
    rewards (numerics.advantages.Outcomes.visits_B3 has them after this visit). `gamma` discounts
    reinforce_plus_plus per loss token; a masked span passes a return on as it is. psr and nsr give
    0 to responses that must leave the loss too: mask them there. UserError: a name or a setting
    that is unknown or missing, or shapes that differ.
    """
    estimator = find_estimator(name)
    mask_BT = response_mask.bool()
    reward_B = _summed(rewards, mask_BT)
    ids = group_ids.tolist() if hasattr(group_ids, "tolist") else list(group_ids)
    _require_rows(
        mask_BT.shape[0], group_ids=ids, correct=correct, baselines=baselines, earlier=earlier
    )
    if gamma != 1.0 and name != "reinforce_plus_plus":
        raise UserError(f"gamma={gamma} is for reinforce_plus_plus; leave it out for {name!r}")
    numbers = {one: number for number, one in enumerate(dict.fromkeys(ids))}
    outcomes = Outcomes(
        reward_B=reward_B,
        group_B=torch.tensor([numbers[one] for one in ids], device=reward_B.device).long(),
        tokens_B=mask_BT.sum(1).double(),
        correct_B=reward_B > 0 if correct is None else correct.bool(),
        baseline_B=None if baselines is None else baselines.double(),
        earlier_B3=None if earlier is None else earlier.double(),
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
