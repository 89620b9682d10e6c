"""Verdicts per second and core: the pool of verifier processes against
calling math-verify in the trainer's process.

    python benchmarks/verifiers.py [--rows 2000] [--processes 2] [--rounds 3] [--json PATH]

Three sides take turns over the same responses (about 2,000 characters of reasoning before a box;
every other answer is wrong): math-verify inline (parse with its own time limit, verify; labels
parsed once and kept), our `math` verifier inline, and the same verifier in the pool. Per core: by
CPU time, of parent and workers together, which other programs on the machine disturb little; and by
wall clock divided by the processes. Medians over the rounds.

`mixed` labels: 70% integers, 20% fractions and decimals, 10% formulas; `formulas`: nothing but
formulas, which need computer algebra on every side.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_stare.scoring.mathematics.answers import math as our_math
from megatron_stare.scoring.verdict import Sample
from megatron_stare.scoring.verifier_pool import VerifierPool

REASONING = (
    "We first note that $x_1 + 2 = 7$, hence $x_1 = 5$; the area is \\frac{1}{2} \\cdot 6 \\cdot "
    "4. " * 22
)
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "math": ("megatron_stare.scoring.mathematics.answers.math", {})
}


def formula(rng: random.Random) -> tuple[str, str]:
    """A label and an answer that is equal to it but written otherwise."""
    a, b, c = (rng.randint(2, 99) for _ in range(3))
    return rng.choice(
        [
            (f"{a}\\sqrt{{{b}}} + {c}", f"{c} + {a}\\sqrt{{{b}}}"),
            (f"({a}x+{b})(x+{c})", f"(x+{c})({a}x+{b})"),
            (f"\\frac{{{a}\\pi}}{{{b}}}", f"\\frac{{{a}}}{{{b}}}\\pi"),
            (f"{a}x^2+{b}x", f"x({a}x+{b})"),
        ]
    )


def number(rng: random.Random) -> tuple[str, str]:
    """The same for a fraction or decimal."""
    a, b = rng.randint(1, 999), rng.choice([2, 4, 5, 8, 16, 25])
    return rng.choice([(f"\\frac{{{a}}}{{{b}}}", str(a / b)), (str(a / b), f"{a}/{b}")])


def samples(rows: int, formulas: bool, number_of_round: int) -> list[Sample]:
    """Always the same responses in a round, others in the next;
    every other one gives the answer of another label.
    """
    rng = random.Random(number_of_round)
    found = []
    for place in range(rows):
        kind = 1.0 if formulas else rng.random()
        integer = str(rng.randint(-1000, 100_000))
        label, answer = (
            (integer, integer) if kind < 0.7 else number(rng) if kind < 0.9 else formula(rng)
        )
        if place % 2:
            answer = formula(rng)[1] if kind >= 0.9 else str(rng.randint(200_000, 300_000))
        found.append(Sample(f"{REASONING}So the answer is $\\boxed{{{answer}}}$.", label))
    return found


def math_verify_inline() -> Callable[[list[Sample]], int]:
    """As a trainer without a pool calls it."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    labels: dict[str, Any] = {}

    def judge(batch: list[Sample]) -> int:
        right = 0
        for sample in batch:
            if sample.label not in labels:
                labels[sample.label] = parse(f"\\boxed{{{sample.label}}}")
            right += verify(labels[sample.label], parse(sample.response))
        return right

    return judge


def measure(
    judge: Callable[[list[Sample]], int], batch: list[Sample], pids: list[int]
) -> tuple[float, float, int]:
    """(wall seconds, CPU seconds of this process and the workers, responses found right)."""

    def cpu() -> float:
        return time.process_time() + sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)

    wall, used = time.perf_counter(), cpu()
    right = judge(batch)
    return time.perf_counter() - wall, cpu() - used, right


def compare(
    rows: int, formulas: bool, pool: VerifierPool, rounds: int
) -> dict[str, dict[str, float]]:
    """Medians of every side; the sides take turns."""
    sides: dict[str, tuple[Callable[[list[Sample]], int], int]] = {
        "math-verify inline": (math_verify_inline(), 1),
        "math inline": (
            lambda b: sum(our_math(s.response, s.label, {}).verdict == "correct" for s in b),
            1,
        ),
        "math in the pool": (
            lambda b: sum(v.verdict == "correct" for v in pool.judge("math", b)),
            pool.processes,
        ),
    }
    times: dict[str, list[tuple[float, float, int]]] = {name: [] for name in sides}
    for judge, _ in sides.values():
        judge(samples(64, formulas, 0))  # imports, parser tables, processes
    for number_of_round in range(1, rounds + 1):
        # new ones, so that no side remembers what it has parsed
        batch = samples(rows, formulas, number_of_round)
        for name, (judge, _) in sides.items():
            times[name].append(measure(judge, batch, pool.pids() if "pool" in name else []))
    return {
        name: {
            "per_cpu_second": rows / statistics.median(cpu for _, cpu, _ in found),
            "per_second": rows / statistics.median(wall for wall, _, _ in found),
            "per_second_and_process": rows
            / statistics.median(wall for wall, _, _ in found)
            / sides[name][1],
            "right": statistics.median(right for _, _, right in found),
        }
        for name, found in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    document: dict[str, Any] = {"python": platform.python_version(), "processes": options.processes}
    for labels in ("mixed", "formulas"):
        rows = options.rows if labels == "mixed" else max(64, options.rows // 4)
        with contextlib.closing(VerifierPool(SPECS, options.processes, 30.0, 4096)) as pool:
            found = compare(rows, labels == "formulas", pool, options.rounds)
        table = Table(title=f"{labels} labels, {rows} responses, {options.processes} processes")
        for name in (
            "side",
            "verdicts / CPU s",
            "ratio",
            "verdicts / s",
            "/ s and process",
            "ratio",
            "right",
        ):
            table.add_column(name, justify="left" if name == "side" else "right")
        base = found["math-verify inline"]
        for name, row in found.items():
            table.add_row(
                name,
                f"{row['per_cpu_second']:,.0f}",
                f"{row['per_cpu_second'] / base['per_cpu_second']:.2f}",
                f"{row['per_second']:,.0f}",
                f"{row['per_second_and_process']:,.0f}",
                f"{row['per_second_and_process'] / base['per_second_and_process']:.2f}",
                f"{row['right']:.0f}",
            )
        Console(width=110).print(table)
        document[labels] = found
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
