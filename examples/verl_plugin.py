"""STARE as a policy loss of verl, through verl's own registry.

    VERL_USE_EXTERNAL_MODULES=examples.verl_plugin python -m verl.trainer.main_ppo \
        actor_rollout_ref.actor.policy_loss.loss_mode=stare \
        actor_rollout_ref.actor.clip_ratio_c=10 ...

verl calls a policy loss with one micro-batch of one rank. So this loss selects tokens, and compares
entropy with its target, per micro-batch (megatron_stare's own trainer does both once over the
global batch). verl does not pass the entropy; the mean surprisal under the sampling policy is its
unbiased estimate. verl's clipped loss is homogeneous in its advantage, so a token's weight
multiplies the advantage, and everything else stays verl's.

    tools/other_trainers/build && .venv-trainers/bin/python examples/verl_plugin.py

compares it with verl's own loss on a small padded batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
from verl.workers.config import ActorConfig

from megatron_stare.losses.stare import token_weights


def register(name: str, *, target_entropy: float = 0.3, **weights: Any) -> None:
    """Make STARE a value of policy_loss.loss_mode: gate at `target_entropy` [nats per token];
    `weights` are settings of losses.stare.token_weights.
    """

    @register_policy_loss(name)
    def stare(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: ActorConfig | None = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = response_mask.bool()
        entropy = -old_log_prob[mask].mean() if bool(mask.any()) else torch.tensor(torch.inf)
        gate_on = bool(entropy < target_entropy)
        omega = token_weights(-log_prob.detach(), advantages, mask, gate_on=gate_on, **weights)
        clipped = get_policy_loss_fn("vanilla")
        loss, metrics = clipped(
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=omega.to(advantages.dtype) * advantages,
            response_mask=response_mask,
            loss_agg_mode=loss_agg_mode,
            config=config,
            rollout_is_weights=rollout_is_weights,
        )
        chosen = {"raised": float((omega > 1).sum()), "damped": float((omega < 1).sum())}
        own = {"gate": float(gate_on), "sampled_entropy": float(entropy), **chosen}
        return loss, metrics | {f"stare/{key}": value for key, value in own.items()}


register("stare")
register("stare_c2", variant="C2")


def main() -> None:
    """verl's loss and gradient, and STARE's: equal with weights 1, different with other weights."""
    register("stare_one", target_entropy=100.0, variant="C2", reweight_w=1.0, reweight_m=1.0)
    register("stare_shut", target_entropy=0.0, variant="C2", reweight_w=1.5, reweight_m=0.5)
    register("stare_open", target_entropy=100.0, variant="C2", reweight_w=1.5, reweight_m=0.5)
    dice = torch.Generator().manual_seed(0)
    old = -torch.rand(6, 40, generator=dice, dtype=torch.float64) * 4
    moved = old + 0.3 * torch.randn(6, 40, generator=dice, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, 0.0], dtype=torch.float64)
    mask = (torch.arange(40) < torch.tensor([[40], [31], [7], [1], [22], [40]])).double()
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_high=0.28
    )
    for mode in ("vanilla", "stare_one", "stare_shut", "stare_open"):
        live = moved.clone().requires_grad_()
        loss, metrics = get_policy_loss_fn(mode)(
            old_log_prob=old,
            log_prob=live,
            advantages=signs[:, None] * mask,
            response_mask=mask,
            config=config,
        )
        loss.backward()
        assert live.grad is not None
        raised, damped = (metrics.get(f"stare/{side}", 0.0) for side in ("raised", "damped"))
        print(
            f"{mode:11} loss {float(loss.detach()):.12f}  gradient {float(live.grad.norm()):.12f}  "
            f"raised {raised:.0f}  damped {damped:.0f}"
        )


if __name__ == "__main__":
    main()
