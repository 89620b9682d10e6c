"""The shell commands of README.md, AGENTS.md and docs/: those of its indented and fenced blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.paths import ROOT

PAGES = (ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md")))
# What begins a command: a program, or a file of the repository; `VARIABLE=value` may stand before.
_PROGRAMS = (
    "python|python3|pip|hf|make|torchrun|pytest|cat|ls|cp|mv|rm|mkdir|cd|export|git|bash|sh|curl|wget|"
    "docker|sudo|apt-get|conda|uv|sbatch|srun|squeue|scancel|ssh|rsync|kill|tail|nvidia-smi|env|"
    "source|tensorboard"
)
_COMMAND = re.compile(
    rf"(\$ )?([A-Z][A-Z_0-9]*=\S* +)*(({_PROGRAMS})(?= |$)|(\./|\.venv|tools/|benchmarks/|\.ci/)\S)"
)
# Up to a comment: a sign outside of quotes, behind a space.
_UNCOMMENTED = re.compile(r"""(?:'[^']*'|"[^"]*"|(?<!\s)\#|[^'"\#])*""")


def commands() -> dict[str, list[str]]:
    """Command -> the pages where it stands, in the order of the pages."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for command in commands_in(page.read_text(encoding="utf-8")):
            found.setdefault(command, []).append(page.name)
    return found


def commands_in(text: str) -> Iterator[str]:
    """Every command of a page on one line, without its prompt and its comment.

    A line behind `$ ` is one in any case, so that no program is overlooked there.
    """
    lines = _block_lines(text)
    for line in lines:
        if not line.startswith("$ ") and not _COMMAND.match(line):
            continue
        while line.endswith("\\"):
            line = f"{line[:-1].rstrip()} {next(lines).strip()}"
        yield _UNCOMMENTED.match(line.removeprefix("$ "))[0].strip()


def _block_lines(text: str) -> Iterator[str]:
    """The lines of fenced blocks, and those indented by four that follow a blank or such a line."""
    fenced, inside = False, True  # a page may begin with a block
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
            inside = False
        elif fenced:
            yield line.strip()
        elif not line.strip():
            inside = True
        elif inside and line.startswith("    "):
            yield line.strip()
        else:
            inside = False
