"""docs/configuration.md: every setting, by section."""

from __future__ import annotations

import dataclasses
import inspect

from megatron_stare.commands.configuration import shown
from megatron_stare.config import Config, lookup
from megatron_stare.config.run import settings
from megatron_stare.config.section import Setting

_PREAMBLE = """# Configuration reference

<!-- Made by `python -m tools.pages` from the sections in megatron_stare/config/; a test
     compares both. -->

A run's configuration is one tree of sections. A recipe fills it in, a run writes it to
`config.yaml`, and every field can be overridden on the command line as `section.field=value`. An
unknown field, a value of another type or out of range ends the command at once, with the nearest
name or the values that are allowed. So does a field that nothing in the run reads, e.g.
`mismatch.upper=2` without `mismatch.correction`, or `tools.max_turns=4` without
`tools.environment`. Fields of a recipe that an override leaves without a reader return to their
defaults: `tools.environment=` turns off a recipe's tools with all their fields. The section
`sandbox` and most of `sglang` may stay as they are while nothing reads them.

A value is written as in YAML: `[a, b]` is a list, `{a: 1}` a mapping. A text is taken as it stands,
with `#` and `: ` in it; one that begins with a bracket or a quote needs quotes of its own, as in
`'scoring.format_pattern="[0-9]"'`.

    python -m megatron_stare config quickstart optimizer.lr=5e-4
    python -m megatron_stare config quickstart --only loss

prints what a run would use, field by field, and where each value comes from: the default, the
recipe (or a run's `config.yaml`), or your override.

A run can also be started from a YAML file of your own with the sections below. Editors complete and
check it by a JSON Schema, which `python -m megatron_stare config --schema schema.json` writes and
the first line of the YAML names: `# yaml-language-server: $schema=schema.json`.
"""


def page() -> str:
    """docs/configuration.md: a table for every section."""
    parts = [_PREAMBLE]
    for section in dataclasses.fields(Config):
        purpose = inspect.getdoc(type(lookup(Config(), section.name))) or ""
        parts.append(f"## {section.name}\n\n{_prose(' '.join(purpose.split()))}\n")
        rows = [each for key, each in settings().items() if key.startswith(f"{section.name}.")]
        parts.append("| field | default | values | what |\n| --- | --- | --- | --- |")
        parts[-1] += "".join(f"\n{_row(each, section.name)}" for each in rows) + "\n"
    return "\n".join(parts)


def _row(setting: Setting, section: str) -> str:
    default = shown(setting.key, setting.default)
    if len(default) > 40:
        default = "a list" if isinstance(setting.default, list) else "a mapping"
    quoted = f"`{default}`" if default else ""
    values = setting.values.replace(" | ", ", ")
    name = setting.key.removeprefix(f"{section}.")
    cells = (f"`{name}`", quoted, values, _prose(setting.description))
    return f"| {' | '.join(cell.replace('|', '\\|') for cell in cells)} |"


def _prose(sentence: str) -> str:
    """A sentence as Markdown: its stars, underscores and angle brackets are no markup."""
    quoted = sentence.split("`")
    for place in range(0, len(quoted), 2):
        for sign in ("\\", "*", "_", "<"):
            quoted[place] = quoted[place].replace(sign, f"\\{sign}")
    return "`".join(quoted)
