"""The fused loss and fp32 logits on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_stare.numerics.token_stats import VocabShard, token_stats
from tests.numerics.head_cases import example, head, relative

pytestmark = pytest.mark.gpu
INPUTS = ("hidden", "weight", "target")


def gradient(data: dict[str, Tensor], device: str) -> Tensor:
    hidden, weight, target, slope = (
        data[name].detach().to(device) for name in ("hidden", "weight", "target", "slope")
    )
    hidden.requires_grad_()
    loss, _, _ = head("fused", hidden, VocabShard(weight, None, 37), target, slope.float(), None)
    loss.backward()
    assert hidden.grad is not None
    return hidden.grad.cpu()


def test_the_gradient_is_that_of_a_cpu() -> None:
    data = example(9, 16, 40, 37, torch.float32)
    assert relative(gradient(data, "cuda"), gradient(data, "cpu")) < 1e-4


def test_fp32_logits_of_bf16_inputs_are_those_of_fp32_copies() -> None:
    data = example(9, 16, 40, 37, torch.bfloat16)
    found = {}
    for device in ("cpu", "cuda"):
        hidden, weight, target = (data[name].detach().to(device) for name in INPUTS)
        stats = token_stats(hidden, VocabShard(weight, None, 37, fp32_logits=True), target)
        found[device] = stats.surprisal_N.cpu()
    assert relative(found["cuda"], found["cpu"]) < 1e-5
