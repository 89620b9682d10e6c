"""report.html: one self-contained page of a run, of a comparison or of several of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_stare.config import UserError
from megatron_stare.reporting.page.content import content_of
from megatron_stare.reporting.page.render import render
from megatron_stare.reporting.page.watch import server
from megatron_stare.system import atomic_write

REPORT_NAME = "report.html"


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


def watch(directories: Sequence[Path], port: int) -> None:
    """Serve the page on loopback until it is interrupted."""
    with server(directories, port) as serving:
        print(f"http://127.0.0.1:{serving.server_port}/ (Ctrl-C ends it)", flush=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            print("no longer served", flush=True)
