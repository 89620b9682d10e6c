"""How evenly the tokens of a batch are dealt out to experts, and the loss that asks for it.

Per layer, with F_e the tokens that went to expert e, T tokens, K experts a token, p_te the router's
softmax over all E experts:

    balance = E sum_e (F_e / (K T)) (sum_t p_te / T)        1 where all are dealt out alike

(Switch Transformers, arXiv 2101.03961, eq. 4, over K choices.) Megatron-Core takes F of one
micro-batch on one group of ranks, so that its loss depends on the layout. Here F and T are those of
the whole batch over all ranks, which the scoring pass has counted; F is a constant, as there. What
is left is a sum over tokens, the same under every layout:

    loss = coefficient sum_layers sum_t sum_e pull_e p_te,  pull_e = E F_e / (K T^2)

Shape legend: L layers with experts, E experts, K of them a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Load:
    """Of one pass over a batch, of all layers and ranks: tokens and summed probability of each
    expert; of how many given choices the routers would have made `alike` ones.
    """

    tokens_LE: Tensor
    mass_LE: Tensor
    top_k: int
    alike: float
    given: float

    def metrics(self) -> dict[str, float]:
        """expert_load_max: tokens of the busiest expert of any layer over the mean of its layer;
        expert_load_unused: share of experts without a token; expert_balance: mean over layers,
        without a coefficient; routing_agreement: share of the replayed choices that the routers
        would have made themselves.
        """
        experts = self.tokens_LE.shape[1]
        count_L = self.tokens_LE.sum(1).clamp(min=1) / self.top_k
        mean_L1 = (count_L * self.top_k / experts)[:, None]
        share_LE = self.tokens_LE / (self.top_k * count_L[:, None])
        balance_L = experts * (share_LE * self.mass_LE / count_L[:, None]).sum(1)
        found = torch.stack(
            [
                (self.tokens_LE / mean_L1).max(),
                (self.tokens_LE == 0).double().mean(),
                balance_L.mean(),
            ]
        ).tolist()
        names = ("expert_load_max", "expert_load_unused", "expert_balance")
        metrics = dict(zip(names, found, strict=True))
        if self.given:
            metrics["routing_agreement"] = self.alike / self.given
        return metrics


def balance_pull(tokens_E: Tensor, top_k: int, coefficient: float) -> Tensor:
    """[E]: what one token adds to the loss per probability of each expert."""
    count = (tokens_E.sum() / top_k).clamp(min=1)
    return (coefficient * len(tokens_E) / top_k * tokens_E / count.square()).float()


def with_gradient_of(value: Tensor, loss: Tensor) -> Tensor:
    """`value` as it is; its backward pass also brings that of `loss`."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    found: Tensor = MoEAuxLossAutoScaler.apply(value, loss)
    return found
