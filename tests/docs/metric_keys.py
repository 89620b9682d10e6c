"""The keys of metrics.jsonl that docs/metrics.md explains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/metrics.md"


def unexplained(keys: Iterable[str]) -> list[str]:
    """The keys that are in no first column of the page; <...> matches anything."""
    rows = PAGE.read_text(encoding="utf-8").splitlines()
    first = [row.split("|")[1] for row in rows if row.startswith("| `")]
    shown = {key for cell in first for key in re.findall(r"`([^`]+)`", cell)}
    forms = [re.compile(re.sub(r"<\w+>", r".+", key)) for key in shown]
    return sorted(key for key in set(keys) if not any(form.fullmatch(key) for form in forms))
