"""Calls per second of the Python sandbox, warm and cold, in every isolation that works here.

    python benchmarks/sandbox.py [--calls 200] [--callers 2] [--json PATH]

warm: interpreters are kept ready and forked for each call (`sandbox.warm_workers` = callers). cold:
every call starts its own (0). session: all calls in one interpreter. Median and 95th percentile are
of one caller's calls; calls/s of all callers together. Each call evaluates `1 + 1`, and its answer
is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_stare.config import SandboxConfig, UserError
from megatron_stare.rollout.sandbox.sandbox import Sandbox, Session


def measure(sandbox: Sandbox, calls: int, callers: int, stateful: bool) -> dict[str, float]:
    """Seconds per call and calls per second."""

    def caller(number: int) -> list[float]:
        runner: Sandbox | Session = sandbox.session() if stateful else sandbox
        seconds = []
        for _ in range(calls // callers):
            started = time.perf_counter()
            result = runner.run("1 + 1")
            seconds.append(time.perf_counter() - started)
            assert result.value == "2", result
        if isinstance(runner, Session):
            runner.close()
        return seconds

    with ThreadPoolExecutor(callers) as pool:
        list(
            pool.map(lambda _: sandbox.run("1 + 1"), range(callers))
        )  # the pool's interpreters have started
        started = time.perf_counter()
        seconds = sorted(second for batch in pool.map(caller, range(callers)) for second in batch)
        total = time.perf_counter() - started
    return {
        "calls": len(seconds),
        "callers": callers,
        "median_ms": 1000 * statistics.median(seconds),
        "p95_ms": 1000 * seconds[int(0.95 * (len(seconds) - 1))],
        "calls_per_second": len(seconds) / total,
    }


def rows(calls: int, most_callers: int) -> list[dict[str, Any]]:
    """One row per isolation, preloading, way and number of callers."""
    found = []
    for isolation in ("bubblewrap", "limits"):
        for preload in ([], ["numpy", "sympy"]):
            for way in ("cold", "warm", "session"):
                for callers in sorted({1, most_callers}):
                    warm = 0 if way == "cold" else callers
                    count = max(callers, calls // 10) if way == "cold" else calls
                    config = SandboxConfig(isolation=isolation, preload=preload, warm_workers=warm)
                    try:
                        with Sandbox(config) as sandbox:
                            result = measure(sandbox, count, callers, way == "session")
                    except UserError as error:
                        print(f"{isolation}: {error}", file=sys.stderr)
                        continue
                    found.append(
                        {
                            "isolation": isolation,
                            "preload": ", ".join(preload),
                            "way": way,
                            **result,
                        }
                    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--calls", type=int, default=200, help="per row; a tenth of it for cold ones"
    )
    parser.add_argument(
        "--callers", type=int, default=2, help="the larger number of simultaneous callers"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = rows(arguments.calls, arguments.callers)
    title = (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}"
    )
    table = Table(title=f"{title}, load {os.getloadavg()[0]:.1f}")
    for name in ("isolation", "preload", "way", "callers", "median ms", "p95 ms", "calls/s"):
        table.add_column(name)
    for row in found:
        numbers = (f"{row[name]:.1f}" for name in ("median_ms", "p95_ms", "calls_per_second"))
        table.add_row(row["isolation"], row["preload"], row["way"], str(row["callers"]), *numbers)
    Console(width=120).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
