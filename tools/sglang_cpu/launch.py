"""sglang.launch_server with its processes forked off one that has imported everything,
instead of three that import.

Importing is nearly all of a small server's start: this makes it three times cheaper. Forking is
safe here because there is no CUDA context to inherit; everything else about the server is as it
comes.
"""

from __future__ import annotations

import multiprocessing
import runpy

# What the two processes behind the HTTP server run.
import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler  # noqa: F401


def keep_fork(method: str | None, force: bool = False) -> None:
    """Stands in for multiprocessing.set_start_method, with which the server asks for spawn."""


if __name__ == "__main__":
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = keep_fork  # type: ignore[assignment]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
