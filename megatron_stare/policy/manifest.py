"""SHA-256 of a checkpoint's files, in an `integrity.json` that Megatron-Core can verify too."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Buffer
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_stare.system import atomic_write, file_digest

NAME = "integrity.json"
_ALGORITHM = "sha256"


class HashedFile:
    """A new file whose SHA-256 is known when it is closed; a thread hashes while it is written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1)

    def write(self, content: Buffer) -> int:
        hashing = self._hasher.submit(self._digest.update, content)
        count = self._file.write(content)
        hashing.result()
        return count

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> str:
        """Sync to disk and close; the digest."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._hasher.shutdown()
        return self._digest.hexdigest()


class ConversionJournal:
    """The files that a conversion has finished in a directory, a line each: a kill costs the one
    that is being written. `done`: those that are still what was written, by their names.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "journal.jsonl"
        self.done: dict[str, dict[str, Any]] = {}
        for line in self._path.read_text().splitlines() if self._path.is_file() else []:
            try:
                entry = json.loads(line)
                name, digest = entry["file"], entry["sha256"]
            except (ValueError, KeyError, TypeError):
                continue  # torn by the kill: that file is written again
            if not damages(directory, {name: digest}):
                self.done[name] = entry

    def add(self, name: str, digest: str, **description: Any) -> None:
        """A file is finished."""
        self.done[name] = {"file": name, "sha256": digest, **description}
        with self._path.open("a") as journal:
            # A line that a kill has torn has no end: the next entry must not join it.
            journal.write("\n" + json.dumps(self.done[name]) + "\n")
            journal.flush()
            os.fsync(journal.fileno())

    def close(self) -> dict[str, str]:
        """Remove the journal; the digests of all files."""
        self._path.unlink()
        return {name: entry["sha256"] for name, entry in self.done.items()}


def write(directory: Path, known: dict[str, str]) -> None:
    """Write the manifest of the files in `directory`; digests that are not `known` are computed."""
    names = sorted(
        file.name for file in directory.iterdir() if file.is_file() and file.name != NAME
    )
    files = {name: known.get(name) or file_digest(directory / name) for name in names}
    text = json.dumps({"algorithm": _ALGORITHM, "files": files}, indent=1)
    atomic_write(directory / NAME, text, durable=True)


def read(directory: Path) -> dict[str, str]:
    """{file name: digest}. ValueError: there is no manifest, or it is damaged."""
    file = directory / NAME
    if not file.is_file():
        raise ValueError(f"{NAME} is missing")
    try:
        content = json.loads(file.read_text())
        if content["algorithm"] != _ALGORITHM:
            raise ValueError(f"{file}: algorithm {content['algorithm']!r} is not {_ALGORITHM!r}")
        return {str(name): str(digest) for name, digest in content["files"].items()}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error})") from None


def damages(directory: Path, files: dict[str, str]) -> list[str]:
    """The faults of files with these digests, one line each: missing, or of another content."""
    found = []
    for name, digest in files.items():
        file = directory / name
        if not file.is_file():
            found.append(f"{name} is missing")
        elif file_digest(file) != digest:
            found.append(
                f"{name} is not what was written ({file.stat().st_size} bytes; its SHA-256 differs)"
            )
    return found
