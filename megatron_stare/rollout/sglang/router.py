"""An sglang-router in front of the servers:
it hands out generation, and knows which servers its workers are.

It passes on neither weights nor pause, abort, continue and the like, so that everything but
generation goes to the workers themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import httpx

from megatron_stare.config import SGLangConfig, UserError
from megatron_stare.rollout.sglang.access import api_key
from megatron_stare.rollout.sglang.client import QUICK_SECONDS, ServerFault
from megatron_stare.rollout.sglang.server import Server


def worker_urls(router_url: str, key: str = "") -> list[str]:
    """The addresses of the router's workers, in order.
    UserError where it has none, or does not answer.
    """
    try:
        answer = httpx.get(
            f"{router_url.rstrip('/')}/workers",
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=QUICK_SECONDS,
            trust_env=False,
        )
        answer.raise_for_status()
        urls = sorted(str(worker["url"]) for worker in answer.json()["workers"])
    except httpx.HTTPError as error:
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
