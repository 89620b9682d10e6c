"""Runs the arms as child processes, at most one per core at a time, and shows them in one table.

A child is the ordinary command on the arm's own config.yaml. It ends with a checkpoint if its
parent dies.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron_stare.config import Config, UserError
from megatron_stare.loop import run_directory
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.watchdog.watchdog import HUNG, RANKS
from megatron_stare.reporting import heartbeat
from megatron_stare.reporting.live import training
from megatron_stare.reporting.logbook import METRICS_NAME, Tail
from megatron_stare.rollout.sglang.access import KEY_VARIABLE, api_key
from megatron_stare.system import end_with_parent

LOG_NAME = "log.txt"
_POLL_SECONDS = 0.5
Running = list[tuple[Config, "subprocess.Popen[bytes]"]]


def run_side_by_side(configs: list[Config], interrupt: Interrupt) -> dict[str, str] | None:
    """Train every config to its end. The last lines of failed runs' logs, by run; None: a signal
    stopped them. UserError: a run failed before its first step, as the others would.
    """
    for config in configs:
        run_directory.claim(config)
    tails = {config.run.dir: Tail(Path(config.run.dir) / METRICS_NAME) for config in configs}
    for tail in tails.values():
        tail.read()
    failed: dict[str, str] = {}
    waiting = [config for config in configs if not _complete(config, tails)]
    jobs = max(1, min(len(waiting), os.cpu_count() or 1))
    threads = max(1, (os.cpu_count() or 1) // jobs)
    total = sum(config.train.num_rollout for config in configs)
    completed = sum(tail.step for tail in tails.values())
    running: Running = []
    stopped = False
    beats: list[int] = []
    with training("training", total, completed=completed) as live, heartbeat.waiting():
        while waiting or running:
            while waiting and len(running) < jobs and not interrupt.noted:
                config = waiting.pop(0)
                running.append((config, _start(config, threads)))
            if interrupt.noted and not stopped:  # once: a second signal would end them at once
                waiting, stopped = [], True
                _stop(running)
            time.sleep(_POLL_SECONDS)
            if beats != (beats := _beats(running)):
                heartbeat.moved()
            codes = [child.poll() for _, child in running]
            for (config, _), code in zip(running, codes, strict=True):
                for row in tails[config.run.dir].read():
                    live.step(row, run=label(config))
                if code not in (None, 0, 128 + signal.SIGINT):
                    failed[label(config)] = _failure(config, code, running)
                started = tails[config.run.dir].step > 0
                solved = run_directory.solved(Path(config.run.dir)) if code == 0 else ""
                if not started and (why := failed.get(label(config), solved)):
                    _stop(running)
                    raise UserError(f"arm {Path(config.run.dir).name} failed: {why}")
            running = [one for one, code in zip(running, codes, strict=True) if code is None]
    whole = all(_complete(config, tails) or label(config) in failed for config in configs)
    return failed if whole else None


def _beats(running: Running) -> list[int]:
    """When the ranks of the running children wrote their beats: their own watchdogs do so."""
    files = [file for config, _ in running for file in Path(config.run.dir, RANKS).glob("*.json")]
    return [file.stat().st_mtime_ns for file in files]


def _complete(config: Config, tails: dict[str, Tail]) -> bool:
    directory = Path(config.run.dir)
    last = tails[config.run.dir].step
    return last >= config.train.num_rollout or bool(last and run_directory.solved(directory))


def label(config: Config) -> str:
    """A run's name in the comparison, e.g. seed0/stare."""
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
            preexec_fn=functools.partial(end_with_parent, signal.SIGTERM),
        )


def _secrets(config: Config) -> dict[str, str]:
    """Environment variables with secrets, which the arm's config.yaml does not hold."""
    key = api_key(config.sglang)
    return {KEY_VARIABLE: key} if key else {}


def _stop(running: Running) -> None:
    for _, child in running:
        child.send_signal(signal.SIGTERM)


def _failure(config: Config, code: int | None, running: Running) -> str:
    """The last line of a failed child's log. A child that hung ends all runs."""
    log = Path(config.run.dir) / LOG_NAME
    if code == HUNG:
        _stop(running)
        print(f"arm {Path(config.run.dir).name} hung; see {log}", file=sys.stderr)
        sys.exit(HUNG)
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else code}; see {log}"
