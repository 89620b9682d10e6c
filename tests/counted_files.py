"""safetensors files that count the bytes that are read from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor


class CountedFile:
    """Replaces `safe_open`; `count` is the number of bytes read so far, from all files."""

    count = 0

    def __init__(self, file: Path, framework: str) -> None:
        self.opened = safe_open(file, framework=framework)

    def __enter__(self) -> CountedFile:
        self.content = self.opened.__enter__()
        return self

    def __exit__(self, *exception: Any) -> Any:
        return self.opened.__exit__(*exception)

    def get_slice(self, name: str) -> CountedSlice:
        return CountedSlice(self.content.get_slice(name))


class CountedSlice:
    """A tensor of such a file."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __getitem__(self, index: Any) -> Tensor:
        part: Tensor = self.rows[index]
        CountedFile.count += part.nbytes
        return part
