"""Read rows in slime's and verl's formats from .jsonl and .parquet.

slime: {"prompt": str | [messages], "label": str, "metadata": {...}}
verl:  {"prompt": [messages], "data_source": str, "reward_model": {"ground_truth": str}, "extra_info": {...}}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stare.config import DataConfig, UserError


@dataclass(frozen=True)
class Row:
    """One problem as its author wrote it; `prompt` is text, or chat messages with role and content.

    `number` is its place in the file, from 1: the line of a .jsonl, the row of a .parquet.
    """

    number: int
    prompt: str | list[dict[str, Any]]
    label: str
    data_source: str
    metadata: dict[str, Any]


class BadRow(Exception):
    """Why a row cannot be used; the message names its field."""


def read_rows(path: str, config: DataConfig) -> tuple[list[Row], int]:
    """All usable rows of a file, and how many were skipped.

    A row that cannot be used is a UserError naming file, row and field, or skipped where data.on_bad_row=skip.
    """
    rows, skipped = [], 0
    for number, raw in _raw_rows(Path(path)):
        try:
            rows.append(_row(number, raw, config))
        except BadRow as error:
            if config.on_bad_row == "error":
                raise UserError(f"{path}, row {number}: {error}; correct it or set data.on_bad_row=skip") from None
            skipped += 1
    if not rows:
        raise UserError(f"{path}: no usable row ({skipped} skipped); give a file with at least one problem")
    return rows, skipped


def _raw_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(row number from 1, decoded object or None where a line is no JSON)."""
    if not path.is_file():
        raise UserError(f"data file {path} does not exist; check data.prompt_data and evaluation.eval_data")
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(
                f"{path} is no readable parquet file ({str(error).splitlines()[0]}); write it again"
            ) from None
        yield from enumerate(table.to_pylist(), start=1)
    elif path.suffix in (".jsonl", ".json"):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _decoded(line)
    else:
        raise UserError(f"data file {path} has suffix {path.suffix!r}; give .jsonl or .parquet")


def _decoded(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _row(number: int, raw: Any, config: DataConfig) -> Row:
    if not isinstance(raw, dict):
        raise BadRow("is not a JSON object")
    if config.input_key not in raw:
        raise BadRow(f"has no field {config.input_key!r} (it has {', '.join(map(str, raw)) or 'none'})")
    label = raw.get(config.label_key)
    if label is None:
        judge = raw.get("reward_model")
        label = judge.get("ground_truth") if isinstance(judge, dict) else None
    if label is None:
        raise BadRow(f"has neither {config.label_key!r} nor reward_model.ground_truth")
    key = config.metadata_key if raw.get(config.metadata_key) is not None else "extra_info"
    metadata = {} if raw.get(key) is None else raw[key]
    if not isinstance(metadata, dict):
        raise BadRow(f"field {key!r} is {type(metadata).__name__}, not an object")
    prompt = _prompt(raw[config.input_key], config.input_key)
    return Row(number, prompt, str(label), str(raw.get("data_source") or ""), metadata)


def _prompt(value: Any, key: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        for message in value:
            if (
                not isinstance(message, dict)
                or not isinstance(message.get("role"), str)
                or message.get("content") is None
            ):
                raise BadRow(f"field {key!r} holds a message without role and content")
        return value
    raise BadRow(f"field {key!r} must be a non-empty string or list of messages")
