#!/usr/bin/env python
"""Published mathematics data sets -> one .jsonl in this project's row format, mixed,
without duplicates.

    python tools/prepare_math_data.py --output math.jsonl \\
        dapo=DAPO-Math-17k/data deepscaler=deepscaler.json polaris=polaris-data-53K.jsonl \\
        skywork=Skywork-OR1-RL-Data/data/math-00000-of-00001.parquet \\
        --evaluation aime24.parquet --evaluation math500.parquet

Layouts, as their authors publish them (nothing is downloaded):
    dapo        BytedTsinghua-SIA/DAPO-Math-17k: verl rows; each problem about a hundred times, its
                question between two lines of instructions, which are taken off
    deepscaler  agentica-org/DeepScaleR-Preview-Dataset: a JSON array of problem, answer, solution
    skywork     Skywork/Skywork-OR1-RL-Data, split math: verl rows; ground_truth is a JSON list of
                answers, and extra_info.model_difficulty counts the failures of three models in
                16 tries
    polaris     POLARIS-Project/Polaris-Dataset-53K: problem, answer, difficulty ("3/8": solved in 3
                of 8 tries)

A row that cannot be used is left out and counted: without problem or answer, with several answers,
a duplicate (data/screening.py, `normalised`) of one before it, or a problem of an --evaluation
file.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_stare.config import DATA_SOURCE, DataConfig, UserError
from megatron_stare.data.rows import Dropped, Row, read_rows
from megatron_stare.data.screening import Screen
from megatron_stare.data.sources import raw_rows
from megatron_stare.system import atomic_write

# The one form of all rows; `any` extraction (scoring.extraction) reads what it asks for.
INSTRUCTION = "Reason step by step, and put the final answer in \\boxed{}."
DAPO_BEGIN, DAPO_END = (
    "Solve the following math problem step by step.",
    "Remember to put your answer",
)
UNUSABLE, SEVERAL = "no problem or answer", "several answers"

Found = tuple[str, str, dict[str, Any]]  # question, answer, metadata


class Unusable(Exception):
    """Why a row is left out: the heading under which it is counted."""


def dapo(row: dict[str, Any]) -> Found:
    """The paragraphs between DAPO's instructions."""
    paragraphs = _asked(row).split("\n\n")
    if len(paragraphs) > 2 and paragraphs[0].startswith(DAPO_BEGIN):
        paragraphs = paragraphs[1:]
    if len(paragraphs) > 1 and paragraphs[-1].startswith(DAPO_END):
        paragraphs = paragraphs[:-1]
    return "\n\n".join(paragraphs), _truth(row), {}


def deepscaler(row: dict[str, Any]) -> Found:
    return row.get("problem") or "", row.get("answer") or "", {}


def skywork(row: dict[str, Any]) -> Found:
    """The only answer in ground_truth's list; the pass rates of 16 tries by model."""
    try:
        answers = json.loads(_truth(row))
    except ValueError:
        raise Unusable(UNUSABLE) from None
    answers = answers if isinstance(answers, list) else [answers]
    if len(answers) > 1:
        raise Unusable(SEVERAL)
    failures = (row.get("extra_info") or {}).get("model_difficulty") or {}
    rates = {model: 1 - count / 16 for model, count in failures.items() if count is not None}
    return _asked(row), str(answers[0]) if answers else "", {"pass_rates": rates}


def polaris(row: dict[str, Any]) -> Found:
    """The pass rate of DeepSeek-R1-Distill-Qwen-7B in 8 tries."""
    solved, _, tries = str(row.get("difficulty") or "").partition("/")
    rates = {"DeepSeek-R1-Distill-Qwen-7B": int(solved) / int(tries)} if tries else {}
    return row.get("problem") or "", str(row.get("answer") or ""), {"pass_rates": rates}


LAYOUTS: dict[str, Callable[[dict[str, Any]], Found]] = {
    "dapo": dapo,
    "deepscaler": deepscaler,
    "skywork": skywork,
    "polaris": polaris,
}


