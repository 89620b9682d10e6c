"""The report's page of runs of 1, 200 and 10,000 steps: seconds to write, size, seconds to open.

    python benchmarks/report_page.py                       # a table
    python benchmarks/report_page.py --steps 1,200,10000 --output pages/    # and the pages

The runs are synthetic (benchmarks/_synthetic_run.py), written through the real logbook and
diagnostics, with diagnostics on every tenth step or on 100 of them. To open: Chromium without a
window, from navigation until everything is laid out and painted (tools/browser/install; without a
browser that column is empty).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._synthetic_run import write_run
from megatron_stare.reporting.report import write_report

PAINTED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", default="1,200,10000")
    parser.add_argument("--output", type=Path, help="where the pages stay")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        print("  steps   write    size  to open   nodes")
        for steps in (int(each) for each in options.steps.split(",")):
            run = write_run(
                Path(scratch) / str(steps), steps, every=max(1, min(10, steps), steps // 100)
            )
            page = (options.output or Path(scratch)) / f"report_{steps}.html"
            begun = time.perf_counter()
            write_report([run], page)
            written = time.perf_counter() - begun
            size = page.stat().st_size / 2**20
            opened, nodes = open_page(browser, page) if browser else (None, None)
            shown = "      -        -" if opened is None else f"{opened:7.2f}s {nodes:7d}"
            print(f"{steps:7d} {written:6.2f}s {size:5.2f}MiB {shown}", flush=True)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser, or None where there is none."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        yield None
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(browser: Any, path: Path) -> tuple[float, int]:
    """Seconds from navigation to paint, and the elements there are then."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    begun = time.perf_counter()
    page.goto(path.resolve().as_uri())
    page.wait_for_selector("#about")
    page.wait_for_selector("#entropy canvas")
    page.evaluate(PAINTED)
    seconds = time.perf_counter() - begun
    nodes = page.evaluate("document.querySelectorAll('*').length")
    page.close()
    return seconds, nodes


if __name__ == "__main__":
    main()
