"""The cost of a model call in the trainer's process, with one host of many sessions at a time.

    export OMP_NUM_THREADS=1
    python benchmarks/endpoint.py
    python benchmarks/endpoint.py --sessions 512 --turns 10 --drops

The engine answers at once with two tokens, so that the figures are those of HTTP, messages, chat
template, tree and tokens. A conversation grows by a turn with every call. CPU ms of the trainer and
of the host are per call; every call has a connection of its own. `open files` are those of the
trainer while sessions are open; after them it has as many as before, which the program checks, as
it does places and objects in memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path

import psutil
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._phases import CONSOLE
from megatron_stare.compare.worlds.calculator import tool_tokenizer
from tests.rollout.agents.crowd import Crowd


class MostFiles:
    """The most open files of this process while entered."""

    def __enter__(self) -> MostFiles:
        self.most, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            self.most = max(self.most, len(os.listdir("/proc/self/fd")))


def measured(sessions: int, turns: int, drops: bool) -> list[str]:
    """A row of the table."""
    crowd = Crowd(tool_tokenizer(), sessions, turns)
    try:
        crowd.play(drops=False)
        before = crowd.held()
        host = psutil.Process(crowd.engine.hosts.hosts[0].process.pid)
        begin, cpu, cpu_host = time.monotonic(), time.process_time(), sum(host.cpu_times()[:2])
        with MostFiles() as files:
            crowd.play(drops)
        seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
        cpu_host = sum(host.cpu_times()[:2]) - cpu_host
        assert crowd.held_at_last(before) == before, (before, crowd.held())
    finally:
        crowd.engine.close()
    calls = sessions * turns
    per_call = (1000 * each / calls for each in (cpu, cpu_host))
    cells = (sessions, turns, f"{calls / seconds:,.0f}", *(f"{each:.2f}" for each in per_call))
    return [str(cell) for cell in (*cells, files.most)]


def main() -> None:
    """Print a row for each number of sessions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--drops", action="store_true", help="half of the sessions lose calls")
    options = parser.parse_args()
    table = Table()
    names = ("sessions", "calls each", "calls/s", "CPU ms, trainer", "CPU ms, host", "open files")
    for name in names:
        table.add_column(name, justify="right")
    for sessions in options.sessions:
        table.add_row(*measured(sessions, options.turns, options.drops))
    CONSOLE.print(table)


if __name__ == "__main__":
    main()
