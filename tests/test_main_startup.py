"""Commands that only print start quickly: they import none of the large libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from megatron_stare.debug.doctor import on_gpu
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
    ["algorithms"],
    ["plan", "nosuch"],
    ["plan", "short_cot_7b", "optimizer.rate=1"],
    ["plan"],
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


def python(program: str) -> str:
    """The output of a separate process."""
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ).stdout


def test_commands_that_only_print_import_nothing_large() -> None:
    """One command after the other in one process, each with the modules imported by then."""
    found = json.loads(python(PROGRAM))
    assert {tuple(arguments): imported for arguments, imported, _ in found} == {
        tuple(arguments): [] for arguments in LIGHT
    }
    said = {" ".join(arguments[:2]): text for arguments, _, text in found}
    assert "torch 2." in said["--version"] and "megatron_stare 0." in said["--version"]
    assert "short_cot_7b" in said["recipes"] and "optimizer.lr=0.001" in said["config quickstart"]
    assert said["plan nosuch"].startswith("error: recipe 'nosuch' is unknown")
    assert "2606.19236" in said["algorithms"]


@pytest.mark.skipif(on_gpu(), reason="with a GPU it is torch that is asked")
def test_doctor_imports_nothing_large_without_a_gpu() -> None:
    program = f"""
import sys
from megatron_stare.__main__ import main
main(["doctor"])
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = python(program)
    assert "WARN CUDA: no GPU is seen" in done
    assert done.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["recipes", "config quickstart", "--help", "algorithms"])
def test_a_closed_pipe_gives_no_traceback(command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_stare", *command.split()],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
