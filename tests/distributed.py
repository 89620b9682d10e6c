"""Real process groups in a test: `run_distributed` spawns gloo ranks on
this machine and brings their results back.

Starting ranks costs time, so a test module starts them once and does all its checks inside one
module-level function. A rank that raises takes the others down with it and its
own traceback is what the test sees.
"""

from __future__ import annotations

import datetime
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from megatron_stare.policy import runtime

COLLECTIVE_TIMEOUT_S = 60.0
GRACE_S = 3.0
PRELOADED = ["tests.preloaded"]


def fork_server() -> Any:
    """A multiprocessing context whose processes have imported the slow libraries beforehand
    (tests/preloaded.py). With a GPU they are spawned, because CUDA does not survive a fork. On the
    null device CUDA survives a fork before any memory is allocated; TransformerEngine allocates
    memory on import, and is not preloaded.
    """
    if Path("/dev/nvidiactl").exists():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NULLCUDA_WITHOUT_TE", "1")
        forkserver.ensure_running()  # with a device, its environment stays
    return context


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 240.0,
    backend: str = "gloo",
) -> list[Any]:
    """[function(rank, world_size, *args) for every rank],
    each in its own process of one world, in rank order. `backend`: gloo, nccl, or one per device.

    `function` lives at module level; `args` and the results are picklable (tensors on CPU are). One
    thread per rank. Raises RuntimeError with the traceback of the rank that failed first, or that
    names the ranks still running after `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = start_ranks(function, world_size, folder, *args, backend=backend)
        try:
            _wait(ranks, Path(folder), time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        return [_result(Path(folder), rank, process.exitcode) for rank, process in enumerate(ranks)]


class LayoutResults(dict[Any, list[Any]]):
    """Layout, or a tuple that begins with it -> its results, one per rank. All quick layouts of a
    world size run when the first of them is asked for, and so do the slow ones.

    `train(rank, world_size, directory, names)` returns a rank's results of these layouts by key;
    `layouts` has them by world size.
    """

    def __init__(
        self,
        train: Callable[..., dict[Any, Any]],
        directory: Path | str,
        layouts: dict[int, dict[str, Any]],
        quick: Collection[str],
        timeout_s: float = 240.0,
    ) -> None:
        super().__init__()
        self.train, self.directory, self.timeout_s = train, str(directory), timeout_s
        self.layouts, self.quick = layouts, quick

    def __missing__(self, key: Any) -> list[Any]:
        layout = key if isinstance(key, str) else key[0]
        size = next(size for size, named in self.layouts.items() if layout in named)
        names = [n for n in self.layouts[size] if (n in self.quick) == (layout in self.quick)]
        arguments = (size, self.directory, names)
        ranks = run_distributed(self.train, *arguments, timeout_s=self.timeout_s)
        self.update({each: [rank[each] for rank in ranks] for each in ranks[0]})
        return self[key]


def start_ranks(
    function: Callable[..., Any], world_size: int, folder: str, *args: Any, backend: str = "gloo"
) -> list[Any]:
    """Start the processes of `run_distributed`, for tests that kill some of them.
    `folder`: an empty folder for their rendezvous and results.
    """
    context = fork_server()
    ranks = [
        context.Process(
            target=_one_rank, args=(function, rank, world_size, folder, args, backend), daemon=True
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    return ranks


def _one_rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    args: tuple[Any, ...],
    backend: str,
) -> None:
    """The main function of a rank: join the world, call the function,
    write the result (or the traceback) to the folder.
    """
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    try:
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend,
            # a file instead of a port, which another process could take meanwhile
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        # On the null device the fork server lacks tests.preloaded if a run's workers started it.
        runtime.prepare()
        outcome = pickle.dumps(function(rank, world_size, *args))
        dist.barrier()
        dist.destroy_process_group()
        _leave(Path(folder), f"result-{rank}", outcome)
    except BaseException:
        _leave(Path(folder), f"failure-{rank}", traceback.format_exc().encode())
        os._exit(1)


def _leave(folder: Path, name: str, content: bytes) -> None:
    """Write a file that appears whole or not at all."""
    partial = folder / f"{name}.partial"
    partial.write_bytes(content)
    partial.rename(folder / name)


def _wait(ranks: list[Any], folder: Path, deadline: float) -> None:
    """Wait until every rank has ended; raise for the first failed rank,
    without waiting for peers that hang because of it.
    """
    while any(process.is_alive() for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode not in (None, 0)]
        if failed:
            _wait_for_grace(ranks)
            break
        if time.monotonic() > deadline:
            alive = [rank for rank, process in enumerate(ranks) if process.is_alive()]
            raise RuntimeError(f"ranks {alive} of {len(ranks)} were still running at the deadline")
        time.sleep(0.02)
    failures = sorted(folder.glob("failure-[0-9]*"), key=lambda path: path.stat().st_mtime_ns)
    failures = [path for path in failures if path.suffix != ".partial"]
    if failures:
        rank = failures[0].name.rsplit("-", 1)[1]
        raise RuntimeError(f"rank {rank} of {len(ranks)} failed:\n{failures[0].read_text()}")


def _wait_for_grace(ranks: list[Any]) -> None:
    """Wait a moment for peers that fail for the same reason."""
    end = time.monotonic() + GRACE_S
    while time.monotonic() < end and any(process.is_alive() for process in ranks):
        time.sleep(0.02)


def _result(folder: Path, rank: int, exit_code: int | None) -> Any:
    path = folder / f"result-{rank}"
    if not path.exists():
        raise RuntimeError(f"rank {rank} ended with exit code {exit_code} and left no result")
    return pickle.loads(path.read_bytes())
