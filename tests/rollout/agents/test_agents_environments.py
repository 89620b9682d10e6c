"""Environments of verifiers, OpenEnv and reasoning-gym as episodes, with the examples."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from megatron_stare.compare.worlds.calculator import tool_tokenizer
from tests.paths import ROOT
from tests.rollout.agents.environments import CALL, multiplies, play, python_of, rows_of
from tests.rollout.agents.scripted import Scripted
from tests.tiny_models import byte_tokenizer

pytestmark = pytest.mark.agents
EXAMPLES = ROOT / "examples" / "agents"
V0 = {"id": "calculator_environment", "path": "examples/agents"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tool_tokenizer()


def check_one_sequence_each(rollouts: list[Any], inner: Scripted) -> None:
    logged = [prompt + given for prompt, given in inner.log]
    for rollout in rollouts:
        assert rollout.outcome == 1.0 and rollout.status == "completed"
        assert len(rollout.lengths) == 1 and rollout.episode["calls"] == 2
        assert rollout.response_ids.tolist() in logged
    trained = sum(rollout.loss_tokens for rollout in rollouts)
    assert trained == sum(len(given) for _, given in inner.log), "all sampled tokens are trained"


def test_a_taskset_of_verifiers_with_an_mcp_tool(tokenizer: PreTrainedTokenizerBase):
    settings = json.loads((EXAMPLES / "verifiers_v1.json").read_text())
    python = python_of("verifiers")
    rows = rows_of(python, "verifiers_v1", settings, 2)
    assert [row["label"] for row in rows] == ["64", "12"]
    before = set(psutil.Process().children(recursive=True))
    inner = Scripted(tokenizer, multiplies())
    rollouts = play(inner, tokenizer, python, "verifiers_v1", rows)
    check_one_sequence_each(rollouts, inner)
    assert rollouts[0].episode["agent/correct"] == 1  # part of the reward
    assert set(psutil.Process().children(recursive=True)) <= before, "no process is left"


QWEN = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>"),
    *("</tool_call>", "<tool_response>", "</tool_response>"),
)


def test_verifiers_own_training_client_has_the_sequences_of_the_endpoint(tmp_path: Path):
    """It renders Qwen3's template itself and sends ids; what it would train is what is trained."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in QWEN])
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((EXAMPLES / "verifiers_v1.json").read_text())
    settings["client"] = {
        "type": "train",
        "renderer_model_name": str(tmp_path),
        "renderer": {"name": "qwen3", "enable_thinking": False},
    }
    python = python_of("verifiers")
    rows = rows_of(python, "verifiers_v1", settings, 2)
    for number, row in enumerate(rows):
        row["metadata"]["branches"] = str(tmp_path / f"branches_{number}.json")

    def answer(text: str, number: int) -> str:
        (a, b), *_ = re.findall(r"(\d)\*(\d)=", text)
        if "<tool_response>" in text:
            return f"\\boxed{{{int(a) * int(b)}}}<|im_end|>"
        arguments = f'{{"name": "calculator", "arguments": {{"expression": "{a}*{b}"}}}}'
        return f"<tool_call>\n{arguments}\n</tool_call><|im_end|>"

    inner = Scripted(tokenizer, answer)
    rollouts = play(inner, tokenizer, python, "tests.rollout.agents.traced", rows)
    check_one_sequence_each(rollouts, inner)
    for number, rollout in enumerate(rollouts):
        (branch,) = json.loads((tmp_path / f"branches_{number}.json").read_text())
        assert branch["token_ids"] == rollout.response_ids.tolist()
        assert branch["sampled_mask"] == rollout.loss_mask.tolist()
        assert branch["logprobs"] == pytest.approx(rollout.logprobs.tolist())
        assert rollout.episode["rendered_by_client"] == 2


def test_an_environment_of_older_verifiers(tokenizer: PreTrainedTokenizerBase):
    python = python_of("verifiers-v0")
    rows = rows_of(python, "verifiers_v0", V0, 3)
    inner = Scripted(tokenizer, multiplies())
    check_one_sequence_each(play(inner, tokenizer, python, "verifiers_v0", rows), inner)


