"""The trainer's side of one relay: what it holds, what it is sent, how quick the way there is."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from megatron_stare.config import EngineError, UserError
from megatron_stare.http_client import FAULTS, request
from megatron_stare.rollout.sglang.access import KEY_VARIABLE

_QUICK_SECONDS = 30.0
_GRACE_SECONDS = 30.0  # after sglang.sync_timeout

# In one sync: it has these weights already | it is sent what changed | everything | it failed, and
# must be sent everything.
Mode = Literal["held", "delta", "full", "outdated"]


class RelayFault(EngineError):
    """A relay did not answer, or refused what it was sent."""


@dataclass
class Rates:
    """Seconds per byte of weights, but for `wire`; 0 where nothing was measured yet.

    compare, encode: what it takes here to compare with the last weights, and to make deltas too.
    whole, changed: what a relay needs for weights that come whole, or as deltas. wire: seconds per
    byte that is sent. ratio: bytes of deltas per byte of weights.
    """

    compare: float = 0.0
    encode: float = 0.0
    ratio: float = 0.0
    wire: float = 0.0
    whole: float = 0.0
    changed: float = 0.0

    @property
    def full_seconds(self) -> float:
        """Seconds per byte of weights of a full sync: a bucket is sent while the next one is
        compared.
        """
        return max(self.compare, self.wire + self.whole)

    @property
    def delta_seconds(self) -> float:
        """Seconds per byte of weights of a sync by deltas."""
        return max(self.encode, self.wire * self.ratio + self.changed)

    @property
    def delta_pays(self) -> bool:
        """Whether deltas take less time than all weights."""
        return self.delta_seconds < self.full_seconds


class RelayLink:
    """One relay. Messages are sent from a thread of its own, one at a time.

    `held`: the update that it says it has; `path`: where its servers find the weights; `syncs`: how
    many it took; `sent`: bytes in the current one.
    """

    def __init__(self, url: str, key: str, timeout: float) -> None:
        self.url = url.rstrip("/")
        self.held, self.path = "", ""
        self.mode: Mode = "outdated"
        self.syncs, self.sent = 0, 0
        self.fault = ""
        self.distrusted = False  # a server failed to load its weights, or holds others
        self.rates = Rates()
        self._key, self._timeout = key, timeout
        self._thread = _thread()
        self._posting: Future[None] | None = None
        self._on_the_way, self._there = 0.0, 0.0  # seconds, in the current sync

    def look(self) -> None:
        """Ask the relay what it holds. RelayFault: it does not answer. UserError: it has another
        key.
        """
        self._ask("GET", "/state", timeout=_QUICK_SECONDS)

    def start(self, mode: Mode) -> None:
        """A sync, of which nothing was sent yet."""
        self.wait()
        self.mode, self.fault = mode, ""
        self.sent, self._on_the_way, self._there = 0, 0.0, 0.0

    def send(self, content: bytes) -> None:
        """Send a message once the one before it is taken; after a failure nothing more is sent."""
        self.wait()
        if self.mode != "outdated":
            self._posting = self._thread.submit(self._post, content)

    def wait(self) -> None:
        """Wait for the message under way. Where it failed the relay is outdated, and `fault` says
        why. sglang.sync_timeout bounds the request; a thread that does not return soon after it is
        abandoned.
        """
        posting, self._posting = self._posting, None
        if posting is None:
            return
        patience = self._timeout + _GRACE_SECONDS
        try:
            posting.result(patience)
        except RelayFault as fault:
            self.mode, self.fault = "outdated", str(fault)
        except TimeoutError:
            self.mode = "outdated"
            self.fault = (
                f"{self.url}: the relay did not take a message of weights in {patience:g} s"
            )
            self._thread.shutdown(wait=False)
            self._thread = _thread()

    def end(self, weight_bytes: int) -> None:
        """All of a sync was taken: note how long it took, for weights of `weight_bytes`."""
        self.syncs += 1
        self.distrusted = False
        if self.mode == "full":
            self.rates.wire = self._on_the_way / self.sent
            self.rates.whole = self._there / weight_bytes
        elif self.mode == "delta":
            self.rates.changed = self._there / weight_bytes

    def _post(self, content: bytes) -> None:
        begun = time.perf_counter()
        there = self._ask("POST", "/update", content)
        self._there += there
        self._on_the_way += max(0.0, time.perf_counter() - begun - there)
        self.sent += len(content)

    def _ask(
        self, method: str, path: str, content: bytes | None = None, timeout: float | None = None
    ) -> float:
        """Note what the relay says it holds, and return the seconds that it worked."""
        self.held = ""
        try:
            patience = timeout or self._timeout
            status, said = request(method, f"{self.url}{path}", self._key, content, patience)
            answer: dict[str, Any] = orjson.loads(said)
            if status == 401:
                raise UserError(
                    f"{self.url} (sglang.relays) has another key; set sglang.api_key or "
                    f"{KEY_VARIABLE} to the one that it was started with"
                )
            if status == 507:
                raise UserError(
                    f"{self.url} (sglang.relays) cannot write weights: {answer['error']}; make "
                    "room in its directory"
                )
            if status != 200:
                raise RelayFault(f"{self.url}: {answer['error']}")
            self.held, self.path = str(answer["held"]), str(answer["path"])
            return float(answer.get("seconds", 0.0))
        except FAULTS as error:
            raise RelayFault(f"{self.url}: {type(error).__name__} {error}".strip()) from None
        except (ValueError, KeyError, TypeError) as error:
            raise RelayFault(f"{self.url}: no answer of a relay ({error!r})") from None


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="relay")
