"""A hook of mkdocs: links to files of the repository outside of docs/.

Some of these files are pages of the site (PAGES); of the others the site has copies, as plain text.
So the site is whole by itself, and a link to nothing is an error.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# The target of a Markdown link that climbs: `](../path)`, perhaps with an anchor.
# Files outside of docs/ that are pages, and the name of the page.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "slurm/README.md": "slurm.md",
}
_RELATIVE = re.compile(r"\]\((?!\w+:|#)([^)\s]+)\)")
_CLIMBING = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def outside(page: str, link: str) -> str | None:
    """The repository path that a link of `page` (a path below docs/) means; None inside docs/."""
    place = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    if place.startswith("docs/"):
        return None
    # a folder stands for the file that says what it is
    for name in ("__init__.py", "README.md"):
        if (ROOT / place / name).is_file():
            return f"{place}/{name}"
    return place if (ROOT / place).is_file() else None


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside of docs/, and a copy of every file that some page leads to."""
    for place, name in PAGES.items():
        files.append(File.generated(config, name, content=moved(place)))
    for page in list(files.documentation_pages()):
        text = page.content_string
        for match in _CLIMBING.finditer(text):
            place = outside(page.src_uri, match[1])
            if place and place not in PAGES and not files.get_file_from_path(f"source/{place}.txt"):
                content = (ROOT / place).read_text(encoding="utf-8")
                files.append(File.generated(config, f"source/{place}.txt", content=content))
    return files


def moved(place: str) -> str:
    """The text of a file of PAGES, with its links as a page of docs/ would write them."""

    def led(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(place), match[1]))
        return f"]({posixpath.relpath(target, 'docs')})"

    return _RELATIVE.sub(led, (ROOT / place).read_text(encoding="utf-8"))


def on_page_markdown(markdown: str, page: Any, **rest: Any) -> str:
    """Lead those links to the copies; others stay, so that mkdocs says what leads nowhere."""
    here = posixpath.dirname(page.file.src_uri)

    def led(match: re.Match[str]) -> str:
        place = outside(page.file.src_uri, match[1])
        if place is None:
            return match[0]
        target = PAGES.get(place, f"source/{place}.txt")
        return (
            f"]({posixpath.relpath(target, here or '.')}{match[2] or '' if place in PAGES else ''})"
        )

    return _CLIMBING.sub(led, markdown)