def test_the_token_client_of_older_verifiers_stitches_the_same_ids(
    tokenizer: PreTrainedTokenizerBase,
):
    """Without its silent fallback: every prompt after the first is sent as ids."""
    python = python_of("verifiers-v0")
    settings = {**V0, "client_type": "openai_chat_completions_token"}
    rows = rows_of(python, "verifiers_v0", settings, 2)
    inner = Scripted(tokenizer, multiplies())
    rollouts = play(inner, tokenizer, python, "verifiers_v0", rows)
    check_one_sequence_each(rollouts, inner)
    assert all(rollout.episode["rendered_by_client"] == 1 for rollout in rollouts)


def test_a_reward_of_older_verifiers_that_is_nan_is_unverifiable(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Any
):
    python = python_of("verifiers-v0")
    source = (EXAMPLES / "calculator_environment.py").read_text()
    body = "return float('nan')"
    source = re.sub(r"return float\(f.*", body, source)
    (tmp_path / "failing_environment.py").write_text(source)
    settings = {"id": "failing_environment", "path": str(tmp_path)}
    rows = rows_of(python, "verifiers_v0", settings, 1)
    (rollout,) = play(Scripted(tokenizer, multiplies()), tokenizer, python, "verifiers_v0", rows)
    assert rollout.loss_tokens == 0 and rollout.outcome is None


@pytest.fixture
def server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [python_of("openenv"), str(EXAMPLES / "calculator_server.py"), str(port)]
    process = subprocess.Popen(command, cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).read()
                break
            except OSError:
                time.sleep(0.2)
        yield url, process
    finally:
        process.kill()
        process.wait()


def steps(text: str, number: int) -> str:
    """A bad action, the calculator, the answer."""
    (a, b), *_ = re.findall(r"(\d)\*(\d)=", text)
    turns = text.count("<tool>")
    if turns == 0:
        return '<tool_call>{"name": "step", "arguments": {"expression": [1]}}</tool_call><|end|>'
    if turns == 1:
        return CALL.format("step", "expression", f"{a}*{b}")
    return CALL.format("step", "answer", str(int(a) * int(b)))


def test_an_openenv_server_and_an_action_that_it_refuses(
    tokenizer: PreTrainedTokenizerBase, server: Any
):
    url, _ = server
    python = python_of("openenv")
    rows = rows_of(python, "open_env", {"url": url}, 3)
    inner = Scripted(tokenizer, steps)
    rollouts = play(inner, tokenizer, python, "open_env", rows)
    logged = [prompt + given for prompt, given in inner.log]
    for rollout in rollouts:
        assert rollout.outcome == 1.0 and rollout.status == "completed"
        assert rollout.episode["agent/refused_actions"] == 1 and rollout.episode["calls"] == 3
        assert len(rollout.lengths) == 1 and rollout.response_ids.tolist() in logged
        assert "string_type" in tokenizer.decode(rollout.response_ids), "the model reads the error"


def test_an_openenv_server_that_dies_is_unverifiable(
    tokenizer: PreTrainedTokenizerBase, server: Any
):
    url, process = server
    python = python_of("openenv")
    rows = rows_of(python, "open_env", {"url": url}, 1)

    def kills(text: str, number: int) -> str:
        process.kill()
        process.wait()
        return steps(text, number)

    (rollout,) = play(Scripted(tokenizer, kills), tokenizer, python, "open_env", rows)
    assert rollout.outcome is None and rollout.loss_tokens == 0
    assert any(name.startswith("failed/Connection") for name in rollout.episode)


def test_a_task_of_reasoning_gym_is_scored_in_the_host(tokenizer: PreTrainedTokenizerBase):
    import sys

    rows = rows_of(sys.executable, "gym_tasks", {"name": "chain_sum", "max_terms": 2}, 2)

    def answer(text: str, number: int) -> str:
        right = next(row["label"] for row in rows if row["prompt"][0]["content"] in text)
        return f"<answer>{right if number else 'none'}</answer><|end|>"

    inner = Scripted(tokenizer, answer)
    rollouts = play(inner, tokenizer, sys.executable, "gym_tasks", rows)
    assert sorted(rollout.outcome for rollout in rollouts)[1] == 1.0
    assert sorted(rollout.outcome for rollout in rollouts)[0] < 1.0
    for name in ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"):
        with pytest.raises(subprocess.CalledProcessError) as error:
            rows_of(sys.executable, "gym_tasks", {"name": name}, 1)
        assert f"the scorer of {name}" in error.value.stderr
