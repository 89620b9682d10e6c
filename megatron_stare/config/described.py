"""What every field of the configuration is for, read from the source of its dataclass.

A field's comment stands above it or behind it in `config/*.py`. `config` prints it, and
docs/configuration.md is made of it: one place to write it, one parser to read it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import tokenize
import typing
from dataclasses import dataclass
from typing import Any

from megatron_stare.config.limits import CHOICES, RANGES
from megatron_stare.config.stages import Config


@dataclass(frozen=True)
class Field:
    """One setting. `key` is dotted, `kind` its type as the source has it, `default` its value in
    Config(); `limits` says which values it may have, where a type alone does not.
    """

    key: str
    kind: str
    default: Any
    comment: str
    limits: str


@functools.cache
def fields() -> dict[str, Field]:
    """Every field of a Config by its dotted key, in the order of the source."""
    return {field.key: field for field in _fields_of(Config(), "")}


def sections() -> dict[str, str]:
    """The sections of a Config, and the docstring of each one's dataclass (empty: it has none)."""
    config = Config()
    return {
        field.name: _docstring(type(getattr(config, field.name)))
        for field in dataclasses.fields(config)
    }


def _docstring(kind: type) -> str:
    written = kind.__doc__ or ""
    made_up = written.startswith(f"{kind.__name__}(")  # by dataclass itself
    return "" if made_up else " ".join(written.split())


def _fields_of(node: Any, prefix: str) -> list[Field]:
    comments, found = _comments(type(node)), []
    for field in dataclasses.fields(node):
        value, key = getattr(node, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            found += _fields_of(value, f"{key}.")
        else:
            kind = typing.cast(str, field.type)  # text: annotations are not evaluated there
            found.append(Field(key, kind, value, comments[field.name], _limits(key)))
    return found


def _limits(key: str) -> str:
    if key in CHOICES:
        return " | ".join(CHOICES[key])
    if key not in RANGES:
        return ""
    low, high, inclusive = RANGES[key]
    sign = "" if inclusive else "above "
    return (
        f"{sign}{low:g}"
        + (" or more" if inclusive else "") * (high == float("inf"))
        + (f" to {high:g}" if high != float("inf") else "")
    )


def _comments(kind: type) -> dict[str, str]:
    """Field -> the comment above it and the one behind it."""
    source = inspect.getsource(kind)
    lines = source.splitlines()
    behind = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while lines[first - 2].lstrip().startswith("#"):
                first -= 1
            said = [behind.get(line, "") for line in range(first, (node.end_lineno or 0) + 1)]
            found[node.target.id] = " ".join(filter(None, said))
    return found
