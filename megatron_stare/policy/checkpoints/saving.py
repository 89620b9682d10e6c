"""One save through megatron.core.dist_checkpointing,
split into a part that blocks training and a part that does not.

`Save` plans with all ranks and, in the background, copies this rank's tensors to host memory.
Writing and hashing this rank's files is then work for a thread. `finish` is collective again:
Megatron's metadata, the manifest. Megatron's own background save forks the process, or its helper
process survives when the trainer is killed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_stare.policy import manifest
from megatron_stare.policy.topology import Topology
from megatron_stare.system import file_digest


class SaveError(Exception):
    """A checkpoint could not be written; what was there before is untouched."""


class _Resolved:
    """The data of every item of a plan, already resolved: the writer needs no more of a planner."""

    def __init__(self, data: dict[MetadataIndex, Any]) -> None:
        self.data = data

    def resolve_data(self, item: WriteItem) -> Any:
        # Written once: a background copy is given back item by item.
        return self.data.pop(item.index)


class _Writer(FileSystemWriter):
    """torch's writer in two parts: the data taken at once,
    the files written and hashed by any thread, later.
    """

    def __init__(self, directory: Path, snapshot: bool) -> None:
        super().__init__(directory)
        self.directory, self.snapshot = directory, snapshot
        self.results: list[WriteResult] = []
        self.digests: dict[str, str] = {}
        self.failure = ""

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Called at the end of Megatron's planning."""
        self.plan = plan
        self.resolved = _Resolved(
            {item.index: self._host_copy(planner.resolve_data(item)) for item in plan.items}
        )

    def write(self) -> None:
        """Write and hash this rank's files;
        a failure is kept, for all ranks to learn of it in `Save.finish`.
        """
        try:
            results = self.write_data(self.plan, self.resolved).wait()  # type: ignore[arg-type]
            names = {result.storage_data.relative_path for result in results}
            self.digests = {name: file_digest(self.directory / name) for name in sorted(names)}
            self.results = results
        except Exception as error:
            self.failure = described(error)

    def _host_copy(self, data: Any) -> Any:
        if not isinstance(data, torch.Tensor):
            return data
        data = data.detach()
        return data.clone() if self.snapshot and data.device.type == "cpu" else data.to("cpu")


class Save:
    """A save under way; where not in the background, its files are written on construction.
    Methods are collective.
    """

    def __init__(
        self, state: dict[str, Any], directory: Path, topology: Topology, background: bool
    ) -> None:
        """Plan and take the data. SaveError on every rank if any cannot."""
        self.directory, self.topology, self.background = directory, topology, background
        self.writer = _Writer(directory, snapshot=background)
        self.metadata = _planned(state, directory, self.writer, topology)
        self.thread = threading.Thread(target=self.writer.write, name="checkpoint")
        if background:
            self.thread.start()
        else:
            self.writer.write()

    def written(self) -> bool:
        """Whether every rank has written its files; the same answer on every rank."""
        done = torch.tensor([int(not self.thread.is_alive())], dtype=torch.int32)
        dist.all_reduce(done, op=dist.ReduceOp.MIN, group=self.topology.host)
        return bool(done.item())

    def finish(self) -> None:
        """Wait for the files; then rank 0 adds Megatron's metadata and the manifest.
        SaveError on all ranks alike.
        """
        if self.background:
            self.thread.join()
        parts = self.topology.gather(
            (self.writer.failure, self.writer.results, self.writer.digests)
        )
        if failure := next((failure for failure, _, _ in parts if failure), ""):
            raise SaveError(failure)
        results = [results for _, results, _ in parts]
        digests = {name: digest for _, _, part in parts for name, digest in part.items()}
        on_first_rank(self.topology, lambda: self._conclude(results, digests))

    def _conclude(self, results: list[list[WriteResult]], digests: dict[str, str]) -> None:
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        assert self.metadata is not None, "rank 0 coordinated the plan"
        self.writer.finish(self.metadata, results)
        save_config(CheckpointingConfig("torch_dist", 1), str(self.directory))
        manifest.write(self.directory, digests)


def on_first_rank(topology: Topology, action: Callable[[], None]) -> None:
    """Run it there; SaveError on every rank where it fails. Collective."""
    failure = ""
    if topology.is_first:
        try:
            action()
        except OSError as error:
            failure = described(error)
    if failure := topology.gather(failure)[0]:
        raise SaveError(failure)


def _planned(
    state: dict[str, Any], directory: Path, writer: _Writer, topology: Topology
) -> Metadata | None:
    """Megatron's plan of a save, its data taken by the writer; what several data-parallel ranks
    hold is shared out among them. The whole checkpoint's metadata on rank 0.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import exchange_utils
    from megatron.core.dist_checkpointing.strategies import fully_parallel
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
        save_state_dict_async_plan,
    )

    metadata: Metadata | None = None

    class Strategy(strategies.TorchDistSaveShardedStrategy):
        """Megatron's checkpoint format, written by our writer."""

        def async_save(
            self, sharded_state_dict: Any, checkpoint_dir: Path, async_strategy: str = "mcore"
        ) -> Any:
            nonlocal metadata
            shares = exchange_utils.determine_main_replica_uniform_distribution(
                sharded_state_dict, topology.data
            )
            fully_parallel.distribute_main_replicas_with_precomputed_distribution(
                sharded_state_dict, topology.data, shares
            )
            named, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(
                sharded_state_dict, True
            )
            plain = strategies.mcore_to_pyt_state_dict(named, False)
            planner = strategies.MCoreSavePlanner(
                dedup_replicated_tensors=False,
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
            )
            (_, metadata, _), *_ = save_state_dict_async_plan(plain, writer, planner=planner)
            return AsyncRequest(None, (), [])

    dist_checkpointing.save(
        state, str(directory), Strategy(), async_sharded_save=True, async_strategy="mcore"
    )
    return metadata


def described(error: BaseException) -> str:
    """The root of a failure in one line."""
    while (deeper := error.__cause__ or error.__context__) is not None:
        error = deeper
    text = " ".join(str(error).split())
    return text or type(error).__name__
