"""The host side of a large batch: what everything but the model costs, and how that grows.

    OMP_NUM_THREADS=1 python benchmarks/scale.py                64 servers, 4,096 rollouts
    OMP_NUM_THREADS=1 python benchmarks/scale.py --rollouts 256 --tokens 8192 --servers 8 \
        --worlds 2 4 8 --rounds 1                               a minute
    OMP_NUM_THREADS=1 python benchmarks/scale.py --json scale.json

Servers speak SGLang's protocol and compute nothing; answers have 1 to --tokens tokens, drawn by a
fixed seed, with log-probs of as many digits as SGLang writes. All figures are processor seconds, so
that servers and other programs next to them are not in them.

"sampling": one process is the client of all servers and writes the journal. "in flight": how long
it works until none of --rollouts requests is in flight any more, from the word that ends them.
"ranks": gloo ranks on this machine that share a batch as data-parallel ranks do. Seconds are those
of all ranks together, with the kernel's for them. Memory and bytes sent are the worst rank's, taken
once more with a glibc that gives freed memory back at once. "beyond": peak memory above what a rank
held before and what it keeps.
"short": SHORT[0] rollouts of at most SHORT[1] tokens, packed for one rank.
Seconds of sampling, ranks and short are medians of --rounds, which go up and down the sizes in
turn. Exponents are fitted to them: 1 is in proportion, 0 is flat; of ranks' they are one rank's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _exchanging_ranks as exchanging
from benchmarks._fake_rollouts import PHASES, REST, SAMPLES, Sampled, interrupted, sample
from benchmarks._measuring import machine

# As in long_sequence.py: larger tensors are mapped by themselves.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_TRIM_THRESHOLD_": str(1 << 16)}
CONSOLE = Console(width=140)
ROLLOUT = 32768  # tokens that "ms per 32k" is counted for
SHORT = (8192, 256)  # rollouts, and tokens of the longest


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, leave the figures in --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=32768, help="of the longest response")
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--stream-interval", type=int, default=512)
    parser.add_argument("--worlds", type=int, nargs="*", default=[2, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.rollouts < 8 * SAMPLES:
        parser.error(f"--rollouts {options.rollouts}: at least {8 * SAMPLES}")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    disable_progress_bar()
    sizes = [options.rollouts // part for part in (8, 4, 2, 1)]
    document: dict[str, Any] = {"machine": machine(torch.device("cpu"))}
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        document["sampling"] = sampling(Path(folder), sizes, options)
        document["in flight"] = in_flight(Path(folder), options)
    if options.worlds:
        document["ranks"] = ranks(sizes, options)
    document["short"] = short(*SHORT, options.rounds)
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def sampling(folder: Path, sizes: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Table 1."""
    of_rounds = _in_rounds(
        [(size, options.stream_interval) for size in sizes] + [(sizes[0], 0)],
        options.rounds,
        lambda case: sample(folder, options.servers, case[0], options.tokens, case[1]),
    )
    *streamed, whole = map(_middle, of_rounds)
    phases = [*PHASES, REST]
    table = Table(title=f"sampling from {options.servers} servers: CPU s per million tokens")
    table.add_column("answers", no_wrap=True)
    for name in ("rollouts", "Mtokens", *phases, "total", "ms per 32k", "beyond MiB"):
        table.add_column(name, justify="right")
    for found in (*streamed, whole):
        table.add_row("whole" if found is whole else "streamed", *_sampled(found, phases))
    tokens = [found.tokens for found in streamed]
    grown = {name: exponent(tokens, [one.seconds[name] for one in streamed]) for name in phases}
    grown["total"] = exponent(tokens, [found.total for found in streamed])
    table.add_row("exponent", "", "", *(f"{grown[name]:.2f}" for name in grown), "", "")
    CONSOLE.print(table)
    rows = [dataclasses.asdict(found) | {"streamed": found is not whole} for found in streamed]
    rows.append(dataclasses.asdict(whole) | {"streamed": False})
    return {"rows": rows, "exponents": grown}


def _in_rounds[C, F](cases: Sequence[C], rounds: int, measure: Callable[[C], F]) -> list[list[F]]:
    """The results of every round, by case. The machine drifts: every second round is reversed."""
    found: list[list[F]] = [[] for _ in cases]
    for turn in range(rounds):
        for place in range(len(cases))[:: -1 if turn % 2 else 1]:
            found[place].append(measure(cases[place]))
    return found


def _middle(rounds: Sequence[Sampled]) -> Sampled:
    """Median seconds of each phase, the largest peak."""
    names = rounds[0].seconds
    return dataclasses.replace(
        rounds[-1],
        seconds={name: statistics.median(one.seconds[name] for one in rounds) for name in names},
        wall=statistics.median(one.wall for one in rounds),
        peak_bytes=max(one.peak_bytes or 0 for one in rounds),
    )


def _sampled(found: Sampled, phases: Sequence[str]) -> list[str]:
    million = found.tokens / 1e6
    each = [f"{found.seconds[phase] / million:.3f}" for phase in phases]
    ms = f"{1e3 * found.total / found.tokens * ROLLOUT:.1f}"
    row = [f"{found.rollouts:,}", f"{million:.2f}", *each, f"{found.total / million:.3f}"]
    return [*row, ms, _mib(found.peak_bytes)]


