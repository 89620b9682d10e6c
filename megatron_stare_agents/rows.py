"""Writes the rows of an environment of another library, for data.prompt_data of a run:

    python -m megatron_stare_agents.rows MODULE SETTINGS --count 100 > rows.jsonl

MODULE is one of verifiers_v1, verifiers_v0, open_env, text_arena and gym_tasks in this package, or
a module of yours with `rows(settings)`; SETTINGS is a JSON object, which its description explains.
It runs in the library's own Python. Each row says in its metadata what `run` of the module needs.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import sys


def use_path(settings):
    """Import from the directory settings["path"], in this process and in those that it starts."""
    path = settings.get("path")
    if path and (path := os.path.abspath(path)) not in sys.path:
        sys.path.insert(0, path)
        known = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [path, known]))


def main():
    """Write rows to stdout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module")
    parser.add_argument("settings", type=json.loads)
    parser.add_argument("--count", type=int, default=None)
    asked = parser.parse_args()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not get between the rows
    name = asked.module if "." in asked.module else f"megatron_stare_agents.{asked.module}"
    use_path(asked.settings)
    for row in itertools.islice(importlib.import_module(name).rows(asked.settings), asked.count):
        out.write(json.dumps(row, default=str) + "\n")
    out.close()


if __name__ == "__main__":
    main()
