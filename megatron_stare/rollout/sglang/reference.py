"""SGLang servers of a frozen model, which only read: log-probs of tokens that others sampled."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import numpy
import tenacity

from megatron_stare.config import SGLangConfig, UserError
from megatron_stare.event_loop import EventLoopThread
from megatron_stare.rollout.engine import FaultyAnswer
from megatron_stare.rollout.sglang.access import api_key
from megatron_stare.rollout.sglang.client import ServerFault, SGLangClient


def check_servers(urls: Sequence[str], settings: SGLangConfig, tokens: int) -> None:
    """UserError: a server of sglang.reference_urls does not answer, or reads fewer than `tokens`
    tokens at a time.
    """

    async def look() -> None:
        async with _clients(urls, settings) as clients:
            for client in clients:
                try:
                    limit = (await client.info()).prompt_length
                except ServerFault as fault:
                    said = f"sglang.reference_urls: {fault}; start the server"
                    raise UserError(said) from fault
                if limit < tokens:
                    raise UserError(
                        f"sglang.reference_urls: {client.url} reads {limit} tokens, and the run's "
                        f"longest sequence has {tokens}; start it with a larger --context-length "
                        "and more memory, or lower rollout.rollout_max_response_len"
                    )

    _run(look())


def read_logprobs(
    urls: Sequence[str], settings: SGLangConfig, vocab_size: int, sequences: Sequence[numpy.ndarray]
) -> list[numpy.ndarray]:
    """The log-probs [S - 1, nats] of all ids but the first, for each sequence of S ids, at
    temperature 1. `vocab_size` is that of the servers' model.

    A sequence is sent to the server that reads the fewest; after a fault it is sent again, to
    another one if there is one, sglang.max_attempts times. ServerFault, FaultyAnswer: in vain.
    """

    async def read() -> list[numpy.ndarray]:
        async with _clients(urls, settings) as clients:
            reading = Counter[SGLangClient]()
            room = asyncio.Semaphore(settings.max_concurrency * len(clients))
            every = [_one(ids, clients, reading, room, settings, vocab_size) for ids in sequences]
            return await asyncio.gather(*every)

    return _run(read())


async def _one(
    ids: numpy.ndarray,
    clients: Sequence[SGLangClient],
    reading: Counter[SGLangClient],
    room: asyncio.Semaphore,
    settings: SGLangConfig,
    vocab_size: int,
) -> numpy.ndarray:
    client: SGLangClient | None = None
    async for attempt in tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(settings.max_attempts),
        wait=tenacity.wait_random_exponential(multiplier=0.25, max=10),
        retry=tenacity.retry_if_exception_type((ServerFault, FaultyAnswer)),
        reraise=True,
    ):
        with attempt:
            async with room:
                others = [one for one in clients if one is not client] or clients
                client = min(others, key=reading.__getitem__)
                reading[client] += 1
                try:
                    read = await client.prefill(ids, vocab_size, settings.queue_timeout)
                    return read.logprobs
                finally:
                    reading[client] -= 1
    raise AssertionError("tenacity returns or raises")


@contextlib.asynccontextmanager
async def _clients(
    urls: Sequence[str], settings: SGLangConfig
) -> AsyncIterator[list[SGLangClient]]:
    key = api_key(settings)
    async with contextlib.AsyncExitStack() as ending:
        clients = [SGLangClient(url, key) for url in urls]
        for client in clients:
            ending.push_async_callback(client.close)
        yield clients


def _run[T](work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in its own thread: the caller may have an event loop, as in a notebook."""
    thread = EventLoopThread("reference-servers")
    try:
        return thread.run(work)
    finally:
        thread.stop()
