"""Questions to an OpenAI-compatible server: tried again, bounded in time, and kept.

An answer is kept by the hash of all that was sent (server and key apart), in memory and in a file
of this process in judge/ of the run's directory, one JSON object a line:

    {"key", "answer", "finish", "prompt", "response"}     the last two shortened

A resumed run, and an evaluation of the same responses, read it from there. An answer must hold one
JSON object after the thinking; the last object counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_stare.config import JudgeConfig, UserError
from megatron_stare.scoring.verdict import Sample, printable
from megatron_stare.system import digest

_RETRIED = (408, 429)
_SECOND_TEMPERATURE = 0.7  # of the second try: at temperature 0 it would repeat the first one
_MOST_WAIT = 5.0  # seconds between two attempts
_MOST_BYTES = 16 << 20  # of an answer
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


class NoAnswer(Exception):
    """The server gives no answer, for this reason."""


class Kept:
    """Answers by key, on disk too if there is a directory."""

    def __init__(self, directory: Path | None) -> None:
        self._file: IO[str] | None = None
        self._path: Path | None = None
        self.found: dict[str, tuple[str, str]] = {}
        if directory is None:
            return
        for file in sorted(directory.glob("*.jsonl")):
            self._read(file)
        self._path = directory / f"{socket.gethostname()}-{os.getpid()}.jsonl"

    def add(self, key: str, answer: str, finish: str, sample: Sample) -> None:
        """Keep an answer; it reaches the operating system at once."""
        self.found[key] = answer, finish
        if self._path is None:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        shown = {"prompt": sample.prompt[:_SHOWN], "response": sample.response[-_SHOWN:]}
        line = {"key": key, "answer": answer, "finish": finish, **shown}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _read(self, file: Path) -> None:
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                found = json.loads(line)
                self.found[found["key"]] = found["answer"], found["finish"]
            except (ValueError, KeyError, TypeError):
                continue  # a killed process wrote half of it


class JudgeClient:
    """Asks the servers that `urls` names at the time of asking. Its methods run in one loop."""

    def __init__(
        self, settings: JudgeConfig, urls: Callable[[], Sequence[str]], directory: Path | None
    ) -> None:
        try:
            from megatron_stare import http_client
        except ImportError:
            raise UserError(
                "scoring.reward=judge needs aiohttp; install megatron-stare[agents]"
            ) from None
        self._http = http_client
        self.settings, self.urls, self.kept = settings, urls, Kept(directory)
        self._places = asyncio.Semaphore(settings.concurrency)
        self._connections: Any = None  # opened in the loop that asks
        self._flying: dict[str, asyncio.Future[Any]] = {}

    async def close(self) -> None:
        """End the connections."""
        if self._connections is not None:
            await self._connections.close()
        self.kept.close()

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
        if self._connections is None:
            key = os.environ.get(self.settings.key_variable, "")
            self._connections = self._http.session(self._http.authorization(key))
        posted, reason = json.dumps(body).encode(), ""
        for attempt in range(self.settings.attempts):
            if attempt:
                await asyncio.sleep(random.uniform(0, min(_MOST_WAIT, 0.2 * 2**attempt)))
            urls = await asyncio.to_thread(self.urls)  # it may have to start one
            url = urls[(place + attempt) % len(urls)].rstrip("/")
            try:
                async with self._places:
                    status, answer = await self._http.post_json(
                        self._connections,
                        f"{url}/chat/completions",
                        posted,
                        self.settings.timeout,
                        _MOST_BYTES,
                    )
            except (*self._http.FAULTS, ValueError) as error:
                reason = f"{url}: {type(error).__name__} {error}".strip()
                continue
            content = answer.decode(errors="replace")
            if status in _RETRIED or status >= 500:
                reason = f"{url}: status {status}"
                continue
            if status != 200:
                raise NoAnswer(f"{url}: status {status} {printable(content)}")
            return _read(url, content)
        raise NoAnswer(reason)


def _read(url: str, content: str) -> tuple[str, str, int]:
    try:
        body = json.loads(content)
        choice = body["choices"][0]
        text, finish = choice["message"]["content"] or "", choice.get("finish_reason") or "stop"
        if not isinstance(text, str):
            raise TypeError("content is not text")
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise NoAnswer(f"{url}: no chat completion ({error!r}): {printable(content)}") from None
    usage = body.get("usage") or {}
    return text, str(finish), max(1, int(usage.get("total_tokens") or 1))


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
