"""The order in which a run is built, and the engine of a run with agents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_stare.config import Config, UserError, override
from megatron_stare.loop import assemble
from megatron_stare.loop.assemble import policy_name, with_tools
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import Topology
from megatron_stare.rollout.agents.agent_engine import AgentEngine
from tests.distributed import run_distributed
from tests.rollout.agents.scripted import PROGRAMS, Scripted
from tests.small_run import small_config
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


@pytest.mark.parametrize(
    ("words", "others"),
    [
        (["rollout.engine=sglang"], ["policy.dtype=bf16", "sglang.weights=fp8_uncorrected"]),
        (["rollout.engine=sglang"], ["sglang.server_args='--kv-cache-dtype fp8_e4m3'"]),
        (["agents.command=[one]"], ["agents.command=[two]"]),
        (["agents.command=[one]"], ["agents.max_calls=2"]),
        (["tools.environment=python"], ["sandbox.stateful=true"]),
    ],
)
def test_responses_of_another_server_format_or_agent_are_not_found_again(
    words: list[str], others: list[str], tmp_path: Path
):
    directory = f"policy.hf_checkpoint={tmp_path}"
    config = override(Config(), [directory, *words, *others[:-1]])
    assert policy_name(override(config, others), "weights") != policy_name(config, "weights")
    served = override(
        config, ["sglang.port=30000", "agents.port=30001"][: 1 + config.agents.active]
    )
    assert policy_name(served, "weights") == policy_name(config, "weights")


def test_a_bad_row_of_an_evaluation_ends_a_start_before_any_engine(
    tmp_path: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch
):
    def build_engine(*_: object) -> None:
        raise AssertionError("servers are started")

    monkeypatch.setattr(assemble, "build_engine", build_engine)
    file = tmp_path / "held.jsonl"
    file.write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": 3}\n')
    config = small_config(tmp_path, f"evaluation.eval_data.held={file}")
    with pytest.raises(UserError, match=r"held\.jsonl"):
        Trainer(config, topology)


class Below:
    """An engine that a start builds."""

    closed = False

    def __init__(self, sources: int) -> None:
        self.sources = sources

    def close(self) -> None:
        self.closed = True


def rows_of_a_rank() -> list[dict[str, str]]:
    """As of a function whose order hangs on the process: it goes through a set of texts."""
    rows = [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(8)]
    return rows[:: 1 - 2 * dist.get_rank()]


def differing_rows(rank: int, world_size: int, directory: Path) -> None:
    """Training prompts and problems of an evaluation are refused on every rank."""
    topology = topologies.start(small_config(directory).policy)
    for setting in ("data.prompt_data", "evaluation.eval_data.held"):
        config = small_config(directory, f"{setting}={__name__}.rows_of_a_rank")
        with pytest.raises(UserError, match=f"{setting}: rank 1 has read other prompts than rank"):
            Trainer(config, topology)


def test_rows_that_differ_between_ranks_are_refused(tmp_path: Path):
    small_config(tmp_path)
    run_distributed(differing_rows, 2, tmp_path)


def test_a_start_whose_agents_or_tools_fail_closes_the_engine_below(
    tmp_path: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch
):
    def with_tools(*_: object) -> None:
        raise UserError("agents.port is taken")

    below = Below(sources=1)
    monkeypatch.setattr(assemble, "embedded_engine", lambda *_: below)
    monkeypatch.setattr(assemble, "with_tools", with_tools)
    with pytest.raises(UserError, match="taken"):
        assemble.build_engine(small_config(tmp_path), byte_tokenizer(), topology)
    assert below.closed


def test_a_rank_that_sends_no_requests_has_no_tools_and_no_agents(
    tmp_path: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch
):
    """On servers rank 0 alone plays episodes: eight ranks cannot listen on one agents.port."""
    below, words = Below(sources=0), ["tools.environment=calculator"]
    monkeypatch.setattr(assemble, "embedded_engine", lambda *_: below)
    config = small_config(tmp_path, *words)
    assert assemble.build_engine(config, byte_tokenizer(), topology) is below
