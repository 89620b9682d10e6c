"""`config SOURCE [overrides]`: every field with its value, where that comes from, and what it is
for; docs/configuration.md is made of the same fields.

A line is an override that may be given as it stands, behind which follows a comment:

    optimizer.lr=0.001  # recipe, default 1e-06. learning rate after warm-up
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from typing import Any

from megatron_stare.config import Config
from megatron_stare.config.described import Field, fields, sections
from megatron_stare.config.limits import lookup
from megatron_stare.config.overrides import SECRETS

_VALUE_COLUMN = 48
# What YAML reads as itself: no sign that it would take for its own, and no number.
_PLAIN = re.compile(r"(?=\D)[\w./-][\w./ -]*|")


def text(base: Config, config: Config, source: str, only: str = "") -> str:
    """A line for every field of `config`.

    `base` is the recipe's or file's own Config, before overrides; `source` says which of both it
    is. `only`: a section, or the beginning of a dotted key.
    """
    lines = []
    for key, field in fields().items():
        if key.startswith(only):
            origin = origin_of(field, lookup(base, key), lookup(config, key), source)
            said = ". ".join(filter(None, [origin, field.comment]))
            lines.append(f"{assignment(key, lookup(config, key)):{_VALUE_COLUMN}}  # {said}")
    return "\n".join(lines)


def origin_of(field: Field, base: Any, value: Any, source: str) -> str:
    """`default`, `override` or `source`, the latter two with the default that they replace."""
    if value == field.default:
        return "default" if value == base else f"override, {source} {_shown(field.key, base)}"
    told = f"default {_shown(field.key, field.default) or 'empty'}"
    if value == base:
        return f"{source}, {told}"
    if base == field.default:
        return f"override, {told}"
    return f"override, {source} {_shown(field.key, base)}, {told}"


def assignment(key: str, value: Any) -> str:
    """section.field=value, as a shell takes it."""
    return shlex.quote(f"{key}={_shown(key, value)}")


def _shown(key: str, value: Any) -> str:
    """A value as an override writes it; what is secret as stars."""
    if key in SECRETS and value:
        return "***"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else json.dumps(value)
    if isinstance(value, dict):
        value = {
            name: {k: v for k, v in dataclasses.asdict(each).items() if v is not None}
            if dataclasses.is_dataclass(each) and not isinstance(each, type)
            else each
            for name, each in value.items()
        }
    return json.dumps(value)


def page() -> str:
    """docs/configuration.md: a table for every section."""
    parts = [_PREAMBLE]
    for section, said in sections().items():
        parts.append(f"## {section}\n" + (f"\n{_prose(said)}\n" if said else ""))
        rows = [field for key, field in fields().items() if key.startswith(f"{section}.")]
        parts.append("| field | default | values | what |\n| --- | --- | --- | --- |")
        parts[-1] += "".join(f"\n{_row(field, section)}" for field in rows) + "\n"
    return "\n".join(parts)


def _row(field: Field, section: str) -> str:
    default = _shown(field.key, field.default)
    if len(default) > 40:
        default = "a list" if isinstance(field.default, list) else "a mapping"
    shown = f"`{default}`" if default else ""
    values = field.limits.replace(" | ", ", ") or field.kind
    name = field.key.removeprefix(f"{section}.")
    return f"| `{name}` | {_cell(shown)} | {_cell(values)} | {_cell(_prose(field.comment))} |"


def _cell(content: str) -> str:
    return content.replace("|", "\\|")


def _prose(comment: str) -> str:
    """Text of a comment as Markdown: its stars, underscores and angle brackets are no markup."""
    quoted = comment.split("`")
    for place in range(0, len(quoted), 2):
        for sign in ("\\", "*", "_", "<"):
            quoted[place] = quoted[place].replace(sign, f"\\{sign}")
    return "`".join(quoted)


_PREAMBLE = """# Configuration reference

<!-- Made by `python -m megatron_stare config --page docs/configuration.md` from the dataclasses
     in megatron_stare/config/; a test holds it to them. -->

A run's configuration is one tree of frozen dataclasses. A recipe fills it in, a run writes it to
`config.yaml`, and every field can be overridden on the command line as `section.field=value`. An
unknown field, a value of another type or out of range ends the command at once, with the nearest
name or the values that are allowed.

    python -m megatron_stare config quickstart optimizer.lr=5e-4
    python -m megatron_stare config quickstart --only loss

prints what a run would use, field by field, and where each value comes from: the default, the
recipe (or a run's `config.yaml`), or your override.
"""
