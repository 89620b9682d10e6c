"""Whole runs with a language model as judge."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from megatron_stare.collect.judge_servers import JudgeServers
from megatron_stare.collect.judging import build_judge
from megatron_stare.config import EngineError
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from megatron_stare.scoring.verdict import Sample
from tests.collect.test_rollout_worker_served import is_there
from tests.rollout.sglang.test_requests_streaming import wait_until
from tests.small_run import rows_of, small_config
from tests.tiny_models import save_tokenizer, tiny_config, write_checkpoint


def said_in(question: str) -> str:
    return question.partition("<response ")[2].partition(">\n")[2].partition("\n</response")[0]


def test_a_run_learns_from_a_judge_and_a_resumed_one_asks_nothing_twice(
    serve: Any, tmp_path: Path, topology: Topology
):
    """A third of the responses have no verdict."""

    def answer(question: str, number: int) -> Any:
        total = sum(said_in(question).encode())
        return 400 if total % 3 == 0 else json.dumps({"score": total % 2 * 10})

    server = serve(answer)
    settings = [f"judge.urls=[{server.url}]", "scoring.reward=judge", "train.num_rollout=2"]
    config = small_config(tmp_path, *settings, "run.save_interval=1")
    Trainer(config, topology).run(Interrupt())
    rows = rows_of(config)
    assert len(rows) == 2
    for row in rows:
        assert row["unverifiable"] > 0 and 0 <= row["reward"] <= 1
        assert row["episode/judge/calls"] > 0 and math.isfinite(row["grad_norm"])
    kept = [json.loads(line) for file in tmp_path.rglob("judge/*.jsonl") for line in file.open()]
    assert kept and all(row["answer"].startswith('{"score"') for row in kept)
    asked = {body["messages"][0]["content"] for body in server.bodies}
    good = [q for q in asked if sum(said_in(q).encode()) % 3]
    assert len(kept) == len(good)
    before = len(server.bodies)
    judge = build_judge(config)
    try:
        first = Sample(said_in(good[0]), "", {}, problem_of(good[0]))
        (verdict,) = judge.verdicts([first])
        assert verdict.value is not None and len(server.bodies) == before
    finally:
        judge.close()


def problem_of(question: str) -> str:
    return question.partition("<problem ")[2].partition(">\n")[2].partition("\n</problem")[0]


def fixed_judge(directory: Path, said: str) -> Path:
    """A checkpoint whose model always writes `said`, one token of its tokenizer, and ends."""
    token = 257
    shape = {"vocab_size": token + 1, "hidden_size": 128, "intermediate_size": 180}
    shape |= {"num_hidden_layers": 2, "max_position_embeddings": 4096}
    write_checkpoint(directory, tiny_config("llama", **shape))
    save_tokenizer(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([said])
    assert len(tokenizer) == token + 1
    tokenizer.save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()  # the hidden state is the last token's embedding
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding.zero_(), head.zero_()
    embedding[:, 0] = 1.0
    embedding[token] = torch.eye(embedding.shape[1])[1]
    head[token, 0] = head[0, 1] = 5.0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.sglang
def test_a_judge_on_servers_of_the_runs_own(tmp_path: Path):
    """The second process shares the first one's server; a killed server is started again."""
    model = fixed_judge(tmp_path / "judge_model", '{"score": 7}')
    settings = [f"judge.checkpoint={model}", "scoring.reward=judge", "judge.attempts=8"]
    config = small_config(tmp_path, *settings, "judge.server_args=--dtype float32")
    sample = [Sample("a response", "", {}, "a problem")]
    first, second = build_judge(config), build_judge(config)
    try:
        (verdict,) = first.verdicts(sample)
        assert (verdict.value, verdict.reason) == (0.7, '{"score": 7}')
        other = [Sample("another", "", {}, "a problem")]
        assert second.verdicts(other)[0].value == 0.7
        logs = list((tmp_path / "run" / "judge").glob("*.log"))
        assert len(logs) == 1 and logs[0].read_text().count("$ ") == 1
        owned = first.backends["judge"]._close.__self__  # type: ignore[attr-defined]
        owned._processes[0].stop(at_once=True)
        assert first.verdicts([Sample("third", "", {}, "p")])[0].value == 0.7
        assert logs[0].read_text().count("$ ") == 2
    finally:
        first.close()
        second.close()
    assert not any(process.alive() for process in owned._processes)


SERVER = """
import http.server, pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
pathlib.Path(__file__).with_name(f"child_{child.pid}").touch()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_dead_servers_children_end_before_the_next_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They hold its GPUs. Until the next one answers, no process reads an address."""
    (tmp_path / "server.py").write_text(SERVER)
    command = f"sglang.command={sys.executable} {tmp_path}/server.py"
    config = small_config(tmp_path, command, "scoring.reward=judge", "judge.checkpoint=any")
    servers, written = JudgeServers(config, tmp_path / "judge"), list[bool]()
    wait = servers._wait

    def noted(process: Any) -> None:
        written.append((tmp_path / "judge" / "servers.json").exists())
        wait(process)

    monkeypatch.setattr(servers, "_wait", noted)
    try:
        before = servers.urls()
        (first,) = tmp_path.glob("child_*")
        os.kill(servers._processes[0].process.pid, signal.SIGKILL)
        wait_until(lambda: not servers._processes[0].alive())
        assert servers.urls() != before and written == [False, False]
        wait_until(lambda: not is_there(int(first.name.removeprefix("child_"))))
    finally:
        servers.close()


def test_a_judges_server_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_API_KEY", "sesame")
    (tmp_path / "server.py").write_text(SERVER)
    command = f"sglang.command={sys.executable} {tmp_path}/server.py"
    settings = ["scoring.reward=judge", "judge.checkpoint=any", "sglang.health_timeout=0.6"]
    servers = JudgeServers(small_config(tmp_path, command, *settings), tmp_path / "judge")
    try:
        before = servers.urls()
        assert "sesame" in (tmp_path / "judge" / "server_0.key.yaml").read_text()
        hung = servers._processes[0]
        os.kill(hung.process.pid, signal.SIGSTOP)
        wait_until(lambda: servers.urls() != before)
        assert not hung.alive() and servers._processes[0].alive()
    finally:
        servers.close()


def test_a_judge_whose_server_does_not_start_says_why(tmp_path: Path):
    config = small_config(
        tmp_path,
        "sglang.command=sh -c 'echo no such model; exit 1'",
        "scoring.reward=judge",
        "judge.checkpoint=missing",
    )
    servers = JudgeServers(config, tmp_path / "judge")
    try:
        with pytest.raises(EngineError, match="no such model"):
            servers.urls()
    finally:
        servers.close()
