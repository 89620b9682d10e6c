"""`--version`: this package with its commit, and the versions that decide how it behaves."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

from megatron_stare import __version__

ROOT = Path(__file__).parents[3]
_SHOWN = ("torch", "megatron-core", "transformers")


def text() -> str:
    """One line each; nothing is imported to find out."""
    lines = [f"megatron_stare {__version__}{_commit()}", f"python {platform.python_version()}"]
    for name in _SHOWN:
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed")
    return "\n".join(lines)


def _commit() -> str:
    """The commit of a checkout, marked where files were changed; nothing for an installation."""
    if not (ROOT / ".git").exists():
        return ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f" (commit {done.stdout.strip()})" if done.returncode == 0 else ""
