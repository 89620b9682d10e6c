"""What a configuration names is refused before anything is trained."""

from __future__ import annotations

import pytest

from megatron_stare.config import Config, UserError, override
from megatron_stare.loop.resolve import check_cache
from tests.tiny_models import tiny_config


@pytest.mark.parametrize("written", ["--kv-cache-dtype fp8_e4m3", "--kv-cache-dtype=fp8_e5m2"])
@pytest.mark.parametrize(
    ("family", "refused"),
    [("qwen2", True), ("llama", True), ("qwen3", False), ("qwen3_moe", False), ("glm4_moe", False)],
)
def test_an_fp8_cache_needs_a_norm_of_queries_and_keys(written: str, family: str, refused: bool):
    config = override(Config(), [f"sglang.server_args='--log-level info {written}'"])
    hf = tiny_config(family)
    check_cache(override(config, ["sglang.server_args='--kv-cache-dtype auto'"]), hf)
    if refused:
        with pytest.raises(UserError, match=f"{family} has no norm"):
            check_cache(config, hf)
    else:
        check_cache(config, hf)
