"""Agents as programs on a real server: what is trained is what the server sampled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_stare.compare.worlds.calculator import tool_tokenizer
from megatron_stare.config import SGLangConfig
from megatron_stare.records import Rollout
from megatron_stare.rollout.engine import Request, SamplingParams
from megatron_stare.rollout.sglang import requests
from megatron_stare.rollout.sglang.answers import Received
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.process import ServerProcess
from tests.rollout.agents.scripted import PARAMS, agents, request
from tests.rollout.sglang.test_requests_streaming import wait_until
from tests.rollout.sglang.world import (
    CHECKSUMS,
    STREAM_INTERVAL,
    TOLERANCE,
    make_model,
    served,
    start_server,
    sync,
    wait_for,
)

pytestmark = pytest.mark.sglang

EPISODES, TURNS = 12, 3


class ChatServer(NamedTuple):
    """A server whose model has a chat template, and its checkpoint."""

    process: ServerProcess
    checkpoint: Path


def chat_model(directory: Path, seed: int = 0) -> Path:
    tokenizer = tool_tokenizer()
    checkpoint = make_model(directory, "qwen2", seed, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(checkpoint)
    return checkpoint


@pytest.fixture(scope="module")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    directory = tmp_path_factory.mktemp("chat")
    checkpoint = chat_model(directory / "model")
    process = start_server(checkpoint, directory / "server.txt")
    try:
        wait_for([process], checkpoint, tool_tokenizer())
        yield ChatServer(process, checkpoint)
    finally:
        process.stop()


class Logged:
    """A pool that notes what it was asked and what it answered."""

    def __init__(self, pool: SGLangPool) -> None:
        self.pool = pool
        self.answers: list[tuple[Request, Future[Rollout]]] = []

    def submit(self, requests: Sequence[Request], params: SamplingParams) -> list[Future[Rollout]]:
        futures = self.pool.submit(requests, params)
        self.answers += zip(requests, futures, strict=True)
        return futures

    def close(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)


@torch.no_grad()
def logprobs(checkpoint: Path, ids: Sequence[int]) -> torch.Tensor:
    """The log-probs of every token after the first, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    logits = model(torch.tensor([list(ids)])).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


class Parts:
    """The answers that the pool receives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Received] = []

        class Noted(Received):
            def __init__(self, *given: Any, **settings: Any) -> None:
                super().__init__(*given, **settings)
                seen.append(self)

        self.seen = seen
        monkeypatch.setattr(requests, "Received", Noted)

    def open(self) -> bool:
        """Whether an answer in flight has its first tokens and no more than half of them."""
        parts = [one for one in self.seen if one.last_part is not None and not one.finished]
        return any(one._count <= PARAMS.max_new_tokens // 2 for one in parts)


def test_new_weights_in_the_middle_of_a_turn_look_like_a_slow_answer(
    chat_server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every episode has its reward and one sequence; every sampled token is trained once, with the
    log-prob of the weights whose version it bears.
    """
    old, new = chat_server.checkpoint, chat_model(tmp_path / "other", seed=9)
    tokenizer, parts = tool_tokenizer(), Parts(monkeypatch)
    settings = SGLangConfig(
        urls=[chat_server.process.url],
        sync_method="tensor",
        sync_timeout=60.0,
        verify_weights=CHECKSUMS,
        stream_interval=STREAM_INTERVAL,
        max_concurrency=4,
    )
    with contextlib.closing(SGLangPool(settings, served(old, tokenizer), tmp_path)) as pool:
        pool.start().result(timeout=300)
        sync(pool, old, 0, tmp_path)
        logged = Logged(pool)
        engine = agents(logged, tokenizer, function="talks")
        try:
            asked = [request(tokenizer, number, turns=TURNS) for number in range(EPISODES)]
            futures = engine.submit(asked, PARAMS)
            wait_until(lambda: len(logged.answers) >= EPISODES + 2)  # some are in their second turn
            # Turns begin and end together: at most moments of such a crowd no answer is half here.
            wait_until(lambda: parts.open() or not STREAM_INTERVAL)
            pool.expect(1)
            pool.interrupt()
            wait_until(pool.admission.without_weights)
            sync(pool, new, 1, tmp_path)
            rollouts = [future.result(timeout=300) for future in futures]
            counts = engine.counts()
        finally:
            engine.close()
    assert counts["engine_interrupted"] > 0 == counts["engine_fault_garbage"]
    assert len(logged.answers) == EPISODES * TURNS, "no call was sent twice"
    answers = [answer.result() for _, answer in logged.answers]
    mixed = sum(len(set(answer.versions)) > 1 for answer in answers)
    assert mixed > 0, "an update came in the middle of a turn"
    assert sum(map(len, (r.versions[r.loss_mask] for r in rollouts))) == sum(
        answer.length for answer in answers
    )
    for rollout in rollouts:
        assert rollout.outcome == 1.0 and "errors" not in rollout.episode
        assert rollout.episode["calls"] == TURNS and rollout.lengths == (rollout.length,)
        ids = rollout.response_ids.tolist()
        by_old, by_new = (logprobs(checkpoint, ids) for checkpoint in (old, new))
        early, own = torch.tensor(rollout.versions == 0)[1:], torch.tensor(rollout.loss_mask)[1:]
        recorded = torch.tensor(rollout.logprobs)[1:]
        expected, wrong = torch.where(early, by_old, by_new), torch.where(early, by_new, by_old)
        torch.testing.assert_close(recorded[own], expected[own], atol=TOLERANCE, rtol=0)
        assert (expected - wrong)[own].abs().max() > 100 * TOLERANCE
