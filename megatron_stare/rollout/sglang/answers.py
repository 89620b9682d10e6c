"""A server's answer to /generate, read and refused where it contradicts itself."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import orjson

from megatron_stare.records import RoutingShape, Status
from megatron_stare.rollout.engine import (
    FaultyAnswer,
    Limits,
    UnsoundAnswer,
    check_answer,
    ids_of,
    logprobs_of,
)

# The matched stop that a server reports when the model's probabilities were not numbers; it returns
# a stop id in place of the token that it could not sample.
_NAN = "NaN happened"


@dataclass(frozen=True, eq=False)
class Answer:
    """One generation: ids and log-probs, and the weights that produced the last of them."""

    ids: numpy.ndarray
    logprobs: numpy.ndarray
    status: Status
    weight_version: str
    routed: bytes = b""  # the experts of the requested positions, in the server's encoding
    drafts: tuple[int, int] = (0, 0)  # tokens that the server drafted, and accepted
    newer: int = 0  # of a whole answer: the last tokens, sampled by other weights than the first

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", ids_of(self.ids))
        object.__setattr__(self, "logprobs", logprobs_of(self.logprobs))


_DRAFTS = ("proposed", "correct")  # as SGLang names them

NOTHING = Answer(numpy.zeros(0, numpy.int32), numpy.zeros(0, numpy.float32), "aborted", "")


def decoded(content: bytes) -> Any:
    """The JSON's value. ValueError: the content is not JSON, or is nested too deeply to be an
    answer.

    orjson needs a third of the time of the standard library, which in turn reads NaN and Infinity:
    SGLang writes them when a model's probabilities are not numbers.
    """
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        try:
            return json.loads(content)
        except RecursionError:
            raise ValueError("the JSON is nested too deeply") from None


def read_answer(
    content: dict[str, Any], stop_ids: Collection[int] = (), stops: Collection[str] = ()
) -> Answer:
    """The parts of a /generate answer that training needs. FaultyAnswer: one is missing or
    contradicts another, or the answer ended with a text that is none of `stops`.

    A server also says `length` if the last allowed token is one of `stop_ids`: this answer is
    complete.
    """
    try:
        meta = content["meta_info"]
        reason = meta["finish_reason"]
        kind, matched = reason["type"], reason.get("matched")
        # A request that was aborted before its first token has none.
        listed = (
            meta.get("output_token_logprobs") or []
            if kind == "abort"
            else meta["output_token_logprobs"]
        )
        logprobs, labels = [entry[0] for entry in listed], [entry[1] for entry in listed]
        ids = list(content["output_ids"])
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise FaultyAnswer(f"the answer lacks {error}") from None
    if kind == "abort" and reason.get("status_code") not in (None, 200):
        raise FaultyAnswer(f"aborted by the server: {reason.get('message')}")
    if kind not in ("stop", "length", "abort"):
        raise FaultyAnswer(f"unknown finish reason {kind!r}")
    if matched == _NAN:
        raise UnsoundAnswer("the model's probabilities were no numbers")
    if kind == "stop" and isinstance(matched, str) and matched not in stops:
        raise FaultyAnswer(f"it ended with {matched!r}, which was not requested")
    if labels != ids:
        raise FaultyAnswer("output_ids and the ids of the log-probs differ")
    statuses: dict[str, Status] = {"stop": "completed", "length": "truncated", "abort": "aborted"}
    status: Status = (
        "completed" if kind == "length" and ids and ids[-1] in stop_ids else statuses[kind]
    )
    try:
        routed = base64.b64decode(meta.get("routed_experts") or "", validate=True)
    except (TypeError, ValueError):
        raise FaultyAnswer("its routed_experts are not base64") from None
    version = str(meta.get("weight_version", ""))
    proposed, accepted = (int(meta.get(f"spec_num_{kind}_drafts") or 0) for kind in _DRAFTS)
    drafts = (proposed, accepted)
    newer = _newer_tokens(meta)
    return Answer(ids_of(ids), logprobs_of(logprobs), status, version, routed, drafts, newer)


def _newer_tokens(meta: dict[str, Any]) -> int:
    """The tokens so far that came after the first change of weights; 0 for servers that report no
    spans of versions.
    """
    spans = meta.get("weight_versions") or []
    try:
        return sum(int(span["end"]) - int(span["start"]) for span in spans[1:])
    except (KeyError, TypeError, ValueError) as error:
        raise FaultyAnswer(f"its weight_versions lack {error}") from None


def routing_of(routed: bytes, rows: int, shape: RoutingShape) -> numpy.ndarray:
    """The experts of `rows` positions in a rollout's encoding; a server sends int32 for every layer
    of the model. FaultyAnswer: they are of other positions.
    """
    numbers = numpy.frombuffer(routed, "<i4") if len(routed) % 4 == 0 else numpy.zeros(0, "<i4")
    layers, rest = divmod(len(numbers), max(1, rows) * shape.top_k)
    if rest or layers <= shape.layers[-1]:
        raise FaultyAnswer(
            f"{len(routed)} bytes of expert choices are not those of {rows} positions, "
            f"{shape.top_k} in each of {shape.layers[-1] + 1} or more layers"
        )
    choices = numbers.reshape(rows, layers, shape.top_k)[:, shape.layers]
    try:
        return shape.encoded(choices)
    except ValueError as error:
        raise FaultyAnswer(str(error)) from None


class Prefill(NamedTuple):
    """A server's answer about ids that it only reads: the log-prob at temperature 1 [nats] of every
    id after the first, the likeliest id at its position, and the last hidden states [ids, H], after
    the final norm, if the server was started with --enable-return-hidden-states.
    """

    logprobs: numpy.ndarray
    likeliest: numpy.ndarray
    hidden: numpy.ndarray | None = None


def prefill_request(ids: numpy.ndarray, hidden: bool) -> dict[str, Any]:
    """The body of a /generate that reads all of the ids and samples nothing; with `hidden` one
    token, which hidden states need. No prefix is taken from the cache: it would have no log-probs.
    """
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": int(hidden), "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
        **({"return_hidden_states": True} if hidden else {}),
    }


def read_prefill(content: dict[str, Any], ids: numpy.ndarray, vocab_size: int) -> Prefill:
    """The answer to `prefill_request`. FaultyAnswer: it is about other ids, or incomplete. A server
    labels the log-prob of the vocabulary's last id with id 0.
    """
    try:
        meta = content["meta_info"]
        given, top = meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:]
        logprobs, labels = [entry[0] for entry in given], [entry[1] for entry in given]
        likeliest = [entries[0][1] for entries in top]
        hidden = meta.get("hidden_states")
    except (KeyError, TypeError, IndexError) as error:
        raise FaultyAnswer(f"the answer lacks {error}") from None
    allowed = [(own, 0 if own == vocab_size - 1 else own) for own in ids[1:].tolist()]
    if len({len(labels), len(likeliest), len(allowed)}) > 1 or any(
        label not in pair for label, pair in zip(labels, allowed, strict=True)
    ):
        raise FaultyAnswer("the log-probs are of other ids than were sent")
    states = None
    if hidden:
        try:
            rows = [row for part in hidden for row in part]  # one part per chunk of the prefill
            states = numpy.array(rows[: len(ids)], numpy.float32).reshape(len(ids), -1)
        except (TypeError, ValueError) as error:
            raise FaultyAnswer(f"its hidden states are of another shape: {error}") from None
    return Prefill(logprobs_of(logprobs), ids_of(likeliest), states)


def joined(pieces: Sequence[Answer]) -> Answer:
    """The pieces of one answer, in order; of none, an aborted one without tokens."""
    if len(pieces) < 2:
        return pieces[0] if pieces else NOTHING
    ids, logprobs = (
        numpy.concatenate([getattr(piece, name) for piece in pieces])
        for name in ("ids", "logprobs")
    )
    last = pieces[-1]  # its last event has the experts and versions of all positions, and drafts
    rest = (last.status, last.weight_version, last.routed, last.drafts, last.newer)
    return Answer(ids, logprobs, *rest)


_UNFINISHED = {"type": "abort"}  # the finish reason of an event that is not the last


class Received:
    """One answer as it arrives, whole or in events. A stream that ends early (a time-out, a dead
    server, new weights) leaves the tokens so far. `new_tokens`: how many were requested; `mixed`:
    new weights may come on the way; `last_part`: time.monotonic() of the last event, None before
    the first.
    """

    def __init__(
        self,
        stop_ids: Collection[int],
        stops: Collection[str],
        limits: Limits,
        new_tokens: int,
        *,
        mixed: bool = False,
    ) -> None:
        self._stop_ids, self._stops = stop_ids, stops
        self._limits, self.new_tokens, self._mixed = limits, new_tokens, mixed
        self._pieces: list[Answer] = []
        self._count = 0
        self._unread: list[bytes] = []  # the beginning of a line
        self.finished = False
        self.last_part: float | None = None

    def feed(self, data: bytes) -> bool:
        """Read bytes of a stream of events; whether the answer needs more. FaultyAnswer,
        ValueError: an invalid event.
        """
        if b"\n" not in data:
            self._unread.append(data)
            return True
        *lines, rest = b"".join([*self._unread, data]).split(b"\n")
        self._unread = [rest] if rest else []
        for line in lines:
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                self.add(decoded(line[5:]))
        return not self.finished

    def add(self, event: Any) -> None:
        """Add an event, or a whole answer. FaultyAnswer: tokens before it are missing, or it was
        sampled by other weights than the events before and not `mixed`.
        """
        try:
            if "error" in event:
                raise FaultyAnswer(f"the server failed: {event['error']}")
            meta = event["meta_info"]
            finished = meta["finish_reason"] is not None
            total = meta.get("completion_tokens", self._count + len(event["output_ids"]))
            if not finished:
                meta["finish_reason"] = _UNFINISHED
            elif meta["finish_reason"]["type"] == "abort":
                # That of a queued request repeats earlier tokens.
                event = _first(event, total - self._count)
            piece = read_answer(event, self._stop_ids, self._stops)
        except (KeyError, TypeError, AttributeError) as error:
            raise FaultyAnswer(f"the answer lacks {error}") from None
        self._count += len(piece.ids)
        if self._count != total:
            raise FaultyAnswer(f"{self._count} ids came where {total} were sampled")
        changed = self._pieces and piece.weight_version != self._pieces[0].weight_version
        if changed and not self._mixed:
            raise FaultyAnswer("its weights changed on the way")
        self._pieces.append(piece)
        self.last_part = time.monotonic()
        self.finished = finished

    def answer(self) -> Answer:
        """All tokens so far, checked; `aborted` if the answer has not finished. FaultyAnswer,
        UnsoundAnswer: it contradicts itself.
        """
        found = joined(self._pieces)
        check_answer(found.ids, found.logprobs, found.status, self.new_tokens, self._limits)
        return found


def _first(event: dict[str, Any], count: int) -> dict[str, Any]:
    """The event with the first `count` of its tokens."""
    meta = dict(event["meta_info"])
    meta["output_token_logprobs"] = (meta.get("output_token_logprobs") or [])[:count]
    return {"output_ids": event["output_ids"][:count], "meta_info": meta}
