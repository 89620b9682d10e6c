"""A newcomer's path, walked and timed: a fresh clone, then the pages from docs/index.md to a reward
and an agent of one's own that are trained, by nothing but what the pages say.

    python3 tools/newcomer.py

The pages are read in the order of ROUTE, each of which a page before it must link. Their files are
written and their commands run, exactly as printed and in one shell; lines that are neither, after
a command, must be in what it printed. The walk ends where a reader would be stuck: a command that
fails, a file that is not there yet, an output that is another. With Chromium on the PATH, or in
CHROMIUM, the demo's report is opened in it, without a window.

It makes the environments from nothing and trains the quickstart whole. To walk sooner:
`--environment DIR` takes a .venv that is there, with .venv-agents next to it if it is there too,
and `--more OVERRIDE` shortens every training. `--language-model` adds the README's
`make demo-llm`, about 40 minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.docs.pages import Block, blocks  # noqa: E402

ROUTE = (
    *("index.md", "install.md", "tutorials/data.md", "tutorials/reward.md", "tutorials/tool.md"),
    "tutorials/agent.md",
)
# A goal is reached by the first step with this command, or by the last step of this page.
LANGUAGE_MODEL = "make demo-llm"
GOALS = {
    "open ": "From the clone to the report",
    "tutorials/reward.md": "From there to a reward of one's own",
    "tutorials/agent.md": "From there to an agent of one's own",
    LANGUAGE_MODEL: "From there to a language model that was trained",
}
_LINK = re.compile(r"\]\(([^)#\s:]+\.md)")
# Sections that a newcomer on a laptop does not follow: they need a GPU, Docker or a model file, and
# install into the environment.
_OTHERS = ("On GPUs", "In a container", "A small language model")
_SECTION = re.compile(rf"\n## (?:{'|'.join(_OTHERS)})\n.*?(?=\n## |\Z)", re.DOTALL)
_REPORT = re.compile(r"^report: (\S+)$", re.MULTILINE)
_BROWSER_SECONDS = 120
_MARK = "=== newcomer:"


class Stuck(Exception):
    """The place at which a reader could not continue, and the reason."""


@dataclass(frozen=True)
class Step:
    """One command, with what a reader sees at its end."""

    page: str
    command: str
    seconds: float
    cpu: float  # seconds of processors, which other programs on the machine change little
    sees: str


class Shell:
    """The reader's one shell: what a command exports, activates or changes into stays."""

    def __init__(self, directory: Path) -> None:
        # Nothing of the environment that this script may itself run in.
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=directory,
            env=kept,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str) -> tuple[int, str]:
        """The exit code of a command and all that it printed."""
        assert self._bash.stdin is not None and self._bash.stdout is not None
        self._bash.stdin.write(f'{{ {command}\n}} </dev/null\necho "\n{_MARK} $?"\n')
        self._bash.stdin.flush()
        printed: list[str] = []
        for line in self._bash.stdout:
            if line.startswith(_MARK):
                return int(line.removeprefix(_MARK)), "".join(printed).rstrip("\n")
            printed.append(line)
        raise Stuck(f"{command}: the shell ended\n{''.join(printed)}")

    @property
    def cpu(self) -> float:
        """Processor seconds of all commands so far (proc(5): cutime and cstime of the shell)."""
        fields = Path(f"/proc/{self._bash.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")

    @property
    def directory(self) -> Path:
        return Path(self.run("pwd")[1])

    def close(self) -> None:
        assert self._bash.stdin is not None
        self._bash.stdin.close()
        self._bash.wait()


def walk(
    directory: Path, environment: Path | None, more: list[str], language_model: bool = False
) -> Iterator[Step]:
    """Every step, as it is done. Stuck: the reader cannot continue."""
    shell = Shell(directory)
    try:
        clone = _step(shell, "", f"git clone --quiet {ROOT} megatron_stare", [])
        yield dataclasses.replace(clone, command="git clone")
        shell.run("cd megatron_stare")
        checkout = shell.directory
        if environment:
            take_environment(environment, checkout)
            shell.run(f"export PYTHONPATH={checkout}")  # as if it were installed
        for page, text in pages(checkout / "docs"):
            for step in _read(shell, page, text, more):
                yield step
                if step.command.startswith("make demo"):
                    yield _opened(page, checkout / _REPORT.findall(step.sees)[-1])
        if language_model:
            shell.run(f"cd {checkout}")
            yield _step(shell, "README.md", LANGUAGE_MODEL, more)
        yield _learnt(checkout.parent)
    finally:
        shell.close()


def pages(docs: Path) -> Iterator[tuple[str, str]]:
    """Name and text of every page of ROUTE. Stuck: no page before it leads there."""
    known = {ROUTE[0]}
    for name in ROUTE:
        if name not in known:
            raise Stuck(f"no page before {name} links it")
        text = (docs / name).read_text(encoding="utf-8")
        known |= {os.path.normpath(Path(name).parent / link) for link in _LINK.findall(text)}
        yield name, _SECTION.sub("", text)


def _read(shell: Shell, page: str, text: str, more: list[str]) -> Iterator[Step]:
    """A page from top to bottom."""
    printed = ""
    for block in blocks(text):
        if block.title:
            content = "".join(f"{line}\n" for line in block.lines)
            (shell.directory / block.title).write_text(content, encoding="utf-8")
        elif not block.commands and printed:
            _compare(page, block, printed)
        for command in block.commands:
            step = _step(shell, page, command, more)
            printed = step.sees
            yield step


