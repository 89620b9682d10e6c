"""torch_memory_saver where there is no GPU memory to save: a server started with
--enable-memory-saver runs, and takes every request to release and resume as it does on a GPU, but
nothing is freed. The real package needs libcuda.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """There is no library to preload."""
    yield


class NothingToSave:
    """The one object of the package."""

    enabled = True

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        yield

    def pause(self, tag: str | None = None) -> None:
        """The memory of `tag` would be given back."""

    def resume(self, tag: str | None = None) -> None:
        """The memory of `tag` would be taken again."""


torch_memory_saver = NothingToSave()
