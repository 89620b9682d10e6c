"""Host processes, in which agents run: started, given episodes, and replaced when they die.

A host runs megatron_stare_agents/host.py with the user's Python; both sides write one JSON object a
line. It is two processes: the first one ends everything that agents left when the second one, which
runs them, ends. An episode is given to the host with the most free places; without a free place it
waits, and its time limit begins with its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_stare.config import AgentsConfig, UserError

SCRIPT = Path(__file__).resolve().parents[3] / "megatron_stare_agents" / "host.py"
START_SECONDS = 120.0
_STARTS = 3  # of a host that a signal ends before it is ready, as where memory runs out
_OF_HOSTS = ("function", "command", "grace_seconds")  # settings that a host reads
_LINE = 64 << 20  # bytes of a line at most: rows may be large


class HostLost(Exception):
    """The host's process ended while it ran an episode."""


@dataclass(eq=False)
class _Host:
    process: asyncio.subprocess.Process
    reader: asyncio.Task[None] | None = None
    running: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    ready: asyncio.Future[str] = field(default_factory=asyncio.Future)  # an error's text, or ""

    @property
    def alive(self) -> bool:
        return self.process.returncode is None and not self.process.stdin.is_closing()  # type: ignore[union-attr]

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        # A row of Parquet may hold what JSON has no form for, such as a date.
        self.process.stdin.write(json.dumps(message, default=str).encode() + b"\n")


def check_agent(settings: AgentsConfig) -> None:
    """UserError: a host cannot load the agent."""

    async def look() -> None:
        hosts = Hosts(dataclasses.replace(settings, hosts=1))
        try:
            await hosts.start()
        finally:
            await hosts.close()

    asyncio.run(look())


class Hosts:
    """The hosts of one engine, in the running loop."""

    def __init__(self, settings: AgentsConfig) -> None:
        self.settings = settings
        self.hosts: list[_Host] = []  # all that were started and not ended
        self.restarts = 0
        self._numbers = itertools.count()
        self._places = asyncio.Semaphore(settings.hosts * settings.episodes_per_host)
        self._starting = asyncio.Lock()

    @property
    def running(self) -> int:
        """The number of episodes that have started and not ended."""
        return sum(len(host.running) for host in self.hosts)

    async def start(self) -> None:
        """Start the processes. UserError: the agent cannot be loaded there."""
        starts = [self._begun() for _ in range(self.settings.hosts)]
        for error in await asyncio.gather(*starts, return_exceptions=True):
            if error is not None:
                raise error

    async def close(self) -> None:
        """End the processes and what they run."""
        await asyncio.gather(*map(self._end, list(self.hosts)))

    async def run(
        self, episode: dict[str, Any], seconds: float, late: Callable[[], None]
    ) -> dict[str, Any] | None:
        """The outcome of an episode. HostLost: its host ended. An agent that takes longer than
        `seconds` is stopped, after a call of `late`, and the outcome is None. A cancelled call
        stops the agent too. It has agents.grace_seconds before its host is ended.
        """
        async with self._places:
            host = await self._free()
            number = next(self._numbers)
            outcome: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
            host.send({"start": number, **episode})
            host.running[number] = outcome
            try:
                await asyncio.wait({outcome}, timeout=seconds)
                if outcome.done():
                    return outcome.result()
                late()
                return None
            finally:
                # Shielded: if this call is cancelled while its agent ends, the agent gets no second
                # stop, which would interrupt its cleaning up.
                await asyncio.shield(self._stop(host, number, outcome))

    async def _stop(self, host: _Host, number: int, outcome: asyncio.Future[Any]) -> None:
        """End the agent, if it has not ended yet."""
        if not outcome.done():
            if host.alive:
                host.send({"stop": number})
            await asyncio.wait({outcome}, timeout=self.settings.grace_seconds)
        del host.running[number]
        if not outcome.done():
            outcome.cancel()
            await self._end(host)
        elif not outcome.cancelled():
            outcome.exception()  # it is of no interest any more

    async def _free(self) -> _Host:
        """The host with the fewest episodes; dead ones are replaced."""
        async with self._starting:
            # One may die while another one starts: nothing is awaited after the last look at all.
            while len(alive := [host for host in self.hosts if host.alive]) < self.settings.hosts:
                for host in {*self.hosts}.difference(alive):
                    await self._end(host)
                self.restarts += 1
                await self._begun()
        return min(alive, key=lambda host: len(host.running))

    async def _begun(self) -> None:
        """Add a host that has loaded the agent. UserError: it cannot."""
        for start in range(1, _STARTS + 1):
            host, failure = await self._launched()
            if not failure:
                return
            signalled = (host.process.returncode or 0) < 0
            await self._end(host)
            if signalled and start < _STARTS:
                continue
            settings = self.settings
            name = "agents.command" if settings.command else f"agents.function={settings.function}"
            python = settings.python or sys.executable
            raise UserError(f"{name} cannot run with {python}: {failure}")

    async def _launched(self) -> tuple[_Host, str]:
        """A new process, and why it is not ready; "" if it is."""
        settings = self.settings
        python = settings.python or sys.executable
        hidden = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        # Agents reach the endpoint, which is on this machine, without a proxy.
        direct = environment.get("no_proxy") or environment.get("NO_PROXY")
        direct = ",".join(filter(None, [direct, settings.address]))
        environment |= {"no_proxy": direct, "NO_PROXY": direct}
        try:
            process = await asyncio.create_subprocess_exec(
                python,
                str(SCRIPT),
                json.dumps({name: getattr(settings, name) for name in _OF_HOSTS}),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(
                f"agents.python={python!r} cannot be started ({error.strerror}); name the Python "
                "of the environment that your agent is installed in"
            ) from None
        host = _Host(process)
        self.hosts.append(host)
        host.reader = asyncio.create_task(self._read(host))
        try:
            failure = await asyncio.wait_for(asyncio.shield(host.ready), START_SECONDS)
        except TimeoutError:
            failure = f"it was not loaded within {START_SECONDS:g} s"
        return host, failure

    async def _read(self, host: _Host) -> None:
        assert host.process.stdout is not None
        lost = ""
        try:
            async for line in host.process.stdout:
                message = json.loads(line)
                if "ready" in message:
                    host.ready.set_result(message["ready"])
                    continue
                outcome = host.running.get(message["done"])
                if outcome is not None and not outcome.done():
                    outcome.set_result(message["outcome"])
        except (ValueError, ConnectionError) as error:  # a line that is too long, or no JSON
            lost = f"what it wrote cannot be read ({error})"
            with contextlib.suppress(ProcessLookupError):
                host.process.terminate()
            while await host.process.stdout.read(_LINE):
                pass  # asyncio sees the end of a pipe, and of its process, only if the pipe is read
        code = await host.process.wait()
        if not host.ready.done():
            host.ready.set_result(f"the host ended with exit code {code}; its errors stand above")
        for outcome in host.running.values():
            if not outcome.done():
                outcome.set_exception(HostLost(lost or f"exit code {code}"))

    async def _end(self, host: _Host) -> None:
        if host in self.hosts:
            self.hosts.remove(host)
        with contextlib.suppress(ProcessLookupError):
            if host.process.returncode is None:
                assert host.process.stdin is not None
                host.process.stdin.close()  # the host ends, and what it has started
                try:
                    await asyncio.wait_for(host.process.wait(), self.settings.grace_seconds)
                except TimeoutError:
                    host.process.terminate()
        if host.reader is not None:
            await asyncio.wait({host.reader})
