"""Weights by way of relays at the sites of the servers: over the link goes what changed.

Rank 0 keeps the weights that it sent last, and compares each bucket with them. Relays that hold
those are sent deltas, the others everything. A relay that fails, or refuses a delta, is sent
everything from what is kept, once the stream has passed: the other ranks take no part in it. When a
relay holds all, its servers load it from their disk.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from megatron_stare.config import EngineError, SGLangConfig, UserError
from megatron_stare.http_client import FAULTS, request
from megatron_stare.reporting import heartbeat
from megatron_stare.rollout.sglang.access import KEY_VARIABLE, api_key
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.server import Server
from megatron_stare.rollout.sglang.weights import WeightMismatch
from megatron_stare.sync.delta.encoding import KeptWeights, Table, packed
from megatron_stare.sync.delta.relay import EXTRA_FILES
from megatron_stare.sync.disk import load_directories
from megatron_stare.sync.weight_sync import ChangedFraction, Transport, WeightBucket

log = logging.getLogger(__name__)

MOST_REFUSALS = 3  # of all the weights, in one sync
_PAUSE_SECONDS = 1.0  # before a relay that did not answer is asked again
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


class RelayTransport(Transport):
    """Deltas to a relay near the servers, or all weights: at first, every
    sglang.full_sync_interval syncs, after any fault, and where deltas would take longer.
    """

    session = False
    counts_changes = True

    def __init__(self, pool: SGLangPool, settings: SGLangConfig, model: str) -> None:
        """`model`: the directory with the other files of what servers hold."""
        self.pool, self.settings = pool, settings
        key, timeout = api_key(settings), settings.sync_timeout
        found = {url: RelayLink(url, key, timeout) for url in settings.relays}
        self.links = list(found.values())
        count, servers = len(settings.relays), pool.servers
        if count not in (1, len(servers)):
            raise UserError(
                f"sglang.relays has {count} addresses for {len(servers)} servers; give one for "
                "all of them, or one for each in their order"
            )
        self._of_server = {
            server.name: found[settings.relays[number % count]]
            for number, server in enumerate(servers)
        }
        self.fallbacks, self._loading = 0, False
        self._kept, self._fraction = KeptWeights(), ChangedFraction()
        self._files = _files(Path(model))
        self._bucket_bytes = settings.sync_bucket_mib << 20
        self._tag, self._base, self._number, self._inflight = "", "", 0, False
        self._seconds, self._delta_bytes = 0.0, 0
        self._sent, self._weight_bytes, self._deltas = 0, 0, 0  # of this version of the weights
        for link in self.links:
            _look_first(link)

    def send(self, bucket: WeightBucket, servers: Sequence[Server], tag: str | None) -> None:
        """Bring the relays a bucket; with the last one, have the servers load what they hold."""
        if not self._inflight:
            self._begin()
        modes = {link.mode for link in self.links}
        last = tag is not None
        if self._base != self._tag:  # else a server is late, and all of this is kept
            begun = time.perf_counter()
            delta = self._kept.replace(bucket.tensors, encoding="delta" in modes)
            self._seconds += time.perf_counter() - begun
            self._delta_bytes += sum(map(len, delta.blocks))
        if "delta" in modes:
            table = Table(self._tag, self._base, self._number, last, delta.entries)
            self._post("delta", packed(table, delta.blocks))
        if "full" in modes:
            self._post(
                "full", self._whole([name for name, _ in bucket.tensors], self._number, last)
            )
        self._number += 1
        if tag is not None:
            self._end(servers)

    def abandon(self, error: Exception) -> None:
        """The next stream starts again. Where a server could not load what its relay holds, or
        holds other weights afterwards, the relay is sent everything.
        """
        loading, self._inflight, self._loading = self._loading, False, False
        if loading or isinstance(error, WeightMismatch):
            for link in self.links:
                link.distrusted = True

    def metrics(self) -> dict[str, float]:
        """Metrics of the last version: bytes sent to all relays, and the bytes of all weights; the
        share of relays that took deltas; and the number of faults so far that made all weights go.
        """
        return self._fraction.metrics() | {
            "sync_bytes": float(self._sent),
            "sync_bytes_full": float(self._weight_bytes * len(self.links)),
            "sync_delta": self._deltas / len(self.links),
            "sync_delta_fallbacks": float(self.fallbacks),
        }

    def _begin(self) -> None:
        """Begin a stream of the weights that the pool expects."""
        if self._tag != self.pool.tag:
            self._tag, self._sent, self._deltas = self.pool.tag, 0, 0
        self._base, self._kept.tag = self._kept.tag, ""
        self._number, self._inflight = 0, True
        self._seconds, self._delta_bytes = 0.0, 0
        for link in self.links:
            link.start(self._mode(link))

    def _mode(self, link: RelayLink) -> Mode:
        """The kind of message that the relay receives this time."""
        try:
            link.look()
        except RelayFault as fault:
            return self._fallen_back(link, str(fault), "outdated")
        if link.distrusted:
            return self._fallen_back(link, "a server could not load it, or holds others", "full")
        if link.held == self._tag:
            return "held"
        if not link.held or link.held != self._base:
            if link.syncs == 0:
                return "full"
            return self._fallen_back(link, f"it holds {link.held or 'nothing'} now", "full")
        interval, rates = self.settings.full_sync_interval, link.rates
        if interval and link.syncs % interval == 0:
            return "full"
        measuring = link.syncs == 1 or (interval and link.syncs % interval == 1)
        if measuring or rates.delta_pays:
            return "delta"
        log.info(
            "%s is sent all weights: %.3g s for 1 GB, and %.3g s as deltas",
            *(link.url, 1e9 * rates.full_seconds, 1e9 * rates.delta_seconds),
        )
        return "full"

    def _fallen_back(self, link: RelayLink, why: str, mode: Mode) -> Mode:
        self.fallbacks += 1
        log.warning("%s is sent all weights: %s", link.url, why)
        return mode

    def _post(self, mode: Mode, content: bytes) -> None:
        for link in self.links:
            if link.mode == mode:
                link.send(content)

    def _whole(self, names: Sequence[str], number: int, last: bool) -> bytes:
        """A message with tensors as they are."""
        part = self._kept.whole(names)
        files = {} if number else self._files
        return packed(Table(self._tag, "", number, last, part.entries, files), part.blocks)

    def _end(self, servers: Sequence[Server]) -> None:
        """The stream has ended: make sure that the servers' relays hold it, then have it loaded."""
        kept = self._kept
        kept.tag, self._inflight, self._weight_bytes = self._tag, False, kept.nbytes
        self._fraction.end(self._tag, kept.changed, kept.elements)
        kept.changed = 0
        asked = {self._of_server[server.name].url for server in servers}
        encoded = any(link.mode == "delta" for link in self.links)
        for link in self.links:
            link.wait()
            if link.fault:
                self._fallen_back(link, link.fault, "outdated")
            self._note_rates(link, encoded)
            self._deltas += link.mode == "delta"
            if link.mode == "outdated" and link.url in asked:
                self._catch_up(link)
            self._sent += link.sent
            if link.mode in ("full", "delta"):
                link.end(kept.nbytes)
        directories = {server: self._of_server[server.name].path for server in servers}
        self._loading = True
        load_directories(self.pool, directories, self._tag, self.settings.sync_timeout)
        self._loading = False

    def _note_rates(self, link: RelayLink, encoded: bool) -> None:
        """Note the seconds per byte that the stream took on this side."""
        if self._base == self._tag:
            return
        seconds = self._seconds / self._kept.nbytes
        if encoded:
            link.rates.encode, link.rates.ratio = seconds, self._delta_bytes / self._kept.nbytes
        else:
            link.rates.compare = seconds

    def _catch_up(self, link: RelayLink) -> None:
        """Send a relay everything that is kept, as soon as it answers. UserError: it does not for
        sglang.sync_timeout, or refuses it again and again.
        """
        answered, refusals = time.monotonic(), 0
        while True:
            link.start("full")
            try:
                link.look()
                answered = time.monotonic()
                heartbeat.moved()
                for number, (names, last) in enumerate(self._kept.buckets(self._bucket_bytes)):
                    link.send(self._whole(names, number, last))
                    if link.mode == "outdated":
                        break
                link.wait()
                if not link.fault:
                    return
                fault, refusals = link.fault, refusals + 1
            except RelayFault as error:
                fault = str(error)
            silent = time.monotonic() - answered
            if silent > self.settings.sync_timeout or refusals == MOST_REFUSALS:
                raise UserError(
                    f"a relay of sglang.relays cannot be given the weights: {fault}; start it "
                    "again (python -m megatron_stare relay), or set sglang.sync_method=disk"
                )
            time.sleep(_PAUSE_SECONDS)


def _look_first(link: RelayLink) -> None:
    """Ask the relay what it holds. UserError: none answers there."""
    try:
        link.look()
    except RelayFault as fault:
        raise UserError(
            f"sglang.relays has {link.url}, where no relay answers ({fault}); start one next to "
            "its servers: python -m megatron_stare relay DIRECTORY --host HOST --port PORT"
        ) from None


def _files(checkpoint: Path) -> dict[str, str]:
    """A model's other files, in base64."""
    return {
        name: base64.b64encode((checkpoint / name).read_bytes()).decode()
        for name in EXTRA_FILES
        if (checkpoint / name).is_file()
    }


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="relay")
