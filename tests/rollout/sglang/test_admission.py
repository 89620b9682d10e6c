"""Which server a request goes to: where its prefix is in the cache, while that is not too busy."""

from __future__ import annotations

import asyncio
from pathlib import Path

from megatron_stare.rollout.engine import Request
from tests.rollout.sglang.idle import idle_pool, tiny_model


def test_rollouts_of_a_prompt_go_to_one_server_while_none_is_far_busier(
    tmp_path: Path,
):
    """Each prompt has a server of its own, the same in every process; prompts are spread out; and
    no server has more than 1.25 times the mean and 8.
    """
    model = tiny_model(tmp_path / "model")
    with idle_pool(model, tmp_path, max_concurrency=1000) as pool:

        async def acquire(prompt: int, count: int) -> list[str]:
            asked = [Request((1,), (0, 0, prompt, number)) for number in range(count)]
            found = [await pool.admission.acquire(request) for request in asked]
            return [server.name[-1] for server in found if server]

        homes = []
        for prompt in range(60):
            for server in pool.servers:
                server.in_flight = 10
            (home,) = set(asyncio.run(acquire(prompt, 8)))
            homes.append(home)
        assert all(12 <= homes.count(name) <= 28 for name in "123")
        for server in pool.servers:
            server.in_flight = 0
        asyncio.run(acquire(0, 300))
        loads = sorted(server.in_flight for server in pool.servers)
        assert sum(loads) == 300 and loads[-1] == 133, "1.25 x 100 + 8"
    with idle_pool(model, tmp_path) as pool:
        assert asyncio.run(acquire(7, 1)) == [homes[7]]


def test_waiting_requests_are_served_in_the_order_in_which_their_prompts_were_drawn(
    tmp_path: Path,
):
    """The next turn of an early prompt comes before later prompts that waited longer, evaluation
    before training; a request that is cancelled after it was chosen leaves its turn to another one.
    """
    with idle_pool(tiny_model(tmp_path / "model"), tmp_path, max_concurrency=1) as pool:
        admission, served = pool.admission, list[tuple[int, ...]]()

        async def sample(seed: tuple[int, ...]) -> None:
            server = await admission.acquire(Request((1,), seed))
            assert server is not None
            served.append(seed)
            await asyncio.sleep(0)
            await admission.release(server)

        async def play() -> None:
            busy = [await admission.acquire(Request((1,), (0, 0, 0, each))) for each in range(3)]
            asked = [(0, 0, 9, 1), (0, 0, 4, 0), (0, 0, 9, 0), (0, 1, 5, 1), (0, 1, 5, 0)]
            waiting = [asyncio.create_task(sample(seed)) for seed in asked]
            await asyncio.sleep(0)
            assert not served
            assert busy[0] is not None
            await admission.release(busy[0])
            waiting[4].cancel()  # it was chosen a moment ago
            await asyncio.wait_for(asyncio.wait(waiting), 5)

        asyncio.run(play())
        assert served == [(0, 1, 5, 1), (0, 0, 4, 0), (0, 0, 9, 0), (0, 0, 9, 1)]
