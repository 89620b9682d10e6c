"""An engine whose answers are scripted by the text of the prompt, and sessions on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_stare.config import AgentsConfig
from megatron_stare.records import Prompt, Rollout
from megatron_stare.rollout.agents.agent_engine import AgentEngine
from megatron_stare.rollout.engine import Limits, Request, SamplingParams

PARAMS = SamplingParams(1.0, 1.0, 60)
PROGRAMS = "tests.rollout.agents.programs"


class Scripted:
    """Answers by `answer(text of the prompt, number of the request)`; keeps a log of what it was
    asked and what it gave, as a server would. While `held` is set, answers wait for `release`.
    """

    sources, limits = 1, Limits(1 << 20, 1 << 20, 1 << 20)

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, answer: Callable[[str, int], str]
    ) -> None:
        self.tokenizer, self.answer = tokenizer, answer
        self.version, self.held = 3, False
        self.log: list[tuple[list[int], list[int]]] = []
        self.requests: list[Request] = []
        self.params: list[SamplingParams] = []
        self.waiting: list[tuple[Future[Rollout], Rollout]] = []

    def submit(self, requests: Sequence[Request], params: SamplingParams) -> list[Future[Rollout]]:
        return [self._one(request, params) for request in requests]

    def _one(self, request: Request, params: SamplingParams) -> Future[Rollout]:
        prompt = request.prompt_ids.tolist()
        text = self.answer(self.tokenizer.decode(prompt), len(self.log))
        every = self.tokenizer.encode(text, add_special_tokens=False)
        ids = every[: params.max_new_tokens]
        self.log.append((prompt, ids))
        self.requests.append(request)
        self.params.append(params)
        rollout = Rollout(
            ids,
            [-0.5 - len(self.log)] * len(ids),
            [1] * len(ids),
            status="completed" if ids == every else "truncated",
            weight_version=self.version,
            server=2,
        )
        future: Future[Rollout] = Future()
        if self.held:
            self.waiting.append((future, rollout))
        else:
            future.set_result(rollout)
        return future

    def release(self) -> None:
        for future, rollout in self.waiting:
            future.set_result(rollout)
        self.waiting.clear()

    def wait(self, futures: Any) -> None: ...

    def abort(self, requests: Sequence[Request] | None = None) -> None:
        for future, rollout in self.waiting:
            future.set_result(Rollout.inserted((), "aborted", rollout.weight_version))
        self.waiting.clear()

    def counts(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def agents(inner: Any, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> AgentEngine:
    """An engine of agents with one host; `function` is one of programs.py."""
    settings = {"hosts": 1, "grace_seconds": 0.5, "heartbeat_seconds": 0.05} | settings
    settings["function"] = f"{PROGRAMS}.{settings['function']}"
    return AgentEngine(inner, tokenizer, AgentsConfig(**settings), 256)


def request(tokenizer: PreTrainedTokenizerBase, number: int = 0, **metadata: Any) -> Request:
    """The request of an episode about 6*7."""
    messages = ({"role": "user", "content": "6*7="},)
    ids = tokenizer.encode("<user>6*7=<|end|><assistant>")
    prompt = Prompt(0, ids, "42", metadata=metadata, messages=messages)
    return Request(prompt.token_ids, (0, 0, 0, number), prompt=prompt)
