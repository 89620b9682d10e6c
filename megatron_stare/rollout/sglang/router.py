"""Which server gets a request: our own choice, or that of an sglang-router in front of them.

A router hands out generation, and knows which servers its workers are.

It passes on neither weights nor pause, abort, continue and the like, so that everything but
generation goes to the workers themselves.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence

import orjson

from megatron_stare.config import SGLangConfig, UserError
from megatron_stare.rollout.engine import Request
from megatron_stare.rollout.sglang.access import api_key
from megatron_stare.rollout.sglang.client import QUICK_SECONDS, ServerFault
from megatron_stare.rollout.sglang.http import FAULTS, request
from megatron_stare.rollout.sglang.server import Server

# A server is given what shares a prefix with its other requests while it has at most so many times
# the mean of what all have in flight, and so many more.
SLACK, ROOM = 1.25, 8
_KEPT_ORDERS = 4096


def prefix_of(request: Request) -> tuple[int, ...]:
    """The name of the prompt: all of the seed but the number of the rollout."""
    return request.seed[:-1]


class Affinity:
    """Rollouts of one prompt and turns of one episode go where their prefix is in the cache.

    Rendezvous hashing with bounded loads (arXiv 1608.01350): each prompt has an order of the
    servers of its own, the same in every process. The first of it that is not too busy is taken.
    """

    def __init__(self) -> None:
        self._orders: dict[tuple[int, ...], dict[str, bytes]] = {}

    def choose(self, free: Sequence[Server], prefix: tuple[int, ...]) -> Server:
        """One of these."""
        mean = (1 + sum(server.in_flight for server in free)) / len(free)
        ready = [server for server in free if server.in_flight < SLACK * mean + ROOM]
        return min(ready, key=lambda server: self._place(server.name, prefix))

    def _place(self, name: str, prefix: tuple[int, ...]) -> bytes:
        if len(self._orders) >= _KEPT_ORDERS:
            self._orders.clear()
        order = self._orders.setdefault(prefix, {})
        if name not in order:
            order[name] = hashlib.blake2b(f"{prefix} {name}".encode()).digest()
        return order[name]


def worker_urls(router_url: str, key: str = "") -> list[str]:
    """The addresses of the router's workers, in order.
    UserError where it has none, or does not answer.
    """
    try:
        url = f"{router_url.rstrip('/')}/workers"
        status, content = request("GET", url, key, timeout=QUICK_SECONDS)
        if status != 200:
            raise ConnectionError(f"status {status}")
        urls = sorted(str(worker["url"]) for worker in orjson.loads(content)["workers"])
    except FAULTS as error:
        raise UserError(
            f"sglang.router_url={router_url} does not answer GET /workers ({error}); start the "
            "router, or correct it"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"sglang.router_url={router_url} lists no workers; give them in sglang.urls"
        ) from None
    if not urls:
        raise UserError(
            f"sglang.router_url={router_url} has no worker; start it with --worker-urls, or wait "
            "for its workers"
        )
    return urls


def attached_urls(settings: SGLangConfig) -> list[str]:
    """The servers that the run attaches to: those given, else the router's workers;
    none where it launches its own.
    """
    if settings.urls or not settings.router_url:
        return settings.urls
    return worker_urls(settings.router_url, api_key(settings))


async def with_other_weights(servers: Sequence[Server], expected: str) -> list[Server]:
    """Those that themselves say that their weights are others than `expected`:
    a router does not tell who answered.
    """
    found = []
    for server in servers:
        with contextlib.suppress(ServerFault):  # whoever does not answer is looked at elsewhere
            if (await server.client.info()).weight_version != expected:
                found.append(server)
    return found
