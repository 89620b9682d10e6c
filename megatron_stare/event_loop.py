"""An event loop in a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from typing import Any


class EventLoopThread:
    """An event loop in a thread of its own. Its methods may be called from any other thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._lock, self._ending = threading.Lock(), False
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread has not been stopped."""
        return self._thread.is_alive()

    def submit[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the thread. Once `stop` is called its future is cancelled."""
        with self._lock:  # `stop` cancels what was submitted before, and nothing comes after
            if not self._ending:
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        never: Future[T] = Future()
        never.cancel()
        never.set_running_or_notify_cancel()  # else concurrent.futures.wait never counts it as done
        return never

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, which runs in the thread."""
        return self.submit(work).result()

    def stop(self, seconds: float = 60.0) -> None:
        """Cancel what runs in the thread, wait for it at most `seconds`, and end the thread."""
        with self._lock:
            self._ending = True
        if self.running:
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(cancel_others(), self.loop).result(seconds)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(seconds)
        if not self.loop.is_running():
            self.loop.close()


async def cancel_others() -> None:
    """Cancel all other tasks of this event loop and wait until they have ended."""
    # A cancelled task may start another one to clean up: repeat until there is none.
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await cancel(others)


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these tasks and wait until they have ended."""
    ended = list(tasks)
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)
