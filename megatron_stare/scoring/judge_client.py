"""Questions to an OpenAI-compatible server: tried again, bounded in time, and kept.

An answer is kept by the hash of all that was sent (server and key apart), in a file of this process
in judge/ of the run's directory, one JSON object a line:

    {"key", "answer", "finish", "prompt", "response"}     the last two shortened

A resumed run, and an evaluation of the same responses, read the newest ones from there; MOST_KEPT
bytes are held in memory. An answer must hold one JSON object after the thinking; the last object
counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_stare.config import JudgeConfig
from megatron_stare.scoring.remote import NoAnswer, Service, shown
from megatron_stare.scoring.verdict import Sample, printable
from megatron_stare.system import BestEffort, digest

_SECOND_TEMPERATURE = 0.7  # of the second try: at temperature 0 it would repeat the first one
_MOST_BYTES = 16 << 20  # of an answer
MOST_KEPT = 256 << 20  # bytes of answers
_ENTRY_BYTES = 400  # of an answer in memory, its text apart
_SHOWN = 200  # characters of a prompt and a response in the file


class BadAnswer(ValueError):
    """A judge's answer that does not say what it was asked for."""


@dataclass(frozen=True)
class Question:
    """A message to the judge. `read`: the value in its answer, or BadAnswer."""

    text: str
    read: Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True)
class Reply:
    """A judge's answer to one question. `value` None: for `reason` there is none."""

    value: float | None
    text: str = ""
    reason: str = ""
    asked: int = 0  # requests that were answered, those from the file left out
    tokens: int = 0  # prompt and completion
    seconds: float = 0.0


class Kept:
    """The newest answers by key; all of them are on disk too, if there is a directory."""

    def __init__(self, directory: Path | None) -> None:
        self.found: dict[str, tuple[str, str]] = {}  # in the order in which they came
        self._size = 0  # bytes of `found`
        self._file: IO[str] | None = None
        self._path: Path | None = None
        self._safely = BestEffort("a resumed run asks the judge again for what it answers now")
        if directory is not None:
            self._read(directory)
            self._path = directory / f"{socket.gethostname()}-{os.getpid()}.jsonl"

    def add(self, key: str, answer: str, finish: str, sample: Sample) -> None:
        """Keep an answer; it reaches the operating system at once. A full disk is a warning."""
        self._hold(key, answer, finish)
        excerpt = {"prompt": sample.prompt[:_SHOWN], "response": sample.response[-_SHOWN:]}
        line = json.dumps({"key": key, "answer": answer, "finish": finish, **excerpt}) + "\n"
        self._safely(lambda: self._write(line))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._safely(self._file.close)

    def _hold(self, key: str, answer: str, finish: str) -> None:
        if key in self.found:
            return
        self.found[key] = answer, finish
        self._size += len(answer) + _ENTRY_BYTES
        while self._size > MOST_KEPT:
            oldest, _ = self.found.pop(next(iter(self.found)))
            self._size -= len(oldest) + _ENTRY_BYTES

    def _write(self, line: str) -> None:
        if self._path is None:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(line)
        self._file.flush()

    def _read(self, directory: Path) -> None:
        """The last MOST_KEPT bytes of all files, as they were written."""
        left, contents = MOST_KEPT, list[bytes]()
        files = ((file.stat(), file) for file in directory.glob("*.jsonl"))
        for stat, file in sorted(files, key=lambda pair: pair[0].st_mtime, reverse=True):
            with file.open("rb") as stream:
                stream.seek(max(0, stat.st_size - left))
                contents.append(stream.read(left))
            left -= len(contents[-1])
        for line in itertools.chain.from_iterable(c.splitlines() for c in reversed(contents)):
            try:
                found = json.loads(line)
                self._hold(found["key"], found["answer"], found["finish"])
            except (ValueError, KeyError, TypeError):
                continue  # it begins before these bytes, or a killed process wrote half of it


