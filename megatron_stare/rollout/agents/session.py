"""The calls of one episode: answered from the engine, continued, replayed, and counted."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy

from megatron_stare.config import AgentsConfig
from megatron_stare.records import Rollout
from megatron_stare.rollout.agents.chat import ModelAnswer, ModelCall
from megatron_stare.rollout.agents.messages import BadCall, Message, Renderer
from megatron_stare.rollout.agents.tree import CallTree, Node
from megatron_stare.rollout.engine import Engine, Request, SamplingParams
from megatron_stare.rollout.episodes import EngineFailed
from megatron_stare.system import digest

ENDED = "session_ended"  # the code of an error: a limit is reached, or the episode is over


@dataclass(eq=False)
class Delivery:
    """A call on its way to its client. `alive`: whether the connection that asked last exists."""

    answer: asyncio.Task[tuple[Node, ModelAnswer]]
    alive: Callable[[], bool]

    @property
    def delivered(self) -> bool:
        """Whether a client has received the whole answer."""
        done = self.answer.done() and not self.answer.cancelled() and not self.answer.exception()
        return done and self.answer.result()[0].delivered


@dataclass(eq=False)
class AgentSession:
    """One episode's key, limits and calls. All methods run in the endpoint's loop."""

    engine: Engine
    renderer: Renderer
    settings: AgentsConfig
    request: Request  # of the episode
    params: SamplingParams
    context_length: int
    key: str = field(default_factory=lambda: f"sk-{secrets.token_hex(32)}")
    closed: bool = False
    ended: str = ""  # the limit that was reached
    failure: BaseException | None = None  # of the engine below

    def __post_init__(self) -> None:
        self.tree = CallTree(self.settings.tolerate)
        self.counts: Counter[str] = Counter()
        self._deliveries: dict[str, list[Delivery]] = {}
        self._in_flight: list[Request] = []
        self._repeats: Counter[int] = Counter()
        self._tokens = 0

    def knows(self, body: str) -> bool:
        """Whether an equal request came before."""
        return digest(body) in self._deliveries

    def ask(self, call: ModelCall, body: str, retries: int, alive: Callable[[], bool]) -> Delivery:
        """The answer to a request: an earlier one, to an equal body, if the client says that it
        retries or if the earlier answer did not arrive. BadCall: a limit is reached.
        """
        same = self._deliveries.setdefault(digest(body), [])
        for earlier in reversed(same):
            if retries or (not earlier.delivered and not earlier.alive()):
                earlier.alive = alive
                self.counts["replayed"] += 1
                return earlier
        self._check_budget()
        self.counts.update({f"ignored/{name}": 1 for name in call.ignored})
        self.counts["asked"] += 1
        found = Delivery(asyncio.ensure_future(self._answered(call)), alive)
        same.append(found)
        return found

    def end(self, limit: str = "") -> list[Request]:
        """Answer no further call; `limit`: the one that was reached. Returns what is in flight."""
        self.closed, self.ended = True, self.ended or limit
        return list(self._in_flight)

    def _check_budget(self) -> None:
        settings = self.settings
        for name, used, most in (
            ("agents.max_calls", self.counts["asked"], settings.max_calls),
            ("agents.max_tokens", self._tokens, settings.max_tokens),
        ):
            if used >= most:
                raise self._used_up(name, most)

    def _used_up(self, name: str, most: int) -> BadCall:
        self.ended = self.ended or name
        return BadCall(f"the episode has used up {name}={most}", ENDED)

    async def _answered(self, call: ModelCall) -> tuple[Node, ModelAnswer]:
        context = digest(repr((call.tools, call.model.partition(":")[2])))
        call = self._with_history(call)
        if call.prompt_ids is not None:
            if max(call.prompt_ids) >= len(self.renderer.tokenizer):
                raise BadCall(f"token id {max(call.prompt_ids)} is not in the vocabulary")
            prompt = numpy.array(call.prompt_ids, numpy.int32)
            self.counts["rendered_by_client"] += 1
            parent = self.tree.parent_of_ids(prompt)
        elif (parent := self.tree.parent_of(call.messages, context)) is None:
            prompt = self.renderer.prompt(call.messages, call.tools)
        else:
            new, ids = call.messages[len(parent.identities) :], parent.ids
            bridge = self.renderer.bridge(new, int(ids[-1]), parent.closing)
            prompt = numpy.concatenate([ids, bridge])
        self._check_sequences(parent)
        limits = self._limits(call, prompt)
        sampled = await self._sampled(prompt, limits)
        turn = self.renderer.turn(sampled.response_ids.tolist(), prompt, limits.stop)
        number = len(self.tree.nodes)
        message: Message = {"role": "assistant", "content": turn.content}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls and call.tools:
            message["content"] = turn.content or None
            message["tool_calls"] = [
                {
                    "id": f"call_{number}_{place}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for place, (name, arguments) in enumerate(turn.calls)
            ]
        self.counts["malformed_calls"] += turn.malformed
        self.counts["tool_calls"] += len(message.get("tool_calls") or ())
        node = Node(parent, context, call.messages, message, prompt, sampled, turn.closing)
        node.instructed = call.instructed
        self.tree.add(node)
        return node, self._served(call, node, number)

    def _served(self, call: ModelCall, node: Node, number: int) -> ModelAnswer:
        finish = "length" if node.sampled.status == "truncated" else "stop"
        if node.answer.get("tool_calls"):
            finish = "tool_calls"
        decode = self.renderer.tokenizer.decode
        tokens = node.sampled.response_ids.tolist()
        return ModelAnswer(
            f"{digest(self.key, 8)}_{number}",
            call.model or "policy",
            node.answer,
            finish,
            node.prompt_ids.tolist(),
            tokens,
            node.sampled.logprobs.tolist(),
            [decode([one]) for one in tokens] if call.logprobs else [],
        )

    def _with_history(self, call: ModelCall) -> ModelCall:
        """The call with the messages before it. BadCall: it continues no answer of the session."""
        if not call.previous:
            return call
        name, _, number = call.previous.partition("_")
        own = name == digest(self.key, 8) and number.isdigit()
        if not own or int(number) >= len(self.tree.nodes):
            answer = f"previous_response_id=resp_{call.previous}"
            raise BadCall(f"{answer} is not an answer of this episode")
        node = self.tree.nodes[int(number)]
        before, new = node.history[node.instructed :], call.messages
        first = [new[0]] if call.instructed else []
        return dataclasses.replace(call, messages=[*first, *before, *new[call.instructed :]])

    def _check_sequences(self, parent: Node | None) -> None:
        """BadCall: one sequence more than agents.max_sequences would begin."""
        leaves = sum(not node.children for node in self.tree.nodes)
        begins = parent is None or bool(parent.children)
        if begins and leaves >= self.settings.max_sequences:
            raise self._used_up("agents.max_sequences", self.settings.max_sequences)

    def _limits(self, call: ModelCall, prompt: numpy.ndarray) -> SamplingParams:
        left = self.context_length - len(prompt)
        if left < 1:
            self.ended = self.ended or "context"
            raise BadCall(
                f"This model's maximum context length is {self.context_length} tokens. However, "
                f"your messages resulted in {len(prompt)} tokens.",
                "context_length_exceeded",
            )
        most = min(call.max_tokens or left, left, self.params.max_new_tokens)
        stop = (*self.params.stop, *call.stop)
        return dataclasses.replace(self.params, max_new_tokens=most, stop=stop)

    async def _sampled(self, prompt: numpy.ndarray, params: SamplingParams) -> Rollout:
        """The engine's answer. BadCall: the episode ended meanwhile.

        The seed depends on the prompt and on how often it came before, not on the order in which
        calls arrive: agents that run in parallel repeat.
        """
        name = int(digest(prompt.tobytes(), 15), 16)
        seed = (*self.request.seed, name, self._repeats[name])
        self._repeats[name] += 1
        request = Request(prompt, seed)
        self._in_flight.append(request)
        try:
            (future,) = self.engine.submit([request], params)
            rollout = await asyncio.wrap_future(future)
        except Exception as error:
            self.failure = self.failure or error
            raise EngineFailed(error) from error
        finally:
            self._in_flight.remove(request)
        if self.closed or rollout.status == "aborted":
            raise BadCall("the episode is over", ENDED)
        self._tokens += rollout.length
        return rollout

    def rollout(self, **fields: Any) -> Rollout:
        """The episode's rollout, with the counts of its calls. ValueError: it has no call."""
        found, counts = self.tree.rollout(text=self._last_text(), **fields)
        counts.update(self.counts)
        episode = {name: float(count) for name, count in counts.items()}
        return dataclasses.replace(found, episode={**episode, **fields.get("episode", {})})

    def _last_text(self) -> str:
        delivered = [node for node in self.tree.nodes if node.delivered]
        return str(delivered[-1].answer.get("content") or "") if delivered else ""
