"""One HTML file from a tree; it needs nothing else: style, scripts and data are inside.

What a model wrote is hostile text. It travels as JSON in which no `<`, no character beyond ASCII
and no control character stands as itself, and the scripts only ever set it as text. A content
security policy names the one script and the one style by their hashes, so that nothing else runs,
and nothing is fetched (`live`: only from the page's own server).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any

# In the order in which they build on one another.
SCRIPTS = ("marks.js", "plot.js", "lines.js", "areas.js", "inside.js", "rollouts.js", "page.js")
# The chart library, version 1.6.32 of the npm package `uplot` as published (MIT); its licence is
# passed on inside the page. tests/reporting/page/test_render.py holds the digests of the files.
LIBRARY, LIBRARY_STYLE = "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css"
LIBRARY_LICENSE = "uplot/LICENSE"


def render(content: Mapping[str, Any], *, live: bool = False) -> str:
    """The page. `live`: it asks its server for news."""
    script, style = scripts(), _asset(LIBRARY_STYLE) + _asset("style.css")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            f"connect-src {"'self'" if live else "'none'"}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return Template(_asset("page.html")).substitute(
        policy=html.escape(policy, quote=True),
        title=html.escape(printable(str(content["title"]))),
        style=style,
        script=script,
        data=as_json(dict(content) | {"live": live}),
    )


def as_json(tree: Any) -> str:
    """JSON that may stand inside a script element: ASCII, and without `<`, `>` and `&`.

    Raises ValueError for a number that is not finite.
    """
    text = json.dumps(tree, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def printable(text: str) -> str:
    """The text with what no page can hold (lone surrogates, control characters) as U+FFFD."""
    return "".join(
        letter if letter.isprintable() or letter in " \n\t" else "\ufffd" for letter in text
    )


@cache
def scripts() -> str:
    """The page's program: one function's body, so that no name leaves it."""
    body = "\n".join(_asset(name) for name in (LIBRARY, *SCRIPTS))
    return f'/*! {_asset(LIBRARY_LICENSE)}*/\n(() => {{\n"use strict";\n{body}\n}})();\n'


@cache
def _asset(name: str) -> str:
    return (files("megatron_stare.reporting.page") / "assets" / name).read_text(encoding="ascii")


def _digest(text: str) -> str:
    value = base64.b64encode(hashlib.sha256(text.encode("ascii")).digest())
    return f"sha256-{value.decode('ascii')}"
