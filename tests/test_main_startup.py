"""Commands that only tell are quick to start: they import none of the large libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.paths import ROOT

HEAVY = ("torch", "transformers", "megatron.core", "matplotlib", "sympy", "pyarrow")
LIGHT = (
    ["--version"],
    ["--help"],
    ["recipes"],
    ["config", "quickstart"],
    ["completion", "bash"],
    ["train", "quikstart"],
    ["report", "/nowhere"],
    ["grade", "/nowhere.jsonl", "--output", "/nowhere.out"],
    ["bundle", "/nowhere", "1"],
)
PROGRAM = f"""
import contextlib, io, json, sys
from megatron_stare.__main__ import main
said = []
for arguments in {LIGHT!r}:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(arguments)
        except SystemExit:
            pass
    imported = [name for name in {HEAVY!r} if name in sys.modules]
    said.append([arguments, imported, out.getvalue()])
print(json.dumps(said))
"""


def test_commands_that_only_tell_import_nothing_large() -> None:
    """One after the other in one process, each with what has been imported by then."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    told = json.loads(done.stdout)
    assert {tuple(arguments): imported for arguments, imported, _ in told} == {
        tuple(arguments): [] for arguments in LIGHT
    }
    said = {arguments[0]: text for arguments, _, text in told}
    assert "torch 2." in said["--version"] and "megatron_stare 0." in said["--version"]
    assert "short_cot_7b" in said["recipes"] and "optimizer.lr=0.001" in said["config"]
