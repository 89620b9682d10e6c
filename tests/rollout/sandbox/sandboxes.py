"""The isolations that can be tested here, and how to see what a sandbox leaves behind."""

from __future__ import annotations

import functools
import os
import re
import tempfile
from pathlib import Path

import pytest

from megatron_stare.config import SandboxConfig, UserError
from megatron_stare.rollout.sandbox import interpreter
from megatron_stare.rollout.sandbox.sandbox import Sandbox

# Users and directories of this test run and its processes, distinct from those of
# other runs.
BLOCK = int(os.environ.setdefault("SANDBOX_TEST_BLOCK", str(os.getpid() % 30_000)))
interpreter.FIRST_USER += BLOCK * 65_536
interpreter.LAST_USER = interpreter.FIRST_USER + 65_535
interpreter.PREFIX = f"sandbox-{BLOCK}-"
QUICK = {
    "max_concurrency": 2,
    "warm_workers": 1,
    "memory_mib": 256,
    "disk_mib": 4,
    "file_mib": 2,
    "max_processes": 8,
}
KINDS = ("bubblewrap", "limits", "limits without namespaces")


@functools.cache
def bubblewrap_refusal() -> str:
    """Why bubblewrap cannot run here; empty: it can."""
    try:
        Sandbox(SandboxConfig(isolation="bubblewrap", warm_workers=0)).close()
    except UserError as error:
        return str(error)
    return ""


def open_kind(kind: str, **changes: object) -> Sandbox:
    """A small sandbox of one of KINDS; skips the test where bubblewrap does not run."""
    if kind == "bubblewrap" and bubblewrap_refusal():
        pytest.skip(bubblewrap_refusal())
    config = SandboxConfig(isolation=kind.split()[0], **{**QUICK, **changes})
    return Sandbox(config, namespaces="without" not in kind)


class Surroundings:
    """Processes, open files and files in shared directories, to be compared."""

    def __init__(self) -> None:
        self.processes = {int(entry.name) for entry in Path("/proc").iterdir() if self._ours(entry)}
        self.descriptors = len(os.listdir("/proc/self/fd"))
        self.files = {
            str(path)
            for place in {tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"}
            for path in Path(place).glob("*")
            if path.name.startswith((interpreter.PREFIX, "escaped"))
        }

    def difference(self, later: Surroundings) -> list[str]:
        """New processes by id, the number of new descriptors, and new files."""
        new = [f"process {pid}" for pid in later.processes - self.processes]
        if later.descriptors > self.descriptors:
            new.append(f"{later.descriptors - self.descriptors} descriptors")
        return new + sorted(later.files - self.files)

    @staticmethod
    def _ours(entry: Path) -> bool:
        """Processes of sandboxed users, and sandboxes' guards."""
        if not entry.name.isdigit():
            return False
        try:
            found = re.search(rb'"user_id": (\d+)', (entry / "cmdline").read_bytes())
            user = int(found[1]) if found else entry.stat().st_uid
            return interpreter.FIRST_USER <= user <= interpreter.LAST_USER
        except OSError:
            return False
