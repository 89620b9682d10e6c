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
from pathlib import Path

from megatron_stare.config import SGLangConfig, UserError
from megatron_stare.reporting import heartbeat
from megatron_stare.rollout.sglang.access import api_key
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.server import Server
from megatron_stare.rollout.sglang.weights import WeightMismatch, results
from megatron_stare.sync.delta.kept import KeptWeights
from megatron_stare.sync.delta.link import Mode, RelayFault, RelayLink
from megatron_stare.sync.delta.message import Table, packed
from megatron_stare.sync.delta.relay import EXTRA_FILES
from megatron_stare.sync.disk import update_from
from megatron_stare.sync.weight_sync import ChangedFraction, Transport, WeightBucket

log = logging.getLogger(__name__)

MOST_REFUSALS = 3  # of all the weights, in one sync
_PAUSE_SECONDS = 1.0  # before a relay that did not answer is asked again


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
        path, timeout = "/update_weights_from_disk", self.settings.sync_timeout
        answers, self._loading = [], True
        for server in servers:
            body = update_from(self._of_server[server.name].path, self._tag)
            answers.append(self.pool.run(server.client.update_weights(path, body, timeout)))
        results(answers, timeout)
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
