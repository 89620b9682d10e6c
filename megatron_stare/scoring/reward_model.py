"""A reward model reached by HTTP.

Request, one per response: POST scoring.remote_url with
    {"prompt": str, "response": str, "label": str, "metadata": {...}}
Answer, status 200: a bare JSON number, or
    {"reward": number, "verdict": "correct" | "wrong" | "unverifiable", "extracted": str}
of which only `reward` is required (null with verdict "unverifiable"); without a verdict, a positive
reward is correct. Network faults, 408, 429 and 5xx are tried again up to scoring.remote_attempts
times. A sample that then has no answer, or any other answer, is unverifiable with its reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from megatron_stare.config import ScoringConfig, UserError
from megatron_stare.event_loop import EventLoopThread
from megatron_stare.scoring.verdict import Sample, Verdict, as_verdict, printable, unverifiable

_RETRIED = (408, 429)
_MOST_BYTES = 1 << 20  # of an answer


class _RetryableError(Exception):
    """A fault of the network or the server that another attempt may not meet."""


class RemoteRewardModel:
    """Sends samples to scoring.remote_url, at most scoring.remote_concurrency at a time."""

    def __init__(self, scoring: ScoringConfig) -> None:
        if not scoring.remote_url.startswith(("http://", "https://")):
            raise UserError(
                f"scoring.remote_url={scoring.remote_url!r} is not an address; write "
                "http://host:port/path"
            )
        try:
            import tenacity

            from megatron_stare import http_client
        except ImportError as error:
            raise UserError(
                f"scoring.reward=remote needs {error.name}; install megatron-stare[sglang]"
            ) from None
        self._http = http_client
        self._url = scoring.remote_url
        self._timeout = scoring.remote_timeout
        self._shown_url = re.sub("//[^/@]*@", "//", scoring.remote_url)  # without a password
        self._places = asyncio.Semaphore(scoring.remote_concurrency)
        self._post = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(scoring.remote_attempts),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=5),
            retry=tenacity.retry_if_exception_type(_RetryableError),
            reraise=True,
        ).wraps(self._post_once)
        self._thread = EventLoopThread("reward-model")
        self._connections: Any = None  # opened in the thread

    def judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One Verdict per sample, in order. Safe to call from many threads."""
        return self._thread.run(self._judge_all(samples))

    def close(self) -> None:
        """End the requests and the connections."""
        if self._connections is not None and self._thread.running:
            self._thread.run(self._connections.close())
        self._thread.stop()

    async def _judge_all(self, samples: Sequence[Sample]) -> list[Verdict]:
        if self._connections is None:
            self._connections = self._http.session()
        return await asyncio.gather(*(self._judge(sample) for sample in samples))

    async def _judge(self, sample: Sample) -> Verdict:
        question = dataclasses.asdict(sample)
        del question["void"]  # a void sample is never sent
        del question["outcome"]  # another reward's
        try:
            async with self._places:
                answer = await self._post(json.dumps(question, default=str).encode())
        except (_RetryableError, ValueError) as fault:
            return unverifiable(f"{self._shown_url}: {fault}")
        try:
            return self._read(*answer)
        except Exception as error:  # the answer is the server's: it may hold anything
            return unverifiable(
                f"{self._shown_url}: the answer cannot be read ({type(error).__name__}): "
                f"{_shown(answer[1])}"
            )

    async def _post_once(self, body: bytes) -> tuple[int, bytes]:
        try:
            status, content = await self._http.post_json(
                self._connections, self._url, body, self._timeout, _MOST_BYTES
            )
        except self._http.FAULTS as error:
            raise _RetryableError(f"{type(error).__name__} {error}".strip()) from None
        if status in _RETRIED or status >= 500:
            raise _RetryableError(f"status {status}")
        return status, content

    def _read(self, status: int, content: bytes) -> Verdict:
        """The verdict that an answer spells out. It may raise anything over another answer."""
        if status != 200:
            return unverifiable(f"{self._shown_url}: status {status} {_shown(content)}")
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


def _shown(content: bytes) -> str:
    return printable(content[:1000].decode("utf-8", "replace"))


def _number(value: Any) -> int | float:
    """A JSON number. TypeError: true, "1" and everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"the reward is {type(value).__name__} and no number")
    return value