def _step(shell: Shell, page: str, command: str, more: list[str]) -> Step:
    given = command
    if more and re.search(r" train (?!.*--dry-run)", command):
        given = f"{command} {' '.join(more)}"
    if more and command in ("make demo", LANGUAGE_MODEL):
        given = f"{command} ARGS='{' '.join(more)}'"
    begin, cpu = time.monotonic(), shell.cpu
    code, printed = shell.run(given)
    if code:
        raise Stuck(f"{page}: {given}: exit code {code}\n{printed[-3000:]}")
    return Step(page, given, time.monotonic() - begin, shell.cpu - cpu, printed)


def _compare(page: str, block: Block, printed: str) -> None:
    """Checks that the page shows below a command the output of the command."""
    for line in block.lines:
        if line not in printed:
            raise Stuck(f"{page}: {line!r} is shown, and not in\n{printed[-3000:]}")


def take_environment(environment: Path, clone: Path) -> None:
    """A .venv of the clone's own, of links into one that is there, and a link to the .venv-agents
    next to it; make finds both up to date.
    """
    agents = environment.resolve().parent / ".venv-agents"
    if agents.is_dir():
        (clone / agents.name).symlink_to(agents)
    own = clone / ".venv"
    own.mkdir()
    for each in environment.resolve().iterdir():
        if each.name != ".installed":
            (own / each.name).symlink_to(each)
    (own / ".installed").touch()


def _opened(page: str, report: Path) -> Step:
    """The report in a browser, if there is one; else that it is a page."""
    command = f"open {report.name}"
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not chromium:
        if "<html" not in report.read_text(encoding="utf-8"):
            raise Stuck(f"{report} is not a page")
        sees = f"{report.stat().st_size:,} bytes; no Chromium to open it"
        return Step(page, command, 0.0, 0.0, sees)
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000")
    begin, before = time.monotonic(), os.times()
    words = [chromium, *options, "--dump-dom", report.as_uri()]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_BROWSER_SECONDS)
    except subprocess.TimeoutExpired:
        raise Stuck(f"{report} is not open after {_BROWSER_SECONDS} s in {chromium}") from None
    seconds, after = time.monotonic() - begin, os.times()
    # The page draws a figure when it comes into view, which a dump need not wait for.
    headings, figures = (done.stdout.count(tag) for tag in ("<h2", 'class="canvas"'))
    if not figures:
        raise Stuck(f"{report} has no figure in {chromium}\n{done.stderr[-3000:]}")
    cpu = sum(after[2:4]) - sum(before[2:4])
    return Step(page, command, seconds, cpu, f"{headings} sections, {figures} figures")


def _learnt(directory: Path) -> Step:
    """The rewards of every run; runs of a comparison lie deeper, one for each arm."""
    lines_found = []
    for file in sorted(directory.glob("*/runs/**/metrics.jsonl")):
        rewards = [json.loads(line)["reward"] for line in file.read_text().splitlines()]
        ends = f"{rewards[0]:.2f} to {rewards[-1]:.2f} in {len(rewards)} steps"
        name = file.parent.relative_to(directory).parts[2:]
        lines_found.append(f"{'/'.join(name)}: reward {ends}")
    if not lines_found:
        raise Stuck(f"no run in {directory}")
    return Step("", "", 0.0, 0.0, "; ".join(lines_found))


def table(steps: list[Step]) -> str:
    """The walk as Markdown: what was run, how long it took, its last line."""
    lines = ["| page | command | s | CPU s | at its end |", "| --- | --- | ---: | ---: | --- |"]
    for step in steps:
        last = (step.sees.splitlines() or [""])[-1].replace("|", "\\|")
        shown = f"`{step.command}`" if step.command else ""
        lines.append(f"| {step.page} | {shown} | {step.seconds:.1f} | {step.cpu:.1f} | {last} |")
    begin = 0
    for place, goal in GOALS.items():
        reached = [n for n, each in enumerate(steps, 1) if each.page == place]
        reached += [n for n, each in enumerate(steps, 1) if each.command.startswith(place)][:1]
        if not reached:
            continue
        part, begin = steps[begin : reached[-1]], reached[-1]
        wall, cpu = (sum(getattr(each, name) for each in part) for name in ("seconds", "cpu"))
        lines.append(f"\n{goal}: {wall:.0f} s, {cpu:.0f} s of processors.")
    return "\n".join([*lines, f"\n{os.cpu_count()} processors, {platform.machine()}."])


def main() -> int:
    """Walk, and print the table; exit code 1 where a reader would be stuck."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--environment", type=Path, metavar="DIR", help="a .venv that is there")
    parser.add_argument(
        "--more", action="append", default=[], metavar="OVERRIDE", help="for every training"
    )
    parser.add_argument("--language-model", action="store_true", help=f"also `{LANGUAGE_MODEL}`")
    options = parser.parse_args()
    steps = []
    with tempfile.TemporaryDirectory() as directory:
        try:
            words = (options.environment, options.more, options.language_model)
            for step in walk(Path(directory), *words):
                print(f"{step.seconds:8.1f} s  {step.page}: {step.command}", flush=True)
                steps.append(step)
        except Stuck as where:
            print(f"stuck in {where}", file=sys.stderr)
            return 1
    print(table(steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
