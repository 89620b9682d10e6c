"""A judge over HTTP that answers, fails and hangs by a test's script."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

Answer = Callable[[str, int], Any]  # question and number of the request -> text, status, or None


class JudgeServer:
    """An OpenAI-compatible server: `answer` gives a text, a status, bytes for the body, or None to
    hang.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer, self.bodies = answer, []
        self.keys: list[str] = []
        self.most = self.now = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"  # type: ignore

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0.01)
            found = self.answer(body["messages"][0]["content"], len(self.bodies) - 1)
            if found is None:
                await asyncio.sleep(3600)
            if isinstance(found, int):
                return web.Response(status=found)
            if isinstance(found, bytes):
                return web.Response(body=found)
            text, finish = found if isinstance(found, tuple) else (found, "stop")
            choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
            return web.json_response({"choices": [choice], "usage": {"total_tokens": 20}})
        finally:
            self.now -= 1

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
