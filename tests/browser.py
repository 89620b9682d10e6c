"""Chromium for tests, and axe-core's findings on a page in it.

Chromium is CHROMIUM or on the PATH; playwright's Python package drives it (make browser). npm
provides axe-core for the run of a test; it is not part of the package. A test is skipped where
something is missing.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

VERSION = "4.14.1"
# Of the package, as the registry names it.
INTEGRITY = (
    "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5"
    "qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
)
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if not CHROMIUM:
        pytest.skip("no Chromium: tools/browser/install")
    with playwright.sync_playwright() as started:
        # Without a sandbox of its own: it may run as root, and opens only what tests wrote.
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@functools.cache
def _source() -> str:
    npm = shutil.which("npm")
    if npm is None:
        return ""
    with tempfile.TemporaryDirectory() as directory:
        command = [npm, "pack", f"axe-core@{VERSION}", "--silent"]
        try:
            done = subprocess.run(command, cwd=directory, capture_output=True, timeout=120)
        except subprocess.TimeoutExpired:
            return ""
        if done.returncode:
            return ""
        package = (Path(directory) / f"axe-core-{VERSION}.tgz").read_bytes()
    digest = base64.b64encode(hashlib.sha512(package).digest()).decode("ascii")
    assert f"sha512-{digest}" == INTEGRITY, f"sha512-{digest}"
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        file = archive.extractfile("package/axe.min.js")
        assert file is not None
        return file.read().decode("utf-8")


def axe_findings(page: Any) -> list[str]:
    """The serious and critical violations on a page of playwright's: rule, elements, what to do."""
    source = _source()
    if not source:
        pytest.skip(f"npm provides no axe-core {VERSION} here")
    page.evaluate(source + "; 0")
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert found["passes"], "it has looked at the page"
    return [
        f"{each['id']} ({each['impact']}): {node['html'][:160]}: {node['failureSummary']}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


# The pixels of a figure's canvas that have a colour of the style sheet, give or take what
# antialiasing does.
PIXELS = """([selector, name, alpha]) => {
  const canvas = document.querySelector(`${selector} canvas`);
  const style = getComputedStyle(document.documentElement);
  const parts = text => [1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16));
  const ink = parts(style.getPropertyValue(name).trim());
  const wanted = ink.map((value, at) => alpha * value + (1 - alpha) * 255);
  const copy = document.createElement('canvas');
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const context = copy.getContext('2d', {willReadFrequently: true});
  context.fillStyle = style.getPropertyValue('--paper');
  context.fillRect(0, 0, copy.width, copy.height);
  context.drawImage(canvas, 0, 0);
  const {data} = context.getImageData(0, 0, copy.width, copy.height);
  let found = 0;
  for (let at = 0; at < data.length; at += 4)
    if (data[at + 3] > 200 && wanted.every((value, c) => Math.abs(data[at + c] - value) < 12))
      found += 1;
  return found;
}"""
PICTURE = "selector => document.querySelector(`${selector} canvas`).toDataURL()"
ENTROPY = "#entropy figure"


def drawn(page: Any, selector: str = ENTROPY) -> None:
    """Waits for a figure's plot."""
    page.wait_for_selector(f"{selector} canvas")
    page.wait_for_timeout(60)


def pixels(page: Any, name: str, selector: str = ENTROPY, alpha: float = 1.0) -> int:
    """The number of a figure's pixels in a colour of the style sheet, such as --arm-0; `alpha` of
    it on white.
    """
    drawn(page, selector)
    found: int = page.evaluate(PIXELS, [selector, name, alpha])
    return found