class JudgeClient:
    """Asks the servers that `urls` names at the time of asking. Its methods run in one loop."""

    def __init__(
        self, settings: JudgeConfig, urls: Callable[[], Sequence[str]], directory: Path | None
    ) -> None:
        self.settings, self.urls, self.kept = settings, urls, Kept(directory)
        self._service = Service(
            "judge",
            attempts=settings.attempts,
            concurrency=settings.concurrency,
            timeout=settings.timeout,
            most_bytes=_MOST_BYTES,
            key=os.environ.get(settings.key_variable, ""),
        )
        self._flying: dict[str, asyncio.Future[Any]] = {}
        self._look: asyncio.Future[Sequence[str]] | None = None  # at the addresses

    async def close(self) -> None:
        """End the connections."""
        await self._service.close()
        self.kept.close()

    @property
    def starting(self) -> asyncio.Future[Sequence[str]] | None:
        """Done when the servers that are started now answer; None: none is started."""
        return self._look if self._look is not None and not self._look.done() else None

    async def ask(self, question: Question, sample: Sample) -> Reply:
        """The judge's answer. One that cannot be read is asked for a second time."""
        begun, asked, tokens, text, reason = time.monotonic(), 0, 0, "", ""
        for seed in (0, 1):
            temperature = self.settings.temperature
            if seed and not temperature:
                temperature = _SECOND_TEMPERATURE
            try:
                text, finish, cost = await self._answer(question.text, temperature, seed, sample)
                asked, tokens = asked + bool(cost), tokens + cost
                if finish == "length":
                    most = self.settings.max_tokens
                    raise BadAnswer(f"the answer exceeds judge.max_tokens={most}")
                value = question.read(object_in(text))
            except NoAnswer as error:
                reason = str(error)
                break
            except BadAnswer as error:
                reason = f"{error}: {text}"
            else:
                return Reply(value, text, "", asked, tokens, time.monotonic() - begun)
        return Reply(None, text, printable(reason), asked, tokens, time.monotonic() - begun)

    async def _answer(
        self, text: str, temperature: float, seed: int, sample: Sample
    ) -> tuple[str, str, int]:
        """Text, reason of its end and tokens, 0 of a kept answer. NoAnswer: there is none."""
        body = {
            "model": self.settings.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": temperature,
            "seed": seed,
            "max_tokens": self.settings.max_tokens,
        }
        key = digest(json.dumps(body, sort_keys=True))
        if key not in self.kept.found and key in self._flying:  # the same text, asked right now
            await asyncio.wait({self._flying[key]})
        if key in self.kept.found:
            return *self.kept.found[key], 0
        asking = asyncio.ensure_future(self._fetched(body, int(key[:8], 16)))
        self._flying[key] = asking
        try:
            answer, finish, tokens = await asking
        finally:
            asking.cancel()
            self._flying.pop(key, None)
        self.kept.add(key, answer, finish, sample)
        return answer, finish, tokens

    async def _fetched(self, body: dict[str, Any], place: int) -> tuple[str, str, int]:
        async def address(attempt: int) -> str:
            urls = await self._addresses()
            return f"{urls[(place + attempt) % len(urls)].rstrip('/')}/chat/completions"

        return _read(*await self._service.post(address, json.dumps(body).encode()))

    async def _addresses(self) -> Sequence[str]:
        """All questions share one look at the addresses, which may have to start a server."""
        if self.starting is None:
            self._look = asyncio.ensure_future(asyncio.to_thread(self.urls))
        assert self._look is not None
        return await asyncio.shield(self._look)


def _read(url: str, content: bytes) -> tuple[str, str, int]:
    """Text, reason of its end and tokens of a chat completion. NoAnswer: it is none."""
    try:
        body = json.loads(content)
        choice = body["choices"][0]
        text, finish = choice["message"]["content"] or "", choice.get("finish_reason") or "stop"
        if not isinstance(text, str):
            raise TypeError("content is not text")
        usage = body.get("usage") or {}
        return text, str(finish), max(1, int(usage.get("total_tokens") or 1))
    except Exception as error:  # the answer is the server's: it may hold anything
        raise NoAnswer(f"{url}: no chat completion ({error!r}): {shown(content)}") from None


def object_in(text: str) -> Mapping[str, Any]:
    """The last JSON object of an answer, after its thinking. BadAnswer: there is none."""
    said = text.rpartition("</think>")[2]
    if "<think>" in said:
        raise BadAnswer("the thinking does not end")
    decoder, found, place = json.JSONDecoder(), None, said.find("{")
    while place >= 0:
        end = place + 1
        with contextlib.suppress(ValueError, RecursionError):
            found, end = decoder.raw_decode(said, place)
        place = said.find("{", end)
    if not isinstance(found, dict):
        raise BadAnswer("the answer has no JSON object")
    return found
