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

import dataclasses
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron_stare.config import ScoringConfig, UserError
from megatron_stare.scoring.verdict import Sample, Verdict, as_verdict, printable, unverifiable
from megatron_stare.system import whole_answer

_RETRIED = (408, 429)
_MOST_BYTES = 1 << 20  # of an answer


class _RetryableError(Exception):
    """A fault of the network or the server that another attempt may not meet."""


class RemoteRewardModel:
    """Sends samples to scoring.remote_url, at most scoring.remote_concurrency at a time."""

    def __init__(self, scoring: ScoringConfig) -> None:
        if not scoring.remote_url.startswith(("http://", "https://")):
            raise UserError(
                f"scoring.remote_url={scoring.remote_url!r} is no address; write "
                "http://host:port/path"
            )
        try:
            import httpx
            import tenacity
        except ImportError as error:
            raise UserError(
                f"scoring.reward=remote needs {error.name}; install megatron-stare[sglang]"
            ) from None
        self._httpx = httpx
        self._url = scoring.remote_url
        self._timeout = scoring.remote_timeout
        self._shown_url = re.sub("//[^/@]*@", "//", scoring.remote_url)  # without a password
        self._client = httpx.Client(
            timeout=scoring.remote_timeout,
            trust_env=False,
            limits=httpx.Limits(max_connections=scoring.remote_concurrency),
        )
        self._post = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(scoring.remote_attempts),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=5),
            retry=tenacity.retry_if_exception_type(_RetryableError),
            reraise=True,
        ).wraps(self._post_once)
        self._threads = ThreadPoolExecutor(
            scoring.remote_concurrency, thread_name_prefix="reward-model"
        )

    def judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One Verdict per sample, in order."""
        return list(self._threads.map(self._judge, samples))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._client.close()

    def _judge(self, sample: Sample) -> Verdict:
        question = dataclasses.asdict(sample)
        del question["void"]  # a void sample is never sent
        del question["outcome"]  # another reward's
        try:
            answer = self._post(json.dumps(question, default=str))
        except (_RetryableError, ValueError) as fault:
            return unverifiable(f"{self._shown_url}: {fault}")
        try:
            return self._read(*answer)
        except Exception as error:  # the answer is the server's: it may hold anything
            return unverifiable(
                f"{self._shown_url}: the answer cannot be read ({type(error).__name__}): "
                f"{_shown(answer[1])}"
            )

    def _post_once(self, body: str) -> tuple[int, bytes]:
        try:
            status, content = whole_answer(
                self._client, self._url, body, self._timeout, _MOST_BYTES
            )
        except (self._httpx.HTTPError, TimeoutError) as error:
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
