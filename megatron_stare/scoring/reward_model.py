"""A reward model behind HTTP.

Request, one per response: POST scoring.remote_url with
    {"prompt": str, "response": str, "label": str, "metadata": {...}}
Answer, status 200: a bare JSON number, or
    {"reward": number, "verdict": "correct" | "wrong" | "unverifiable", "extracted": str}
of which only `reward` is required (null with verdict "unverifiable"); without a verdict, a positive
reward is correct. Network faults, 408, 429 and 5xx are tried again up to scoring.remote_attempts
times; what then has no answer, and any other answer, is unverifiable with its reason.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron_stare.config import ScoringConfig, UserError
from megatron_stare.scoring.verdict import Sample, Verdict, as_verdict, unverifiable

_RETRIED = (408, 429)


class _RetryableError(Exception):
    pass


class RemoteRewardModel:
    """Asks scoring.remote_url, with at most scoring.remote_concurrency requests in flight."""

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
        self._httpx, self._url = httpx, scoring.remote_url
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
        try:
            asked = dataclasses.asdict(sample)
            del asked["void"]  # empty: no one is asked about one that is void
            body = json.dumps(asked, default=str)
            return _read(self._post(body))
        except _RetryableError as fault:
            return unverifiable(f"{self._url}: {fault}")

    def _post_once(self, body: str) -> Any:
        try:
            answer = self._client.post(
                self._url, content=body, headers={"Content-Type": "application/json"}
            )
        except self._httpx.HTTPError as error:
            raise _RetryableError(f"{type(error).__name__} {error}".strip()) from None
        if answer.status_code in _RETRIED or answer.status_code >= 500:
            raise _RetryableError(f"status {answer.status_code}")
        return answer


def _read(answer: Any) -> Verdict:
    if answer.status_code != 200:
        return unverifiable(f"{answer.url}: status {answer.status_code} {answer.text[:200]!r}")
    try:
        body = answer.json()
    except ValueError:
        return unverifiable(f"{answer.url}: the answer is no JSON: {answer.text[:200]!r}")
    if not isinstance(body, dict):
        return as_verdict(body)
    extracted = body.get("extracted")
    extracted = None if extracted is None else str(extracted)
    if body.get("verdict") == "unverifiable":
        return unverifiable(str(body.get("reason", "the reward model says so")), extracted)
    if "reward" not in body:
        return unverifiable(f"{answer.url}: the answer has no 'reward': {answer.text[:200]!r}")
    found = dataclasses.replace(as_verdict(body["reward"]), extracted=extracted)
    if found.value is not None and body.get("verdict") in ("correct", "wrong"):
        return dataclasses.replace(found, verdict=body["verdict"])
    return found
