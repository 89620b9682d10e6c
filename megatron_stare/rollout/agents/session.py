"""The calls of one episode: answered from the engine, continued, replayed, counted, and kept as a
tree over token ids, whose paths are the sequences to train on.

A call whose messages begin with an earlier call's messages and its served answer continues that
call's tokens; any other one is a root. Nothing that was sampled is ever tokenised again, mended or
cut. A sequence is a path from a root to a leaf:

    root   [prompt 1][sampled 1]
    child  [prompt 1][sampled 1][bridge][sampled 2]      leaf: both sampled parts are trained here
    child' [prompt 1][sampled 1][bridge'][sampled 3]     leaf: sampled 3 alone

Every sampled token is a loss token in exactly one sequence: that of the first leaf below its call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from megatron_stare.config import AgentsConfig, UserError
from megatron_stare.records import Rollout
from megatron_stare.rollout.agents.chat import ModelAnswer, ModelCall
from megatron_stare.rollout.agents.messages import (
    TOLERANCES,
    BadCall,
    Message,
    Renderer,
    identity,
    tolerated,
)
from megatron_stare.rollout.engine import Engine, Request, SamplingParams
from megatron_stare.rollout.episodes import EngineFailed
from megatron_stare.system import digest

ENDED = "session_ended"  # the code of an error: a limit is reached, or the episode is over


@dataclass(eq=False)
class Node:
    """One call that was answered."""

    parent: Node | None
    context: str  # digest of tools and role, which a child has too
    messages: list[Message]  # as received
    answer: Message  # as served
    prompt_ids: numpy.ndarray  # as sent to the engine
    sampled: Rollout
    closing: str = ""  # text that ends what the turn left open, before its end
    delivered: bool = False
    instructed: bool = False  # its first message is not carried over to what continues it
    children: list[Node] = field(default_factory=list)
    identities: list[tuple[Any, ...]] = field(init=False)

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.messages = _shared(self.parent.history, self.messages)
        self.identities = [identity(message) for message in self.history]
        if self.parent is not None:
            self.identities = _shared(self.parent.identities, self.identities)

    @property
    def history(self) -> list[Message]:
        """The messages with which a call that continues this one begins."""
        return [*self.messages, self.answer]

    @property
    def ids(self) -> numpy.ndarray:
        """All tokens up to the end of the answer."""
        return numpy.concatenate([self.prompt_ids, self.sampled.response_ids])


def _shared[T](known: Sequence[T], own: list[T]) -> list[T]:
    """`own`, with the objects of `known` where they are equal: every call of an episode comes with
    the whole history, which memory then holds once.
    """
    pairs = zip(known, own, strict=False)
    return [one if one == other else other for one, other in pairs] + own[len(known) :]


class CallTree:
    """The calls of one episode, in the order in which they were answered."""

    def __init__(self, tolerate: str = "format+reasoning") -> None:
        self.allowed = TOLERANCES[tolerate]
        self.nodes: list[Node] = []
        self.tolerated: Counter[str] = Counter()

    def parent_of(self, messages: Sequence[Mapping[str, Any]], context: str) -> Node | None:
        """The deepest call that these messages continue; the newest of several. None: a root.
        Tolerated differences are counted.
        """
        own = [identity(message) for message in messages]
        found: tuple[Node, set[str]] | None = None
        for node in self.nodes:
            size = len(node.identities)
            if node.context != context or own[:size] != node.identities:
                continue
            if found is not None and len(found[0].identities) > size:
                continue
            kinds = tolerated(node.history, messages[:size], self.allowed)
            if kinds is not None:
                found = node, kinds
        if found is None:
            return None
        self.tolerated.update(found[1])
        return found[0]

    def parent_of_ids(self, prompt: numpy.ndarray) -> Node | None:
        """The deepest call whose tokens a prompt that its client rendered begins with."""
        fitting = [
            node
            for node in self.nodes
            if len(node.ids) < len(prompt) and (prompt[: len(node.ids)] == node.ids).all()
        ]
        return max(fitting, key=lambda node: len(node.ids), default=None)

    def add(self, node: Node) -> None:
        """Note an answered call."""
        self.nodes.append(node)
        if node.parent is not None:
            node.parent.children.append(node)
            node.parent.delivered = True  # its answer came back

    def rollout(self, counts: Mapping[str, float], **fields: Any) -> Rollout:
        """The episode; `counts` are added to its own. A leaf whose answer was never delivered is
        not trained. ValueError: no call is left.
        """
        kept = [node for node in self.nodes if node.delivered]
        lost = [node for node in self.nodes if not node.delivered]
        leaves = [node for node in kept if not any(child.delivered for child in node.children)]
        if not leaves:
            raise ValueError("an episode without an answered call")
        owned: set[Node] = set()
        parts = [_sequence(leaf, owned) for leaf in leaves]
        own = {
            "calls": len(self.nodes),
            "undelivered_tokens": sum(node.sampled.length for node in lost),
            "sequences": len(parts),
            **{f"tolerated/{kind}": count for kind, count in self.tolerated.items()},
        }
        columns = [numpy.concatenate(column) for column in zip(*parts, strict=True)]
        ids, logprobs, mask, versions = columns
        servers = {node.sampled.server for node in kept}
        return Rollout(
            ids,
            logprobs,
            mask,
            token_versions=versions,
            weight_version=int(versions[-1]),
            server=servers.pop() if len(servers) == 1 else -1,
            lengths=tuple(len(part[0]) for part in parts),
            episode={name: float(count) for name, count in {**own, **counts}.items()},
            **fields,
        )


def _sequence(leaf: Node, owned: set[Node]) -> tuple[numpy.ndarray, ...]:
    """Ids, log-probs, loss mask and versions of the path to a leaf. Calls that no earlier sequence
    owns are owned by this one from here on. Inserted tokens have the version of the answer to them.
    """
    path = [leaf]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    ids = leaf.ids
    logprobs, mask = numpy.zeros(len(ids), numpy.float32), numpy.zeros(len(ids), numpy.bool_)
    versions, begin = numpy.zeros(len(ids), numpy.int32), 0
    for node in reversed(path):
        its = slice(len(node.prompt_ids), len(node.prompt_ids) + node.sampled.length)
        logprobs[its], versions[its] = node.sampled.logprobs, node.sampled.versions
        versions[begin : its.start] = node.sampled.versions[0]
        mask[its] = node not in owned
        owned.add(node)
        begin = its.stop
    return ids, logprobs, mask, versions


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
    refused: str = ""  # the engine's words about a prompt that it cannot take
    given_up: bool = False  # the engine could not sample an answer

    def __post_init__(self) -> None:
        self.tree = CallTree(self.settings.tolerate)
        self.counts: Counter[str] = Counter()
        self._deliveries: dict[str, list[Delivery]] = {}
        self._in_flight: list[Request] = []
        self._repeats: Counter[int] = Counter()
        self._tokens = 0
        # of the calls in flight: their parents, and whether they begin a sequence
        self._begun: list[tuple[Node | None, bool]] = []

    @property
    def calling(self) -> bool:
        """Whether a call waits for the engine."""
        return bool(self._in_flight)

    def knows(self, body: str) -> bool:
        """Whether an equal request came before."""
        return digest(body) in self._deliveries

    def ask(self, call: ModelCall, body: str, retries: bool, alive: Callable[[], bool]) -> Delivery:
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
        # An error is of no interest where the client has left; asyncio would log it.
        found.answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        same.append(found)
        return found

    def end(self, limit: str = "") -> list[Request]:
        """Answer no further call; `limit`: the one that was reached. Returns what is in flight."""
        self.closed, self.ended = True, self.ended or limit
        return list(self._in_flight)

    def _check_budget(self) -> None:
        if self.given_up:
            raise BadCall("the episode is over", ENDED)
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
        begun = parent, self._begins(parent)
        limits = self._limits(call, prompt)
        self._begun.append(begun)
        try:
            sampled = await self._sampled(prompt, limits)
        finally:
            self._begun.remove(begun)
        tokens = sampled.response_ids.tolist()
        turn = self.renderer.turn(tokens, prompt, limits.stop, call.tools)
        number = len(self.tree.nodes)
        message: Message = {"role": "assistant", "content": turn.content}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
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
        node = Node(
            *(parent, context, call.messages, message, prompt, sampled, turn.closing),
            instructed=call.instructed,
        )
        self.tree.add(node)
        return node, self._served(call, node, number)

    def _served(self, call: ModelCall, node: Node, number: int) -> ModelAnswer:
        finish = "length" if node.sampled.status == "truncated" else "stop"
        if node.answer.get("tool_calls"):
            finish = "tool_calls"
        decode = self.renderer.tokenizer.decode
        ids = node.sampled.response_ids
        return ModelAnswer(
            f"{digest(self.key, 8)}_{number}",
            call.model or "policy",
            node.answer,
            finish,
            node.prompt_ids,
            ids,
            node.sampled.logprobs,
            [decode([one]) for one in ids.tolist()] if call.logprobs else [],
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

    def _begins(self, parent: Node | None) -> bool:
        """Whether a call with this parent begins a sequence. BadCall: one more than
        agents.max_sequences.
        """
        begins = parent is None or bool(parent.children) or parent in [p for p, _ in self._begun]
        leaves = sum(not node.children for node in self.tree.nodes)
        if begins and leaves + sum(b for _, b in self._begun) >= self.settings.max_sequences:
            raise self._used_up("agents.max_sequences", self.settings.max_sequences)
        return begins

    def _limits(self, call: ModelCall, prompt: numpy.ndarray) -> SamplingParams:
        longest = min(self.context_length, self.engine.limits.context_length)
        left = longest - len(prompt)
        if left < 1:
            self.ended = self.ended or "context"
            raise BadCall(
                f"This model's maximum context length is {longest} tokens. However, "
                f"your messages resulted in {len(prompt)} tokens.",
                "context_length_exceeded",
            )
        most = min(call.max_tokens or left, left, self.params.max_new_tokens)
        stop = (*self.params.stop, *call.stop)
        return dataclasses.replace(self.params, max_new_tokens=most, stop=stop)

    async def _sampled(self, prompt: numpy.ndarray, params: SamplingParams) -> Rollout:
        """The engine's answer. BadCall: it gave none, or the episode ended meanwhile.

        The seed depends on the prompt and on how often it came before, not on the order in which
        calls arrive: agents that run in parallel repeat.
        """
        name = int(digest(prompt.tobytes(), 15), 16)
        seed = (*self.request.seed, name, self._repeats[name])
        self._repeats[name] += 1
        request = Request(prompt, seed, episode=self.request.seed)
        self._in_flight.append(request)
        try:
            (future,) = self.engine.submit([request], params)
            rollout = await asyncio.wrap_future(future)
        except UserError as error:  # servers may read fewer tokens than the model
            self.refused, self.ended = str(error), self.ended or "context"
            raise BadCall(self.refused, "context_length_exceeded") from None
        except Exception as error:
            self.failure = self.failure or error
            raise EngineFailed(error) from error
        finally:
            self._in_flight.remove(request)
        # Tokens of an unverifiable rollout are a substitute, not the model's.
        self.given_up |= rollout.verdict == "unverifiable"
        if self.closed or self.given_up or rollout.status == "aborted":
            raise BadCall("the episode is over", ENDED)
        self._tokens += rollout.length
        return rollout

    def rollout(self, counts: Mapping[str, float], **fields: Any) -> Rollout:
        """The episode's rollout, with the counts of its calls and these. ValueError: it has no
        call.
        """
        said = [node.answer.get("content") or "" for node in self.tree.nodes if node.delivered]
        every = {**self.counts, **counts}
        return self.tree.rollout(every, text=said[-1] if said else "", **fields)
