"""`grade`: judge existing responses, to check a verifier on one's own outputs.

Rows are {"response": str, "label": str} (or verl's reward_model.ground_truth; optionally metadata
or extra_info, and prompt); each is written back, in order, with `reward`, `verdict` and
`extracted`; with `reward_parts` where several rewards are summed, and with `reason` where it is
unverifiable. The file is streamed, and OUT is complete or absent.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

from megatron_stare.collect.judging import build_judge
from megatron_stare.config import Config, DataConfig, UserError, override
from megatron_stare.data.rows import BadRow, label_of, metadata_of
from megatron_stare.scoring.judge import Judge
from megatron_stare.scoring.verdict import Sample, Verdict
from megatron_stare.system import atomic_file, json_line

_Row = tuple[dict[str, Any], Sample]
_BATCH = 1024  # rows judged together, at least
# batches, so that a response at its deadline does not keep the other processes waiting
_IN_FLIGHT = 3


@dataclass
class Summary:
    """Counts of the graded rows. `reward` is summed over rows that have one."""

    verdicts: Counter[str] = field(default_factory=Counter)
    reward: float = 0.0
    kills: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """The summary as lines for the terminal."""
        rows = self.verdicts.total()
        verified = rows - self.verdicts["unverifiable"]
        words = ("correct", "wrong", "unverifiable")
        counts = ", ".join(f"{self.verdicts[word]} {word}" for word in words)
        mean = f"{self.reward / verified:.4f} over {verified} verified rows" if verified else "none"
        return [
            f"rows: {rows} ({counts}); {self.skipped} skipped",
            f"mean reward: {mean}",
            f"{rows / max(self.seconds, 1e-9):,.0f} rows/s; verifier processes killed or crashed: "
            f"{self.kills}",
        ]


def grade(source: Path, target: Path, overrides: Sequence[str]) -> Summary:
    """Grade a .jsonl file into another. UserError:
    a row that cannot be graded, unless data.on_bad_row=skip.
    """
    config = override(Config(), overrides)
    if config.scoring.overlong_buffer_len or config.scoring.overlong_filter:
        raise UserError(
            "scoring.overlong_* need token counts, which rows of text do not have; leave them out "
            "of grade"
        )
    if config.scoring.shaping != "none":
        raise UserError(
            f"scoring.shaping={config.scoring.shaping} counts an episode's turns, which rows of "
            "text do not have; leave it out of grade"
        )
    if not source.is_file():
        raise UserError(f"FILE {source} does not exist; give a .jsonl file")
    if target.is_dir() or not target.parent.is_dir():
        raise UserError(f"--output {target}: its directory must exist, and it must be a file")
    try:
        with (
            contextlib.closing(build_judge(config, keep=False)) as judge,
            source.open("rb") as rows,
            atomic_file(target) as out,
        ):
            summary = _stream(rows, out, judge, config, source)
    except OSError as error:
        raise UserError(
            f"{error.filename or target}: {error.strerror}; make room or choose another place"
        ) from None
    for line in summary.lines():
        print(line)
    print(f"written: {target}")
    return summary


def _stream(rows: BinaryIO, out: IO[str], judge: Judge, config: Config, source: Path) -> Summary:
    summary, begun = Summary(), time.perf_counter()
    usable = _usable_rows(rows, config.data, source, summary)
    for batch, verdicts in _judged_batches(usable, judge):
        for (row, _), verdict in zip(batch, verdicts, strict=True):
            out.write(json_line(row | _judgement(verdict, len(judge.weights) > 1)))
            summary.verdicts[verdict.verdict] += 1
            summary.reward += verdict.value or 0.0
            summary.kills += verdict.kills
    summary.seconds = time.perf_counter() - begun
    return summary


def _judged_batches(
    rows: Iterator[_Row], judge: Judge
) -> Iterator[tuple[list[_Row], list[Verdict]]]:
    batches = _batches(rows)
    with ThreadPoolExecutor(_IN_FLIGHT) as threads:
        flying: deque[tuple[list[_Row], Future[list[Verdict]]]] = deque()
        while True:
            while len(flying) < _IN_FLIGHT and (batch := next(batches, [])):
                flying.append(
                    (batch, threads.submit(judge.verdicts, [sample for _, sample in batch]))
                )
            if not flying:
                return
            batch, verdicts = flying.popleft()
            yield batch, verdicts.result()


def _batches(rows: Iterator[_Row]) -> Iterator[list[_Row]]:
    """Batches of at least _BATCH rows, the last one aside. Neighbouring responses to one prompt are
    in one batch, because some rewards judge them together.
    """
    batch: list[_Row] = []
    for row in rows:
        if len(batch) >= _BATCH and not (row[1].prompt and row[1].group == batch[-1][1].group):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _judgement(verdict: Verdict, show_parts: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "reward": verdict.value,
        "verdict": verdict.verdict,
        "extracted": verdict.extracted,
    }
    if show_parts:
        found["reward_parts"] = verdict.parts
    return found | {"reason": verdict.reason} if verdict.reason else found


def _usable_rows(
    lines: BinaryIO, data: DataConfig, source: Path, summary: Summary
) -> Iterator[_Row]:
    """Each row with what should be judged of it; row numbers are line numbers, from 1."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _decoded(line)
            yield row, _sample(row, data)
        except BadRow as error:
            if data.on_bad_row == "error":
                raise UserError(
                    f"{source}, row {number}: {error}; correct it or set data.on_bad_row=skip"
                ) from None
            summary.skipped += 1


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadRow(f"is not UTF-8 (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise BadRow(f"is not JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(row, dict):
        raise BadRow("is not a JSON object")
    return row


def _sample(row: dict[str, Any], data: DataConfig) -> Sample:
    response = row.get("response")
    if not isinstance(response, str):
        raise BadRow(f"field 'response' is {'missing' if response is None else 'not a string'}")
    prompt = row.get(data.input_key)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt) if prompt else ""
    messages = prompt if isinstance(prompt, list) else ()
    return Sample(response, label_of(row, data), metadata_of(row, data), text, messages=messages)
