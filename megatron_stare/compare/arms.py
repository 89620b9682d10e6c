"""Runs arms as child processes, as many at a time as there are cores, in one live table.

A child is the ordinary command line on the arm's own config.yaml. It ends, with a checkpoint, when
its parent dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron_stare.config import Config, UserError
from megatron_stare.loop import run_directory
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.watchdog import heartbeat
from megatron_stare.loop.watchdog.watchdog import HUNG
from megatron_stare.reporting.live import training
from megatron_stare.reporting.logbook import METRICS_NAME, Tail
from megatron_stare.rollout.sglang.access import KEY_VARIABLE, api_key

LOG_NAME = "log.txt"
_POLL_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


def run_side_by_side(configs: list[Config], interrupt: Interrupt) -> bool:
    """Train every config to its end. False:
    a signal stopped them. UserError in a failing child's words.
    """
    for config in configs:
        run_directory.claim(config)
    tails = {config.run.dir: Tail(Path(config.run.dir) / METRICS_NAME) for config in configs}
    for tail in tails.values():
        tail.read()
    waiting = [config for config in configs if not _complete(config, tails)]
    jobs = max(1, min(len(waiting), os.cpu_count() or 1))
    threads = max(1, (os.cpu_count() or 1) // jobs)
    total = sum(config.train.num_rollout for config in configs)
    completed = sum(tail.step for tail in tails.values())
    running: list[tuple[Config, subprocess.Popen[bytes]]] = []
    with training("training", total, completed=completed) as live:
        while waiting or running:
            while waiting and len(running) < jobs and not interrupt.noted:
                config = waiting.pop(0)
                running.append((config, _start(config, threads)))
            if interrupt.noted:
                waiting = []
                for _, child in running:
                    child.send_signal(signal.SIGTERM)
            time.sleep(_POLL_SECONDS)
            heartbeat.moved()  # each child is watched by its own watchdog
            ended = [_ended(config, child, running) for config, child in running]
            for config, _ in running:
                for row in tails[config.run.dir].read():
                    live.step(row, run=_label(config))
            running = [one for one, over in zip(running, ended, strict=True) if not over]
    return all(_complete(config, tails) for config in configs)


def _complete(config: Config, tails: dict[str, Tail]) -> bool:
    return tails[config.run.dir].step >= config.train.num_rollout


def _label(config: Config) -> str:
    """seed0/stare: a run's place in the comparison."""
    return "/".join(Path(config.run.dir).parts[-2:])


def _start(config: Config, threads: int) -> subprocess.Popen[bytes]:
    directory = Path(config.run.dir)
    command = [
        sys.executable,
        "-m",
        "megatron_stare",
        "train",
        str(directory / run_directory.CONFIG_NAME),
    ]
    with (directory / LOG_NAME).open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)} | _secrets(config),
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )


def _secrets(config: Config) -> dict[str, str]:
    """What the arm's config.yaml does not hold."""
    key = api_key(config.sglang)
    return {KEY_VARIABLE: key} if key else {}


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _ended(config: Config, child: subprocess.Popen[bytes], running: list) -> bool:
    """Whether the child is done; UserError, after stopping the others, where it failed."""
    code = child.poll()
    if code is None:
        return False
    if code not in (0, 128 + signal.SIGINT):
        for _, other in running:
            other.send_signal(signal.SIGTERM)
        log = Path(config.run.dir) / LOG_NAME
        if code == HUNG:
            print(f"arm {Path(config.run.dir).name} hung; see {log}", file=sys.stderr)
            sys.exit(HUNG)
        lines = log.read_text(errors="replace").strip().splitlines()
        raise UserError(
            f"arm {Path(config.run.dir).name} failed: {lines[-1] if lines else code}; see {log}"
        )
    return True
