"""SGLang servers of the run's own for the reward `judge`. They never receive the policy's weights.

All processes of a run share them. The process that locks judge/servers.lock of the run's directory
owns them: it starts them when the first question is asked, ends silent ones while questions come,
replaces dead ones before a question, and writes their addresses to judge/servers.json, from which
the others read them. They end with their owner; the next process that asks then owns new ones.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

from megatron_stare.config import Config, EngineError
from megatron_stare.http_client import FAULTS, request
from megatron_stare.reporting import heartbeat
from megatron_stare.rollout.sglang.process import ServerProcess, server_command
from megatron_stare.rollout.sglang.server import MOST_STARTS, PROBES, StartPatience
from megatron_stare.system import atomic_write, try_lock

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_HEALTH_SECONDS = 5.0


class JudgeServers:
    """The addresses of judge.num_servers servers of judge.checkpoint. Close it at the end."""

    def __init__(self, config: Config, directory: Path) -> None:
        """UserError: there is no command that starts a server."""
        self.settings, self.sglang, self.directory = config.judge, config.sglang, directory
        self._command = server_command(config.sglang)
        self._processes: list[ServerProcess] = []
        self._owned: IO[str] | None = None
        self._lock = threading.Lock()
        # a server ends with the thread that started it
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="judge-servers")
        self._look: Future[None] | None = None  # the last one at the servers

    def urls(self) -> Sequence[str]:
        """The addresses of servers that run, once they answer. EngineError: one does not start."""
        with self._lock:
            seconds = MOST_STARTS * self.sglang.start_timeout
            deadline = time.monotonic() + seconds
            while not self._own():
                found = self._written()
                if found:
                    return found
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"{self.directory}/servers.lock is held by a process whose servers do not "
                        f"answer after {seconds:g} s ({MOST_STARTS} x sglang.start_timeout)"
                    )
                time.sleep(_POLL_SECONDS)
            if not self._processes or not all(each.alive() for each in self._processes):
                self._starter.submit(self._replace).result()
            elif self._look is None or self._look.done():
                self._look = self._starter.submit(self._end_silent)
            return [f"{each.url}/v1" for each in self._processes]

    def close(self) -> None:
        """End the servers that this process owns."""
        for process in self._processes:
            process.stop()
        self._starter.shutdown()
        if self._owned is not None:
            (self.directory / "servers.json").unlink(missing_ok=True)
            self._owned.close()

    def _own(self) -> bool:
        if self._owned is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            file = (self.directory / "servers.lock").open("w")
            if not try_lock(file):
                file.close()
                return False
            self._owned = file
        return True

    def _written(self) -> list[str]:
        try:
            return list(json.loads((self.directory / "servers.json").read_text()))
        except (OSError, ValueError):
            return []

    def _replace(self) -> None:
        """Start what does not run, and wait until all answer; other processes wait likewise."""
        (self.directory / "servers.json").unlink(missing_ok=True)  # it may be of a dead owner
        for number in range(self.settings.num_servers):
            if number < len(self._processes):
                if self._processes[number].alive():
                    continue
                self._processes[number].stop()  # what it started may still hold its GPUs
            process = ServerProcess(
                self._command,
                self.settings.checkpoint,
                shlex.split(self.settings.server_args),
                self.directory / f"server_{number}.log",
                self.sglang.host,
                key=os.environ.get(self.settings.key_variable, ""),  # as it is sent to them
            )
            self._processes[number : number + 1] = [process]
        for process in self._processes:
            self._wait(process)
        urls = [f"{each.public_url}/v1" for each in self._processes]
        atomic_write(self.directory / "servers.json", json.dumps(urls))

    def _end_silent(self) -> None:
        """End each server that does not answer for sglang.health_timeout."""
        seconds = self.sglang.health_timeout
        for process in self._processes:
            deadline = time.monotonic() + seconds
            while process.alive() and not _answers(process, seconds / PROBES):
                if time.monotonic() > deadline:
                    log.warning("the judge's server %s is silent for %g s", process.url, seconds)
                    process.stop(at_once=True)
                time.sleep(_POLL_SECONDS)

    def _wait(self, process: ServerProcess) -> None:
        patience = StartPatience(process, self.sglang.start_timeout)
        while process.alive() and not patience.ended():
            heartbeat.moved()  # sglang.start_timeout bounds it
            if _answers(process, _HEALTH_SECONDS):
                return
            time.sleep(_POLL_SECONDS)
        raise EngineError(
            f"the judge's server of judge.checkpoint={self.settings.checkpoint} did not start: "
            f"{process.last_words()} (its log: {process.log})"
        )


def _answers(process: ServerProcess, seconds: float) -> bool:
    try:
        return request("GET", f"{process.url}/health", timeout=seconds)[0] == 200
    except FAULTS:
        return False
