"""Which of some lines were executed, in this process and in those it starts.

NULLCUDA_LINES names a folder that holds `wanted.json`, {file: [line, ...]}. Every process on the
device appends the wanted lines that it executes to a file of its own there, each when it is first
executed, so that a process that is killed has reported as well.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any

FOLDER = "NULLCUDA_LINES"
_TOOL = 4  # of sys.monitoring; unused by debuggers, coverage and profilers


def want(folder: Path, lines: dict[str, list[int]]) -> None:
    """Sets the lines that later processes look for; this one too."""
    (folder / "wanted.json").write_text(json.dumps(lines))
    os.environ[FOLDER] = str(folder)
    start()


def start() -> None:
    """Watch, if there is something to look for."""
    folder = os.environ.get(FOLDER)
    if not folder or sys.monitoring.get_tool(_TOOL):
        return
    wanted = {
        file: set(lines)
        for file, lines in json.loads(Path(folder, "wanted.json").read_text()).items()
    }
    seen: set[tuple[str, int]] = set()
    monitoring, events = sys.monitoring, sys.monitoring.events

    def entered(code: CodeType, offset: int) -> Any:
        lines = wanted.get(code.co_filename)
        if lines and any(line in lines for _, _, line in code.co_lines()):
            monitoring.set_local_events(_TOOL, code, events.LINE)
        return monitoring.DISABLE

    def executed(code: CodeType, line: int) -> Any:
        found = (code.co_filename, line)
        if line in wanted.get(code.co_filename, ()) and found not in seen:
            seen.add(found)
            with open(f"{folder}/{os.getpid()}.seen", "a", encoding="utf-8") as file:
                file.write(f"{line} {code.co_filename}\n")
        return monitoring.DISABLE

    monitoring.use_tool_id(_TOOL, "nullcuda")
    monitoring.register_callback(_TOOL, events.PY_START, entered)
    monitoring.register_callback(_TOOL, events.LINE, executed)
    monitoring.set_events(_TOOL, events.PY_START)


def seen(folder: Path) -> set[tuple[str, int]]:
    """(file, line) of everything wanted that some process executed."""
    found = set()
    for file in folder.glob("*.seen"):
        for row in file.read_text(encoding="utf-8").splitlines():
            line, _, path = row.partition(" ")
            found.add((path, int(line)))
    return found
