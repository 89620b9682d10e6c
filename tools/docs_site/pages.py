"""A hook of mkdocs: the version in the footer, formulas as MathML, tables that a phone can show.

Formulas are written as $x$ and $$x$$, as on GitHub; MathML needs no script and no font from the
network. On a narrow screen a table's row becomes a card (docs/site.css), in which every value has
the heading of its column.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[2]
_FORMULA = re.compile(r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.S)
_TABLE = re.compile(r"<table>.*?</table>", re.S)
_CELL = re.compile(r"<td(?=[ >])")


def on_config(config: Any) -> Any:
    """Name the version, from the package."""
    text = (ROOT / "megatron_stare/__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found is not None, "megatron_stare/__init__.py holds no __version__"
    config.copyright = (
        f'megatron_stare {found[1]} - <a href="{{base}}changelog.html">changelog</a> - Apache-2.0'
    )
    return config


def on_post_page(output: str, page: Any, **rest: Any) -> str:
    """Lead the footer's link to the changelog from any folder; name the theme's search dialog,
    which has no name for a screen reader.
    """
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"')
    return output.replace("{base}", "../" * page.url.count("/"))


def on_page_content(content: str, **rest: Any) -> str:
    """The page's HTML with formulas and labelled cells."""
    return _TABLE.sub(_labelled, _FORMULA.sub(_mathml, content))


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    return str(convert(html.unescape(match[2]).strip(), display=display))


def _labelled(match: re.Match[str]) -> str:
    """The table, with the heading of its column at every cell."""
    table = match[0]
    heads = [
        re.sub(r"<[^>]+>", "", head) for head in re.findall(r"<th[^>]*>(.*?)</th>", table, re.S)
    ]
    rows = table.split("<tr>")
    for number, row in enumerate(rows):
        labels = iter(heads)
        rows[number] = _CELL.sub(lambda _, of=labels: f'<td data-label="{next(of, "")}"', row)
    return "<tr>".join(rows)
