"""Games of TextArena between the scripted policy and another server, as either player."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megatron_stare.compare.worlds.calculator import tool_tokenizer
from tests.paths import ROOT
from tests.rollout.agents.environments import play, python_of, rows_of
from tests.rollout.agents.scripted import Scripted

pytestmark = pytest.mark.agents
PYTHON = python_of("textarena")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tool_tokenizer()


def free(text: str) -> list[str]:
    """The moves that the last board in a text allows."""
    return re.findall(r"\[\d\]", re.findall(r"Available Moves: (.*)", text)[-1])


class LastFree(BaseHTTPRequestHandler):
    """A model that takes the last free cell, or fails."""

    status = 200

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = {"role": "assistant", "content": free(asked["messages"][-1]["content"])[-1]}
        body = json.dumps({"choices": [{"message": said}]}).encode()
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def opponent() -> Iterator[dict[str, str]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), LastFree)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"base_url": f"http://127.0.0.1:{server.server_port}/v1", "model": "other"}
    server.shutdown()
    server.server_close()


def games(tokenizer: Any, opponent: dict[str, str], answer: Any) -> tuple[list[Any], Scripted]:
    settings = json.loads((ROOT / "examples" / "agents" / "text_arena.json").read_text())
    rows = rows_of(PYTHON, "text_arena", settings | {"opponent": opponent}, 2)
    inner = Scripted(tokenizer, answer)
    return play(inner, tokenizer, PYTHON, "text_arena", rows), inner


def test_each_player_gets_its_own_reward(tokenizer: PreTrainedTokenizerBase, opponent: Any):
    """First free cell against last free cell: the one that begins has a row full first."""
    rollouts, inner = games(tokenizer, opponent, lambda text, _: f"{free(text)[0]}<|end|>")
    assert [rollout.outcome for rollout in rollouts] == [1.0, -1.0]
    logged = [prompt + given for prompt, given in inner.log]
    for player, rollout in enumerate(rollouts):
        assert rollout.episode[f"agent/player_{player}"] == rollout.outcome
        assert rollout.episode["calls"] == 3 - player and rollout.status == "completed"
        assert len(rollout.lengths) == 1 and rollout.response_ids.tolist() in logged
        text = tokenizer.decode(rollout.response_ids)
        assert f"You are Player {player}" in text and text.count("You are Player") == 1
    trained = sum(rollout.loss_tokens for rollout in rollouts)
    assert trained == sum(len(given) for _, given in inner.log), "the policy's tokens alone"


def test_moves_that_the_game_refuses_lose_it(tokenizer: PreTrainedTokenizerBase, opponent: Any):
    rollouts, _ = games(tokenizer, opponent, lambda *_: "[9]<|end|>")
    assert [rollout.outcome for rollout in rollouts] == [-1.0, -1.0]
    assert all(rollout.episode["agent/invalid_move"] == 1 for rollout in rollouts)


def test_a_failing_opponent_is_no_reward(
    tokenizer: PreTrainedTokenizerBase, opponent: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(LastFree, "status", 500)
    rollouts, _ = games(tokenizer, opponent, lambda text, _: f"{free(text)[0]}<|end|>")
    for rollout in rollouts:
        assert rollout.outcome is None and rollout.loss_tokens == 0
        assert rollout.episode["failed/HTTPError"] == 1
