"""Run Python as a user without rights, also where the tests run as root:
the protections of the sandbox for an unprivileged trainer.

A root whose interpreter lies in a closed directory (/root) shows just that interpreter to the other
user, in a mount namespace that ends with the process.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT
from tests.rollout.sandbox.sandboxes import BLOCK

USER = 700_000 + BLOCK
_BECOME = """
import ctypes, os, sys, tempfile
user, places, *command = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
def mount(kind, source, target, flags, options=None):
    if libc.mount(source.encode(), target.encode(), kind, flags, options) != 0:
        raise OSError(ctypes.get_errno(), f"mount {target}")
def closed(place):
    above = [*reversed([place, *map(str, __import__("pathlib").Path(place).parents)])]
    return next((parent for parent in above if not os.stat(parent).st_mode & 0o001), None)
hidden = {}
for place in places.split(":"):
    if closed(place):
        hidden.setdefault(closed(place), []).append(place)
if hidden:
    if libc.unshare(0x20000) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    mount(None, "none", "/", 0x44000)
for top, inside in hidden.items():
    kept = [(tempfile.mkdtemp(dir="/tmp", prefix="unprivileged-"), place) for place in inside]
    for copy, place in kept:
        mount(None, place, copy, 0x5000)
    mount(b"tmpfs", "none", top, 0, b"mode=755")
    for copy, place in kept:
        os.makedirs(place, exist_ok=True)
        mount(None, copy, place, 0x5000)
        libc.umount2(copy.encode(), 2)
        os.rmdir(copy)
os.chdir("/")
os.setgroups([])
os.setresgid(int(user), int(user), int(user))
os.setresuid(int(user), int(user), int(user))
os.execv(command[0], command)
"""


def command(*arguments: str) -> list[str]:
    """The command that starts Python with these arguments as a user without rights."""
    if os.geteuid() != 0:
        return [sys.executable, *arguments]
    places = dict.fromkeys(
        os.path.realpath(place) for place in (sys.base_prefix, sys.prefix, str(ROOT))
    )
    inner = [
        place for place in places if not any(place.startswith(other + os.sep) for other in places)
    ]
    return [
        sys.executable,
        "-I",
        "-c",
        _BECOME,
        str(USER),
        ":".join(inner),
        sys.executable,
        *arguments,
    ]


def run(*arguments: str, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
    """Run it, with nothing of this environment but what finds the project."""
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SANDBOX_TEST_BLOCK": str(BLOCK),
    }
    return subprocess.run(
        command(*arguments), env=environment, text=True, capture_output=True, timeout=timeout
    )


@functools.cache
def refusal() -> str:
    """Why nothing can be run as such a user here; empty: it can."""
    done = run("-c", "import os, megatron_stare.config; print(os.geteuid() != 0)")
    if done.stdout == "True\n":
        return ""
    said = done.stderr.strip().splitlines()[-1:]
    return f"no process of a user without rights can be started here ({said})"


SCRIPT = str(Path(__file__).with_name("victim.py"))
