"""report.html: one self-contained page of a run, of a comparison or of several of them; written, or
served while they train.

The page needs nothing else: style, scripts and data are inside.

What a model wrote is hostile text. It travels as JSON in which no `<`, no character beyond ASCII
and no control character stands as itself, and the scripts only ever set it as text. A content
security policy names the one script and the one style by their hashes, so that nothing else runs,
and nothing is fetched (`live`: only from the page's own server).
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from megatron_stare.config import UserError
from megatron_stare.reporting.page.content import content_of
from megatron_stare.system import BestEffort, atomic_write, digest

REPORT_NAME = "report.html"
# In the order in which they build on one another.
SCRIPTS = ("marks.js", "plot.js", "lines.js", "areas.js", "inside.js", "rollouts.js", "page.js")
# The chart library, version 1.6.32 of the npm package `uplot` as published (MIT); its licence is
# passed on inside the page. tests/reporting/test_report_page.py holds the digests of the files.
LIBRARY, LIBRARY_STYLE = "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css"
LIBRARY_LICENSE = "uplot/LICENSE"


def write_report(directories: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page, whole or not at all, and return its path: `output`, or report.html in the one
    directory. UserError: a directory holds neither a run nor a comparison, or several have no
    output.
    """
    if output is None:
        if len(directories) != 1:
            raise UserError("several runs share one page: name the file with --output FILE.html")
        output = Path(directories[0]) / REPORT_NAME
    page = render(content_of(directories))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(output, page)
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror or error}; give another") from None
    return output


def keep_report(run: Path) -> None:
    """`write_report` of a run or comparison that has ended. What keeps it from the page, such as a
    full disk, is a warning.
    """
    keep = BestEffort(f"`report {run}` writes the page once that is fixed", UserError)
    keep(lambda: write_report([run]))


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


def watch(directories: Sequence[Path], port: int) -> None:
    """Serve the page on loopback until it is interrupted."""
    with server(directories, port) as serving:
        print(f"http://127.0.0.1:{serving.server_port}/ (Ctrl-C ends it)", flush=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            print("no longer served", flush=True)


HOST = "127.0.0.1"
_WATCHED = (
    *("metrics.jsonl", "alarms.jsonl", "starts.jsonl", "summary.json", "config.yaml"),
    "diagnostics/step_*.json.gz",
)
_RUNS = ("", "seed*/*/")  # of a directory: itself, and the runs of a comparison


class LivePage:
    """The page as of the newest files: built again only when one of them has changed."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = [Path(directory) for directory in directories]
        self._lock = threading.Lock()
        self._seen: list[tuple[str, int, int]] | None = None
        self._body, self._tag = b"", ""

    def current(self) -> tuple[bytes, str]:
        """The page and its tag, which changes with it."""
        with self._lock:
            seen = self._state()
            if seen != self._seen:
                self._body = render(content_of(self.directories), live=True).encode("utf-8")
                self._tag = f'"{digest(self._body, 32)}"'
                self._seen = seen
            return self._body, self._tag

    def _state(self) -> list[tuple[str, int, int]]:
        """Name, time and size of every file that the page is made of."""
        found = []
        for directory, run, name in itertools.product(self.directories, _RUNS, _WATCHED):
            for path in directory.glob(run + name):  # records and checkpoints have many files
                try:
                    status = path.stat()
                except FileNotFoundError:  # replaced at this moment: the next look sees it
                    continue
                found.append((str(path), status.st_mtime_ns, status.st_size))
        return sorted(found)


def server(directories: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server of one page at http://127.0.0.1:port/ (0: a free port); the caller runs and closes
    it. UserError: the runs cannot be read, or the port is taken.

    It answers only requests that name this machine's loopback, so that no page from elsewhere can
    read it under a name of its own.
    """
    page = LivePage(directories)
    page.current()

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "megatron_stare", ""

        def do_GET(self) -> None:
            name = self.headers.get("Host", "").rsplit(":", 1)[0]
            if name not in (HOST, "localhost"):
                return self._answer(421, b"", {})
            if self.path.split("?")[0] != "/":
                return self._answer(404, b"", {})
            try:
                body, tag = page.current()
            except UserError as error:  # a file is being written: the page that is open stays
                return self._answer(503, str(error).encode("utf-8", "replace"), {})
            if self.headers.get("If-None-Match") == tag:
                return self._answer(304, b"", {"ETag": tag})
            return self._answer(200, body, {"ETag": tag, "Content-Type": "text/html;charset=utf-8"})

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in ({"Content-Type": "text/plain;charset=utf-8"} | headers).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Requests are no news."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise UserError(
            f"--port {port}: {error.strerror or error}; give another one, or 0 for any that is free"
        ) from None
