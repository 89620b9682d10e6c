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
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron_stare.config import ScoringConfig, UserError
from megatron_stare.scoring.verdict import Sample, Verdict, as_verdict, printable, unverifiable

_RETRIED = (408, 429)
_MOST_BYTES = 1 << 20  # of an answer


@dataclasses.dataclass(frozen=True)
class _Answer:
    status: int
    content: bytes

    @property
    def text(self) -> str:
        return self.content[:1000].decode("utf-8", "replace")


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
        except _RetryableError as fault:
            return unverifiable(f"{self._shown_url}: {fault}")
        try:
            return self._read(answer)
        except Exception as error:  # the answer is the server's: it may hold anything
            return unverifiable(
                f"{self._shown_url}: the answer cannot be read ({type(error).__name__}): "
                f"{printable(answer.text)}"
            )

    def _post_once(self, body: str) -> _Answer:
        """The whole answer. httpx bounds the wait for each piece; the answer's end and length are
        bounded here, for a server may send without an end.
        """
        end, pieces, length = time.monotonic() + self._timeout, list[bytes](), 0
        try:
            with self._client.stream(
                "POST", self._url, content=body, headers={"Content-Type": "application/json"}
            ) as answer:
                if answer.status_code in _RETRIED or answer.status_code >= 500:
                    raise _RetryableError(f"status {answer.status_code}")
                for piece in answer.iter_bytes():
                    pieces.append(piece)
                    length += len(piece)
                    if length > _MOST_BYTES:
                        break
                    if time.monotonic() > end:
                        raise _RetryableError(f"no whole answer after {self._timeout:g} s")
                return _Answer(answer.status_code, b"".join(pieces)[: _MOST_BYTES + 1])
        except self._httpx.HTTPError as error:
            raise _RetryableError(f"{type(error).__name__} {error}".strip()) from None

    def _read(self, answer: _Answer) -> Verdict:
        """The verdict that an answer spells out. It may raise anything over another answer."""
        if answer.status != 200:
            status = f"status {answer.status} {printable(answer.text)}"
            return unverifiable(f"{self._shown_url}: {status}")
        if len(answer.content) > _MOST_BYTES:
            return unverifiable(f"{self._shown_url}: an answer of more than {_MOST_BYTES} bytes")
        body = json.loads(answer.content)
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
