"""STARE's closed loop (arXiv 2606.19236):
reweight only while batch entropy is under its target, adapt W and M.

    gate on  iff  Hbar < H_tgt                                             (strict)
    W <- clip(W + alpha sgn(H_tgt - Hbar), 1, W_max)
    M <- clip(M - alpha sgn(H_tgt - Hbar), M_min, 1)      sgn(0) = 0       (only if adaptive)

Hbar [nats per token] is the batch entropy under the current policy, aggregated like the loss, once
per optimizer step, after dynamic sampling; W and M are adapted before the update they serve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_stare.config import LossConfig


@dataclass(frozen=True)
class Gate:
    """The decision for one optimizer step.
    `state` carries W and M to the next step and into checkpoints.
    """

    on: bool
    reweight_w: float
    reweight_m: float

    @property
    def state(self) -> dict[str, float]:
        return {"reweight_w": self.reweight_w, "reweight_m": self.reweight_m}


def decide(batch_entropy: float, config: LossConfig, state: dict[str, float]) -> Gate:
    """The gate of this step from Hbar and the state of the last one ({} at the start).

    A non-finite Hbar neither adapts nor opens the gate. `config.gate` false: always on, the paper's
    open loop.
    """
    weight = state.get("reweight_w", config.reweight_w)
    damping = state.get("reweight_m", config.reweight_m)
    gap = config.target_entropy - batch_entropy
    finite = math.isfinite(batch_entropy)
    if config.adaptive and finite:
        step = config.alpha * ((gap > 0) - (gap < 0))
        weight = min(max(weight + step, 1.0), config.w_max)
        damping = min(max(damping - step, config.m_min), 1.0)
    return Gate(on=(finite and gap > 0) or not config.gate, reweight_w=weight, reweight_m=damping)
