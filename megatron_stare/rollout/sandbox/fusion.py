"""Python run by a SandboxFusion server (github.com/bytedance/SandboxFusion): POST /run_code.

The request is {code, language, stdin, compile_timeout, run_timeout, memory_limit_MB}, times in
seconds; the answer {status: Success | Failed | SandboxError, message, run_result: {status: Finished
| Error | TimeLimitExceeded, execution_time, return_code, stdout, stderr}}. What isolates the code
there is the server's affair. A script has no value of a last expression, and memory that runs out
shows as an error.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import tenacity

from megatron_stare.config import SandboxConfig
from megatron_stare.event_loop import EventLoopThread
from megatron_stare.http_client import FAULTS, post_json, session
from megatron_stare.rollout.sandbox.interpreter import CallLost, Execution, Reason, SandboxError
from megatron_stare.rollout.sandbox.sandbox import CodeRunner, OnStart, Sandbox

# Added to the run time of a request's code: a busy server lets it wait.
QUEUE_SECONDS = 60.0
# Of an answer, next to a call's output: a server may send more than this cuts it to.
_MOST_BYTES = 64 << 20
# Run after a call failed: is the server at fault, or the code?
_PROBE = "print(1)"


class Unanswered(SandboxError):
    """The server failed, not the code: another attempt may do better."""


class RemoteSandbox:
    """A SandboxFusion server. At most `max_concurrency` requests are in flight; thread-safe."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self._url = config.url.rstrip("/") + "/run_code"
        self._places = asyncio.Semaphore(config.max_concurrency)
        self._thread = EventLoopThread("sandbox-requests")
        self._connections: aiohttp.ClientSession | None = None  # opened in the thread

    def run(self, code: str, stdin: str = "", wall_seconds: float | None = None) -> Execution:
        """Run code in a fresh interpreter of the server. CallLost: the server fails `max_attempts`
        times with this code but runs other code. SandboxError: it runs none.
        """
        return self._thread.run(self._run(code, stdin, wall_seconds))

    async def run_async(self, code: str, on_start: OnStart = None) -> Execution:
        """`run` for coroutines; `on_start` is called when the wait for a free place is over."""
        return await asyncio.wrap_future(self._thread.submit(self._run(code, on_start=on_start)))

    def close(self) -> None:
        """End the requests and the connections."""
        if self._connections is not None and self._thread.running:
            self._thread.run(self._connections.close())
        self._thread.stop()

    # --- in the thread

    async def _run(
        self,
        code: str,
        stdin: str = "",
        wall_seconds: float | None = None,
        on_start: OnStart = None,
    ) -> Execution:
        most = self.config.wall_seconds
        seconds = most if wall_seconds is None else min(wall_seconds, most)
        try:
            code.encode()
        except UnicodeEncodeError as error:  # no interpreter would take it either
            return Execution("", f"SyntaxError: {error}\n", None, "error", 0.0)
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.config.max_attempts),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=10),
            retry=tenacity.retry_if_exception_type(Unanswered),
            reraise=True,
        )
        async with self._places:
            if on_start is not None:
                on_start()
            try:
                return await retrying(self._attempt, self._body(code, stdin, seconds), seconds)
            except Unanswered as error:
                fault = (
                    f"sandbox.url={self.config.url}: {error}, {self.config.max_attempts} times; "
                    "see the server's log"
                )
            try:
                await self._attempt(self._body(_PROBE, "", seconds), seconds)
            except Unanswered:
                raise SandboxError(fault) from None
            raise CallLost(fault)

    def _body(self, code: str, stdin: str, seconds: float) -> dict[str, Any]:
        return {
            "code": code,
            "language": "python",
            "stdin": stdin.encode("utf-8", "replace").decode(),
            "compile_timeout": seconds,
            "run_timeout": seconds,
            "memory_limit_MB": self.config.memory_mib,
        }

    async def _attempt(self, body: dict[str, Any], seconds: float) -> Execution:
        started = time.monotonic()
        try:
            if self._connections is None:
                self._connections = session()
            status, content = await post_json(
                self._connections,
                self._url,
                json.dumps(body).encode(),
                seconds + QUEUE_SECONDS,
                _MOST_BYTES + 12 * self.config.output_bytes,
            )
        except (*FAULTS, ValueError) as error:
            raise Unanswered(f"no answer ({type(error).__name__}: {error})") from None
        if status != 200:
            raise Unanswered(f"status {status}: {content[:200].decode('utf-8', 'replace')!r}")
        try:
            answer = json.loads(content)
            if answer["status"] == "SandboxError":
                raise Unanswered(f"SandboxError: {answer.get('message', '')!r}")
            result = answer["run_result"]
            ended, code = result["status"], result["return_code"]
            stdout, stderr = (self._cut(result[name] or "") for name in ("stdout", "stderr"))
            taken = float(result.get("execution_time") or time.monotonic() - started)
            reason, detail = _reason(ended, code, seconds)
        except Unanswered:
            raise
        except Exception as error:  # the answer is the server's: it may hold anything
            raise Unanswered(
                f"an answer that is not one of /run_code ({type(error).__name__}: {error})"
            ) from None
        return Execution(stdout, stderr, None, reason, taken, detail)

    def _cut(self, text: str) -> str:
        data = text.encode("utf-8", "replace")
        limit = self.config.output_bytes
        if len(data) <= limit:
            return data.decode()
        return f"{data[:limit].decode('utf-8', 'replace')}\n[output cut after {limit} bytes]"


def open_sandbox(config: SandboxConfig) -> CodeRunner:
    """The sandbox that `config` asks for: the server at `url`, else this machine's."""
    make: Callable[[SandboxConfig], CodeRunner] = RemoteSandbox if config.url else Sandbox
    return make(config)


def _reason(ended: str, code: int | None, seconds: float) -> tuple[Reason, str]:
    if ended == "TimeLimitExceeded":
        return "timeout", f"not done after {seconds:g} s"
    if code is not None and code < 0:
        return "killed", f"the process was ended by signal {-code}"
    if ended == "Finished" and not code:
        return "ok", ""
    return "error", ""
