"""An engine with scripted answers, and one episode on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_stare.compare.worlds.calculator import CALL_BEGIN, CALL_END
from megatron_stare.config import ToolsConfig
from megatron_stare.records import Prompt, Rollout
from megatron_stare.rollout.engine import Request, SamplingParams
from megatron_stare.rollout.tools.builtin import CalculatorEnvironment
from megatron_stare.rollout.tools.engine import ToolEngine

PARAMS = SamplingParams(1.0, 1.0, 230)
CALL = f"<tool_call>{CALL_BEGIN}6*7{CALL_END}</tool_call><|end|>"


class Scripted:
    """An engine whose model gives scripted answers, turn by turn; it records the requests."""

    version, sources, server = 3, 1, 2

    def __init__(self, tokenizer: PreTrainedTokenizerBase, turns: Sequence[str]) -> None:
        self.tokenizer, self.turns = tokenizer, list(turns)
        self.asked: list[Request] = []
        self.batches: list[int] = []
        self.stops: list[tuple[str, ...]] = []

    def submit(self, requests: Sequence[Request], params: SamplingParams) -> list[Future[Rollout]]:
        self.batches.append(len(requests))
        self.stops.append(params.stop)
        return [self._answer(request, params) for request in requests]

    def _answer(self, request: Request, params: SamplingParams) -> Future[Rollout]:
        self.asked.append(request)
        turn = request.known_ids.tolist().count(self.tokenizer.convert_tokens_to_ids("<tool>"))
        ids = tuple(
            self.tokenizer.encode(
                self.turns[min(turn, len(self.turns) - 1)], add_special_tokens=False
            )
        )
        known = len(request.part.response_ids) if request.part else 0
        room = params.max_new_tokens - known
        later = Rollout(
            ids[:room],
            (-0.5,) * len(ids[:room]),
            (1,) * len(ids[:room]),
            status="completed",
            weight_version=self.version,
            server=self.server,
        )
        if len(ids) > room:
            later = Rollout(
                later.response_ids,
                later.logprobs,
                later.loss_mask,
                status="truncated",
                weight_version=self.version,
                server=self.server,
            )
        future: Future[Rollout] = Future()
        future.set_result(request.part.continued(later) if request.part else later)
        return future

    def wait(self, futures: Iterable[Future[Any]]) -> None: ...

    def abort(self, requests: Sequence[Request] | None = None) -> None: ...

    def close(self) -> None: ...


def played(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[str],
    params: SamplingParams = PARAMS,
    begun: str = "",
    **settings: Any,
):
    """The rollout of one episode, and the engine that it was played on. `begun`: the beginning of
    the first turn, in the prompt.
    """
    inner = Scripted(tokenizer, turns)
    make = settings.pop("make", CalculatorEnvironment)
    engine = ToolEngine(inner, make, tokenizer, ToolsConfig(environment="calculator", **settings))  # type: ignore[arg-type]
    try:
        prompt = Prompt(0, tuple(tokenizer.encode(f"<user>6*7=<|end|><assistant>{begun}")), "42")
        (future,) = engine.submit([Request(prompt.token_ids, (0, 0), prompt=prompt)], params)
        return future.result(timeout=20), inner
    finally:
        engine.close()
