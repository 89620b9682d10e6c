"""The engine of a run with agents."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stare.config import Config, override
from megatron_stare.loop.assemble import with_tools
from megatron_stare.rollout.agents.agent_engine import AgentEngine
from tests.rollout.agents.scripted import PROGRAMS, Scripted
from tests.tiny_models import byte_tokenizer, tiny_config


@pytest.mark.parametrize(
    ("overrides", "longest"),
    [
        ((), 100),
        (("policy.context_parallel_size=2",), 200),
        (("policy.max_tokens_per_gpu=4096",), 512),
        (("policy.on_long_sequence=own_micro_batch",), 512),
    ],
)
def test_the_length_of_a_sequence_is_bounded_by_model_and_rank(
    tmp_path: Path, overrides: tuple[str, ...], longest: int
):
    tiny_config("qwen2", max_position_embeddings=512).save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    words = [f"policy.hf_checkpoint={tmp_path}", "policy.max_tokens_per_gpu=100"]
    words += [f"agents.function={PROGRAMS}.talks", "agents.hosts=1", *overrides]
    inner = Scripted(tokenizer, lambda *_: "12")
    engine = with_tools(inner, override(Config(), words), tokenizer)  # type: ignore[arg-type]
    try:
        assert isinstance(engine, AgentEngine) and engine.context_length == longest
    finally:
        engine.close()
