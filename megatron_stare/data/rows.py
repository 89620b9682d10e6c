"""Rows in slime's and verl's formats.

slime: {"prompt": str | [messages], "label": str, "metadata": {...}}
verl:  {"prompt": [messages], "data_source": str, "reward_model": {"ground_truth": str},
        "extra_info": {...}}
Both may have "tools": [JSON schemas of functions]. Messages, tools and metadata may be JSON text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_stare.config import DATA_SOURCE, DataConfig, UserError
from megatron_stare.data.sources import RawRow, raw_rows

_MESSAGES = re.compile(r'\s*\[\s*\{\s*"(?:role|content)"\s*:')  # as JSON text


@dataclass(frozen=True)
class Row:
    """One problem as its author wrote it; `prompt` is text, or chat messages with role and content.

    `number` is its place in `file`, from 1: the line of a .jsonl, the row of a table.
    """

    number: int
    prompt: str | list[dict[str, Any]]
    label: str
    metadata: dict[str, Any]
    tools: tuple[dict[str, Any], ...] = ()
    file: str = ""

    @property
    def question(self) -> str:
        """The question: the text, or the user's messages, one to a line."""
        if isinstance(self.prompt, str):
            return self.prompt
        asked = [message.get("content") for message in self.prompt if message["role"] == "user"]
        return "\n".join(
            content if isinstance(content, str) else json.dumps(content) for content in asked
        )


class BadRow(Exception):
    """A row that cannot be used; the message names its field. `reason` is the heading under which
    it is counted.
    """

    def __init__(self, message: str, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class Dropped:
    """Rows that were left out: how many for each reason, and the first of each."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def refuse(self, row: Row | RawRow, fault: BadRow, config: DataConfig) -> None:
        """Leave an unusable row out, or end the run by a UserError, as data.on_bad_row says."""
        if config.on_bad_row == "error":
            raise UserError(
                f"{row.file}, row {row.number}: {fault}; correct it or set data.on_bad_row=skip"
            ) from None
        self.note(fault.reason, row, str(fault))

    def note(self, reason: str, row: Row | RawRow, detail: str = "") -> None:
        """One more row left out."""
        self.counts[reason] += 1
        self.first.setdefault(reason, f"row {row.number}{': ' if detail else ''}{detail}")

    @property
    def total(self) -> int:
        return self.counts.total()

    def __str__(self) -> str:
        return "; ".join(
            f"{count} {reason} (first: {self.first[reason]})"
            for reason, count in self.counts.items()
        )


def read_rows(source: str, config: DataConfig, dropped: Dropped) -> Iterator[Row]:
    """The usable rows of a source, one by one; others are refused by `dropped`. UserError: no row
    was usable.
    """
    usable = 0
    for raw in raw_rows(source):
        try:
            row = _row(raw, config)
        except BadRow as error:
            dropped.refuse(raw, error, config)
            continue
        usable += 1
        yield row
    if not usable:
        raise UserError(
            f"{source}: no usable row ({dropped.total} skipped); give at least one problem"
        )


def _row(raw: RawRow, config: DataConfig) -> Row:
    if raw.fault:
        raise BadRow(raw.fault)
    row = raw.row
    if not isinstance(row, dict):
        raise BadRow("is not a JSON object")
    if config.input_key not in row:
        raise BadRow(
            f"has no field {config.input_key!r} (it has {', '.join(map(str, row)) or 'none'}; "
            "data.input_key names the field of the problem)"
        )
    return Row(
        raw.number,
        _prompt(row[config.input_key], config.input_key),
        label_of(row, config),
        metadata_of(row, config),
        tools_of(row, config.tool_key),
        raw.file,
    )


def label_of(row: dict[str, Any], config: DataConfig) -> str:
    """The row's label: a text as it is, numbers and lists as JSON, a table's dates and decimals as
    text. BadRow: there is none, or it is bytes, whose encoding no table names.
    """
    label = row.get(config.label_key)
    if label is None:
        judge = row.get("reward_model")
        label = judge.get("ground_truth") if isinstance(judge, dict) else None
    if label is None or label != label:  # NaN is a missing value of a table
        raise BadRow(
            f"has neither {config.label_key!r} nor reward_model.ground_truth (it has "
            f"{', '.join(map(str, row))}; data.label_key names the field of the answer)"
        )
    if isinstance(label, bytes):
        raise BadRow("the label is bytes; store the column as text")
    if isinstance(label, int | float | list | dict):
        return json.dumps(label, ensure_ascii=False, default=str)
    return str(label)


def checked_text(text: str, what: str) -> str:
    """The text. BadRow: it holds half of a surrogate pair, which JSON can spell and no tokenizer
    takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise BadRow(f"{what} holds {half}, half of a surrogate pair, which is no text") from None
    return text


def metadata_of(row: dict[str, Any], config: DataConfig) -> dict[str, Any]:
    """The row's metadata; its key `data_source` names the row's data set, if the row does. BadRow:
    the metadata is not an object.
    """
    key = config.metadata_key if row.get(config.metadata_key) is not None else "extra_info"
    metadata = _decoded(row.get(key), key)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict):
        raise BadRow(f"field {key!r} is {type(metadata).__name__}, not an object")
    source = row.get(config.source_key) or metadata.get(config.source_key)
    return metadata | ({DATA_SOURCE: str(source)} if source else {})


def _prompt(value: Any, key: str) -> str | list[dict[str, Any]]:
    """A text, or messages, which a table may hold as JSON text. BadRow: neither."""
    if isinstance(value, str) and value and not _MESSAGES.match(value):
        return value
    value = _decoded(value, key)
    if isinstance(value, list) and value:
        for message in value:
            if (
                not isinstance(message, dict)
                or not isinstance(message.get("role"), str)
                or (message.get("content") is None and not message.get("tool_calls"))
            ):
                raise BadRow(f"field {key!r} holds a message without role and content")
        return value
    raise BadRow(f"field {key!r} must be a non-empty string or list of messages")


def _decoded(value: Any, key: str) -> Any:
    """The value; of a text, the JSON in it, and None for an empty text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value else None
    except ValueError:
        raise BadRow(f"field {key!r} is text but no JSON") from None


def tools_of(row: dict[str, Any], key: str) -> tuple[dict[str, Any], ...]:
    """The row's function schemas. BadRow: field `key` holds something else."""
    value = _decoded(row.get(key), key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) and tool for tool in value):
        raise BadRow(f"field {key!r} must be a list of function schemas")
    return tuple(_without_nulls(tool) for tool in value)


def _without_nulls(value: Any) -> Any:
    """Tables give every tool all the fields that any of them has, empty ones as null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
