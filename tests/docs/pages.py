"""The blocks of the pages, and the shell commands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.paths import ROOT

_OUTSIDE_OF_DOCS = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md", "slurm/README.md")
PAGES = (*(ROOT / name for name in _OUTSIDE_OF_DOCS), *sorted((ROOT / "docs").rglob("*.md")))
# A command starts with a program or a file of the repository, perhaps after `VARIABLE=value`.
_PROGRAMS = (
    "python|python3|pip|hf|make|torchrun|pytest|cat|ls|cp|mv|rm|mkdir|cd|export|git|bash|sh|curl|wget|"
    "docker|sudo|apt-get|conda|uv|sbatch|srun|squeue|scancel|ssh|rsync|kill|tail|nvidia-smi|env|"
    "source|tar|tensorboard"
)
_COMMAND = re.compile(
    rf"(\$ )?([A-Z][A-Z_0-9]*=\S* +)*(({_PROGRAMS})(?= |$)|(\./|\.venv|tools/|benchmarks/|\.ci/)\S)"
)
# Up to a comment: a # outside of quotes, after a space.
_UNCOMMENTED = re.compile(r"""(?:'[^']*'|"[^"]*"|(?<!\s)\#|[^'"\#])*""")
_TITLE = re.compile(r'title="([^"]+)"')


def commands() -> dict[str, list[str]]:
    """Command -> the pages where it stands, in the order of the pages."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for command in commands_in(page.read_text(encoding="utf-8")):
            found.setdefault(command, []).append(page.name)
    return found


def commands_in(text: str) -> Iterator[str]:
    """Every command of a page on one line, without its prompt and its comment."""
    for block in blocks(text):
        yield from block.commands


@dataclass(frozen=True)
class Block:
    """A fenced block, or consecutive lines indented by four after a blank line; `title` is the name
    of the file that the block shows.
    """

    title: str
    lines: tuple[str, ...]

    @property
    def commands(self) -> list[str]:
        """Its commands; a line that starts with `$ ` is always one, so no program is missed."""
        found, lines = [], map(str.strip, self.lines)
        for line in lines:
            if not line.startswith("$ ") and not _COMMAND.match(line):
                continue
            while line.endswith("\\"):
                line = f"{line[:-1].rstrip()} {next(lines)}"
            found.append(_UNCOMMENTED.match(line.removeprefix("$ "))[0].strip())
        return found


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a page, in their order."""
    title, fenced, after_blank = "", False, True  # a page may begin with a block
    held: list[str] = []
    for line in [*text.splitlines(), ""]:
        fence = line.lstrip().startswith("```")
        if not fence and (fenced or (after_blank and line.startswith("    "))):
            held.append(line if fenced else line.strip())
            continue
        if held:
            yield Block(title, tuple(held))
        held, title = [], ""
        after_blank = not fence and not line.strip()
        if fence:
            fenced = not fenced
            named = _TITLE.search(line)
            title = named[1] if named and fenced else ""
