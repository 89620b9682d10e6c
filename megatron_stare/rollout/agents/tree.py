"""The model calls of one episode as a tree over token ids, and the sequences to train on.

A call whose messages begin with an earlier call's messages and its served answer continues that
call's tokens; any other one is a root. Nothing that was sampled is ever tokenised again, mended or
cut. A sequence is a path from a root to a leaf:

    root   [prompt 1][sampled 1]
    child  [prompt 1][sampled 1][bridge][sampled 2]      leaf: both sampled parts are trained here
    child' [prompt 1][sampled 1][bridge'][sampled 3]     leaf: sampled 3 alone

Every sampled token is a loss token in exactly one sequence: that of the first leaf below its call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from megatron_stare.records import Rollout
from megatron_stare.rollout.agents.messages import TOLERANCES, Message, identity, tolerated


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
        self.identities = [identity(message) for message in self.history]

    @property
    def history(self) -> list[Message]:
        """The messages with which a call that continues this one begins."""
        return [*self.messages, self.answer]

    @property
    def ids(self) -> numpy.ndarray:
        """All tokens up to the end of the answer."""
        return numpy.concatenate([self.prompt_ids, self.sampled.response_ids])


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

    def rollout(self, **fields: Any) -> tuple[Rollout, Counter[str]]:
        """The episode, and its counts. A leaf whose answer was never delivered is not trained.
        ValueError: no call is left.
        """
        counts = Counter(calls=len(self.nodes))
        kept = [node for node in self.nodes if node.delivered]
        lost = [node for node in self.nodes if not node.delivered]
        counts["undelivered_tokens"] = sum(node.sampled.length for node in lost)
        leaves = [node for node in kept if not any(child.delivered for child in node.children)]
        if not leaves:
            raise ValueError("an episode without an answered call")
        owned: set[Node] = set()
        parts = [_sequence(leaf, owned) for leaf in leaves]
        counts["sequences"] = len(parts)
        for kind, count in self.tolerated.items():
            counts[f"tolerated/{kind}"] = count
        columns = [numpy.concatenate(column) for column in zip(*parts, strict=True)]
        ids, logprobs, mask, versions = columns
        whole = Rollout(
            ids,
            logprobs,
            mask,
            token_versions=versions,
            weight_version=int(versions[-1]),
            lengths=tuple(len(part[0]) for part in parts),
            **fields,
        )
        return whole, counts


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
