"""An event loop in a thread of its own: results, cancellation, and an end that is bounded."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import pytest

from megatron_stare.event_loop import EventLoopThread


@pytest.fixture
def thread():
    found = EventLoopThread("tested")
    yield found
    found.stop()


async def after(seconds: float, result: int) -> int:
    await asyncio.sleep(seconds)
    return result


async def fail() -> None:
    raise ValueError("as it does")


def test_results_and_errors_reach_the_caller(thread: EventLoopThread) -> None:
    assert thread.run(after(0.0, 3)) == 3
    barrier = asyncio.Barrier(20)  # passed when all twenty run at the same time
    many = [thread.submit(barrier.wait()) for _ in range(20)]
    assert {each.result(60) for each in many} == set(range(20))
    with pytest.raises(ValueError, match="as it does"):
        thread.run(fail())


def test_closing_cancels_running_and_later_work(thread: EventLoopThread) -> None:
    cleaned: list[int] = []

    async def waiting() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            cleaned.append(1)

    running = thread.submit(waiting())
    thread.run(after(0.05, 0))
    thread.stop()
    assert cleaned == [1] and not thread.running
    late = thread.submit(after(0.0, 1))
    assert concurrent.futures.wait([running, late], 10).not_done == set()
    for future in (running, late):
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(10)
    thread.stop()  # a second time does nothing


def test_no_work_is_lost_that_comes_while_the_thread_ends() -> None:
    """Each future ends, and each coroutine is awaited or closed: a caller would wait for ever."""
    begin = threading.Barrier(2)

    def submit_many(thread: EventLoopThread) -> list[concurrent.futures.Future[int]]:
        begin.wait()
        return [thread.submit(after(0.0, 1)) for _ in range(300)]

    with concurrent.futures.ThreadPoolExecutor(1) as other:
        for _ in range(20):
            thread = EventLoopThread("ending")
            futures = other.submit(submit_many, thread)
            begin.wait()
            thread.stop()
            assert concurrent.futures.wait(futures.result(), 10).not_done == set()


def test_closing_does_not_wait_for_work_without_end(thread: EventLoopThread) -> None:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                continue

    thread.submit(stubborn())
    thread.run(after(0.05, 0))
    thread.stop(seconds=0.3)
    assert not thread.running