def in_flight(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Table 2."""
    found = interrupted(folder, options.servers, options.rollouts)
    table = Table(title=f"{options.rollouts:,} requests in flight, ended: CPU s of the client")
    for name, seconds in found.items():
        table.add_row(name, f"{seconds:.2f}")
    CONSOLE.print(table)
    return found


def ranks(sizes: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Table 3."""
    worlds = sorted(options.worlds)
    cases = [(worlds[0], size) for size in sizes[:-1]]
    cases += [(world, sizes[-1]) for world in worlds]
    table = Table(title="ranks: CPU s per million tokens, all ranks; MiB of the worst rank")
    columns = [f"{phase}\ns" for phase in exchanging.PHASES] + ["ms per\n32k"]
    columns += [f"{phase}\nbeyond" for phase in exchanging.PHASES]
    columns += [f"{phase}\nsent" for phase in exchanging.PHASES[:2]]
    for name in ("world", "rollouts", "Mtokens", *columns):
        table.add_column(name, justify="right", no_wrap=True)
    timed = _in_rounds(cases, options.rounds, lambda case: exchanging.world(*case, options.tokens))
    os.environ.update(MALLOC)  # the ranks inherit it
    sized = [exchanging.world(*case, options.tokens) for case in cases]
    for name in MALLOC:
        del os.environ[name]
    rows = [_shared(*each) for each in zip(cases, timed, sized, strict=True)]
    for row in rows:
        table.add_row(*_row(row))
    grown = {
        "tokens": _exponents([row for row in rows if row["world"] == worlds[0]], "tokens"),
        "world": _exponents([row for row in rows if row["rollouts"] == sizes[-1]], "world"),
    }
    for name, powers in grown.items():
        seconds = [f"{powers[f'{phase} seconds']:.2f}" for phase in exchanging.PHASES]
        sent = [f"{powers[f'{phase} sent']:.2f}" for phase in exchanging.PHASES[:2]]
        whole = f"{powers['seconds']:.2f}"
        table.add_row(f"exponent in {name}", "", "", *seconds, whole, "", "", "", *sent)
    CONSOLE.print(table)
    return {"rows": rows, "exponents": grown}


def short(rollouts: int, longest: int, rounds: int) -> dict[str, float]:
    """Table 4."""
    found = [exchanging.packed(rollouts, longest, ROLLOUT) for _ in range(rounds)]
    seconds, tokens, batches = (statistics.median(each) for each in zip(*found, strict=True))
    table = Table(title=f"{rollouts:,} rollouts of 1 to {longest} tokens, packed for one rank")
    for name in ("Mtokens", "micro-batches", "CPU s"):
        table.add_column(name, justify="right")
    table.add_row(f"{tokens / 1e6:.2f}", f"{batches:,}", f"{seconds:.2f}")
    CONSOLE.print(table)
    return {"seconds": seconds, "tokens": tokens, "micro-batches": batches}


def _shared(
    case: tuple[int, int],
    timed: Sequence[Sequence[exchanging.Rank]],
    sized: Sequence[exchanging.Rank],
) -> dict[str, Any]:
    """All ranks together: seconds summed over these rounds; memory and bytes of the worst rank."""
    row: dict[str, Any] = {"world": case[0], "rollouts": case[1]}
    row["tokens"] = sum(rank.held_tokens for rank in sized)
    row["seconds"] = statistics.median(
        sum(sum(rank.seconds.values()) for rank in found) for found in timed
    )
    for phase in exchanging.PHASES:
        row[f"{phase} seconds"] = statistics.median(
            sum(rank.seconds[phase] for rank in found) for found in timed
        )
        row[f"{phase} beyond"] = max((rank.beyond[phase] or 0 for rank in sized), default=None)
        row[f"{phase} sent"] = max(rank.sent.get(phase, 0) for rank in sized)
    return row


def _row(row: dict[str, Any]) -> list[str]:
    million, phases = row["tokens"] / 1e6, exchanging.PHASES
    return [
        str(row["world"]),
        f"{row['rollouts']:,}",
        f"{million:.2f}",
        *(f"{row[f'{phase} seconds'] / million:.3f}" for phase in phases),
        f"{1e3 * row['seconds'] / row['tokens'] * ROLLOUT:.1f}",
        *(_mib(row[f"{phase} beyond"]) for phase in phases),
        *(_mib(row[f"{phase} sent"]) for phase in phases[:2]),
    ]


def _exponents(rows: Sequence[dict[str, Any]], over: str) -> dict[str, float]:
    """The exponent of every column that depends on `over`; seconds are those of one rank."""
    found = {}
    for name in rows[0].keys() - {"world", "rollouts", "tokens"}:
        per_rank = [row[name] / (row["world"] if "seconds" in name else 1) for row in rows]
        found[name] = exponent([row[over] for row in rows], per_rank)
    return found


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The power p of cost = a size^p, by least squares of the logarithms; NaN of one size, or of a
    cost that is 0.
    """
    if len(set(sizes)) < 2 or min(costs) <= 0:
        return float("nan")
    return float(numpy.polyfit(numpy.log(sizes), numpy.log(costs), 1)[0])


def _mib(count: int | None) -> str:
    return "" if count is None else f"{count / (1 << 20):.1f}"


if __name__ == "__main__":
    main()
