"""Memory of a loss that reads whole logits, counted on the null device."""

from __future__ import annotations

import pytest
import torch

from megatron_stare.config import Config, LossConfig, override
from megatron_stare.losses import find_objective
from megatron_stare.planning.memory import WHOLE_LOGIT
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.head import HeadContext, _with_logits
from megatron_stare.records import LossTokens

pytestmark = pytest.mark.nullcuda
ROWS, WIDTH, VOCABULARY, TOP_K = 512, 64, 151936, 16


def test_whole_logits_take_the_planned_memory() -> None:
    place = {"device": "cuda"}
    weight_VH = torch.randn(VOCABULARY, WIDTH, dtype=torch.bfloat16, requires_grad=True, **place)
    hidden_NH = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True, **place)
    zeros_N = torch.zeros(ROWS, **place)
    exact = LossConfig(name="dapo", distillation_coef=1.0, distillation_top_k=TOP_K)
    top = {
        "top_ids": torch.zeros(ROWS, TOP_K, dtype=torch.long, **place),
        "teacher_top": torch.full((ROWS, TOP_K), -3.0, **place),
    }
    bound = find_objective(exact.name).bind(exact)

    def loss(
        surprisal: torch.Tensor, entropy: torch.Tensor, _: slice, logits: torch.Tensor
    ) -> torch.Tensor:
        known = (surprisal, entropy, surprisal.detach(), zeros_N, zeros_N)
        return bound.function(LossTokens(*known, logits=logits, **top))

    with topologies.imagined(override(Config(), ["policy.dtype=bf16"]).policy, 0, 1) as topology:
        context = HeadContext(
            row_N=torch.arange(ROWS, **place),
            target_N=torch.zeros(ROWS, dtype=torch.long, **place),
            temperature=1.0,
            vocab_size=VOCABULARY,
            tensor_group=topology.tensor,
            way="fused",
            workspace_bytes=1 << 30,
            loss=loss,
            whole_logits=True,
        )
        for _ in range(2):  # the first one leaves cuBLAS's workspace
            hidden_NH.grad = weight_VH.grad = None
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            output = _with_logits(hidden_NH, weight_VH, context, loss)
            assert output.loss is not None
            output.loss.backward()
            del output
    peak = torch.cuda.max_memory_allocated() - before - 2 * weight_VH.numel()
    assert 0.85 * WHOLE_LOGIT < peak / (ROWS * VOCABULARY) <= WHOLE_LOGIT