def _asked(row: dict[str, Any]) -> str:
    messages = row.get("prompt")
    user = (
        [m.get("content") or "" for m in messages if m.get("role") == "user"]
        if isinstance(messages, list)
        else []
    )
    return "\n".join(user)


def _truth(row: dict[str, Any]) -> str:
    return str((row.get("reward_model") or {}).get("ground_truth") or "")


def converted(name: str, source: str, dropped: Dropped, counts: Counter[str]) -> Iterator[Row]:
    """The usable rows of one data set, the question as their prompt."""
    for raw in raw_rows(source):
        counts["rows"] += 1
        try:
            if not isinstance(raw.row, dict):
                raise Unusable(UNUSABLE)
            question, answer, metadata = LAYOUTS[name](raw.row)
            if not question.strip() or not answer.strip():
                raise Unusable(UNUSABLE)
        except Unusable as error:
            dropped.note(str(error), raw)
            continue
        metadata |= {DATA_SOURCE: name}
        yield Row(raw.number, question.strip(), answer.strip(), metadata, file=raw.file)


def prepare(
    sources: list[tuple[str, str]], output: Path, evaluation: list[str], seed: int
) -> dict[str, Counter[str]]:
    """Write the mixed rows, in an order that the seed decides. For each data set:
    rows, what was dropped, kept.
    """
    skip = DataConfig(on_bad_row="skip")
    evaluated = [row.question for file in evaluation for row in read_rows(file, skip, Dropped())]
    screen = Screen("normalised", evaluated, drop_evaluated=True)
    counts: dict[str, Counter[str]] = {}
    lines: list[str] = []
    for name, source in sources:
        count, dropped = counts.setdefault(name, Counter()), Dropped()
        for row in screen.kept(converted(name, source, dropped, count), dropped):
            lines.append(_line(row))
            count["kept"] += 1
        count.update(dropped.counts)
    random.Random(seed).shuffle(lines)
    atomic_write(output, "".join(lines))
    return counts


def _line(row: Row) -> str:
    content = f"{row.prompt}\n\n{INSTRUCTION}"
    metadata = dict(row.metadata)
    written = {
        "prompt": [{"role": "user", "content": content}],
        "label": row.label,
        DATA_SOURCE: metadata.pop(DATA_SOURCE),
        "metadata": metadata,
    }
    return json.dumps(written, ensure_ascii=False) + "\n"


def print_counts(counts: dict[str, Counter[str]]) -> None:
    """A row for each data set; every reason for which anything was dropped is a column."""
    reasons = dict.fromkeys(
        reason for count in counts.values() for reason in count if reason not in ("rows", "kept")
    )
    columns = ("rows", *reasons, "kept")
    table = Table("data set", *columns)
    for name, count in counts.items():
        table.add_row(name, *(f"{count[column]:,}" for column in columns))
    table.add_row(
        "all", *(f"{sum(count[column] for count in counts.values()):,}" for column in columns)
    )
    Console().print(table)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 2: something only the user can fix, in one line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sources", nargs="+", metavar="LAYOUT=SOURCE", help=f"LAYOUT: {', '.join(LAYOUTS)}"
    )
    parser.add_argument("--output", required=True, type=Path, help="a .jsonl file")
    parser.add_argument(
        "--evaluation", action="append", default=[], metavar="SOURCE", help="problems to leave out"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order (0)")
    options = parser.parse_args(arguments)
    try:
        sources = [_source(text) for text in options.sources]
        counts = prepare(sources, options.output, options.evaluation, options.seed)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_counts(counts)
    print(f"written: {options.output}")
    return 0


def _source(text: str) -> tuple[str, str]:
    name, separator, source = text.partition("=")
    if not separator or name not in LAYOUTS:
        raise UserError(f"{text!r} is not LAYOUT=SOURCE; LAYOUT is one of {', '.join(LAYOUTS)}")
    return name, source


if __name__ == "__main__":
    sys.exit(main())
