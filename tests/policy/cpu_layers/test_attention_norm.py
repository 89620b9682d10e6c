"""RMSNorm against the one of transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_stare.policy.cpu_layers.attention import RMSNorm


def norm(dtype: torch.dtype, sequence_parallel: bool = False) -> RMSNorm:
    made = RMSNorm(
        SimpleNamespace(params_dtype=dtype, sequence_parallel=sequence_parallel), 48, eps=1e-6
    )
    with torch.no_grad():
        made.weight.copy_(torch.linspace(-1, 2, 48))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norm_is_transformers_norm(dtype: torch.dtype) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    ours, theirs = norm(dtype), Qwen2RMSNorm(48, eps=1e-6).to(dtype)
    theirs.load_state_dict(ours.state_dict())
    x = (30 * torch.randn(5, 3, 48, generator=torch.Generator().manual_seed(0))).to(dtype)
    if dtype == torch.float64:  # transformers would drop to fp32
        wanted = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * ours.weight
    else:
        wanted = theirs(x)
    exact = {"rtol": 0, "atol": 0} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(ours(x), wanted, **exact)


def test_norm_weight_is_marked_for_sequence_parallelism() -> None:
    """finalize_model_grads sums the gradient of weights so marked,
    also after the mixed-precision wrapper's cast.
    """
    assert norm(torch.float32, True).bfloat16().weight.sequence_parallel is True
    assert norm(torch.float32, False).weight.sequence_parallel is False
