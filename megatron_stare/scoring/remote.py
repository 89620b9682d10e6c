"""Servers that judge, reached by HTTP: requests to one, and the reward `remote`.

Request of the reward, one per response: POST scoring.remote_url with
    {"prompt": str, "response": str, "label": str, "metadata": {...}}
Answer, status 200: a bare JSON number, or
    {"reward": number, "verdict": "correct" | "wrong" | "unverifiable", "extracted": str}
of which only `reward` is required (null with verdict "unverifiable"); without a verdict, a positive
reward is correct. A sample without an answer, or with any other answer, is unverifiable with its
reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megatron_stare.config import ScoringConfig, UserError
from megatron_stare.event_loop import EventLoopThread
from megatron_stare.scoring.verdict import Sample, Verdict, as_verdict, printable, unverifiable

_RETRIED = (408, 429)
_MOST_BYTES = 1 << 20  # of a reward model's answer
_SENT = ("prompt", "response", "label", "metadata")  # of a sample


class NoAnswer(Exception):
    """A server gives no answer, for this reason."""


class _NoAnswerYet(NoAnswer):
    """Another attempt may be answered."""


class Service:
    """Posts JSON, `concurrency` requests at a time, in one event loop. Network faults, 408, 429 and
    5xx are tried again, up to `attempts` times in all.
    """

    def __init__(
        self,
        reward: str,
        *,
        attempts: int,
        concurrency: int,
        timeout: float,
        most_bytes: int,
        key: str = "",
    ) -> None:
        try:
            import tenacity

            from megatron_stare import http_client
        except ImportError as error:
            raise UserError(
                f"scoring.reward={reward} needs {error.name}; install megatron-stare[agents]"
            ) from None
        self._http, self._key = http_client, key
        self._timeout, self._most_bytes = timeout, most_bytes
        self._retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(attempts),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=5),
            retry=tenacity.retry_if_exception_type(_NoAnswerYet),
            reraise=True,
        )
        self._places = asyncio.Semaphore(concurrency)
        self._connections: Any = None  # opened in the loop

    async def post(
        self, address: Callable[[int], Awaitable[str]], body: bytes
    ) -> tuple[str, bytes]:
        """The address for messages, and the content of the answer. `address`: that of an attempt,
        by its number. NoAnswer: there is none.
        """
        if self._connections is None:
            self._connections = self._http.session(self._http.authorization(self._key))
        async for attempt in self._retrying.copy():
            with attempt:
                url = await address(attempt.retry_state.attempt_number - 1)
                return await self._post_once(url, body)
        raise AssertionError("the last attempt returns or raises")

    async def _post_once(self, url: str, body: bytes) -> tuple[str, bytes]:
        shown_url = re.sub("//[^/@]*@", "//", url)  # without a password
        try:
            async with self._places:
                status, content = await self._http.post_json(
                    self._connections, url, body, self._timeout, self._most_bytes
                )
        except (*self._http.FAULTS, ValueError) as error:
            reason = f"{shown_url}: {type(error).__name__} {error}".strip()
            raise _NoAnswerYet(reason) from None
        if status == 200:
            return shown_url, content
        kind = _NoAnswerYet if status in _RETRIED or status >= 500 else NoAnswer
        raise kind(f"{shown_url}: status {status} {shown(content)}")

    async def close(self) -> None:
        """End the connections."""
        if self._connections is not None:
            await self._connections.close()


def shown(content: bytes) -> str:
    """An answer for messages."""
    return printable(content[:1000].decode("utf-8", "replace"))


class RemoteRewardModel:
    """Sends samples to scoring.remote_url."""

    def __init__(self, scoring: ScoringConfig) -> None:
        self._url = scoring.remote_url
        if not self._url.startswith(("http://", "https://")):
            raise UserError(
                f"scoring.remote_url={self._url!r} is not an address; write http://host:port/path"
            )
        self._service = Service(
            "remote",
            attempts=scoring.remote_attempts,
            concurrency=scoring.remote_concurrency,
            timeout=scoring.remote_timeout,
            most_bytes=_MOST_BYTES,
        )
        self._thread = EventLoopThread("reward-model")

    def judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One Verdict per sample, in order. Safe to call from many threads."""
        return self._thread.run(self._judge_all(samples))

    def close(self) -> None:
        """End the requests and the connections."""
        if self._thread.running:
            self._thread.run(self._service.close())
        self._thread.stop()

    async def _judge_all(self, samples: Sequence[Sample]) -> list[Verdict]:
        return await asyncio.gather(*(self._judge(sample) for sample in samples))

    async def _judge(self, sample: Sample) -> Verdict:
        question = {name: getattr(sample, name) for name in _SENT}
        try:
            body = json.dumps(question, default=str).encode()
            url, content = await self._service.post(self._address, body)
        except (NoAnswer, ValueError) as fault:
            return unverifiable(str(fault))
        try:
            return _verdict_in(content)
        except Exception as error:  # the answer is the server's: it may hold anything
            return unverifiable(
                f"{url}: the answer cannot be read ({type(error).__name__}): {shown(content)}"
            )

    async def _address(self, attempt: int) -> str:
        return self._url


def _verdict_in(content: bytes) -> Verdict:
    """The verdict that an answer spells out. It may raise anything over another answer."""
    body = json.loads(content)
    if not isinstance(body, dict):
        return as_verdict(_number(body))
    if body.get("verdict") not in (None, "correct", "wrong", "unverifiable"):
        raise ValueError("a verdict is correct, wrong or unverifiable")
    extracted = body.get("extracted")
    extracted = None if extracted is None else str(extracted)
    if body.get("verdict") == "unverifiable":
        reason = str(body.get("reason", "the reward model gives no reason"))
        return unverifiable(printable(reason), extracted)
    found = dataclasses.replace(as_verdict(_number(body["reward"])), extracted=extracted)
    if found.value is not None and body.get("verdict") in ("correct", "wrong"):
        return dataclasses.replace(found, verdict=body["verdict"])
    return found


def _number(value: Any) -> int | float:
    """A JSON number. TypeError: true, "1" and everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"the reward is {type(value).__name__} and no number")
    return value
