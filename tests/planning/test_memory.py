"""Memory of the head: logits and, where these are wider than the model, their gradient."""

from __future__ import annotations

import pytest

from megatron_stare.config import Config, PolicyConfig, override
from megatron_stare.planning.machine import H100
from megatron_stare.planning.memory import cache_bytes_per_token, head_bytes
from megatron_stare.planning.shapes import model_shape, sizes
from megatron_stare.policy.huggingface.shape import shape_of
from tests.tiny_models import tiny_config


@pytest.mark.parametrize(
    ("settings", "fp32_more"),
    [
        ({"head": "logits"}, 2.0 + 2.0),  # bytes of each logit: 4 and a gradient of 2, not 2
        ({"head_workspace_mib": 1}, None),  # the workspace stays, a gradient of half of it is new
    ],
)
def test_fp32_logits_of_bf16_have_a_gradient_of_their_own(
    settings: dict[str, object], fp32_more: float | None
) -> None:
    shape, tokens = shape_of(tiny_config("qwen3", vocab_size=4096)), 1024.0
    plain, wide = (
        head_bytes(shape, policy, sizes(policy, 1), tokens, H100)
        for policy in (
            PolicyConfig(dtype="bf16", fp32_logits=wide, **settings)  # type: ignore[arg-type]
            for wide in (False, True)
        )
    )
    assert wide - plain == (fp32_more * tokens * 4096 if fp32_more else (1 << 20) / 2)
    exact = PolicyConfig(dtype="fp32", fp32_logits=True, **settings)  # type: ignore[arg-type]
    narrow = PolicyConfig(dtype="fp32", **settings)  # type: ignore[arg-type]
    assert len({head_bytes(shape, p, sizes(p, 1), tokens, H100) for p in (exact, narrow)}) == 1


def test_only_the_caches_own_argument_makes_it_fp8() -> None:
    """Qwen3-30B-A3B has 48 layers with 4 key-value heads of width 128."""
    shape = shape_of(model_shape("Qwen3-30B-A3B"))
    for words, size in (
        ("--kv-cache-dtype fp8_e4m3", 1),
        ("--kv-cache-dtype=fp8_e5m2", 1),
        ("--fp8-gemm-backend triton", 2),  # of weights
    ):
        config = override(Config(), [f"sglang.server_args={words}"])
        assert cache_bytes_per_token(shape, config) == 48 * 2 * size * 128 * 4


def test_a_servers_gpu_keeps_whole_heads() -> None:
    """The four key-value heads are divided among up to four GPUs; eight keep each head twice."""
    shape = shape_of(model_shape("Qwen3-30B-A3B"))
    for gpus, heads in ((1, 4), (2, 2), (4, 1), (8, 1)):
        config = override(Config(), [f"sglang.gpus_per_server={gpus}"])
        assert cache_bytes_per_token(shape, config) == 48 * 2 * 2 * 128 * heads
