"""The worker processes of one node, as its first rank holds them."""

from __future__ import annotations

import functools
import multiprocessing
import os
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megatron_stare.collect.journal import begin_life, journal_directory
from megatron_stare.collect.shares import Holding, Share, dealt, decoded_together
from megatron_stare.config import Config
from megatron_stare.loop.evaluation.examining import Row
from megatron_stare.loop.evaluation.sets import EvaluationSet
from megatron_stare.loop.workers.channel import memory_of
from megatron_stare.loop.workers.nodes import Nodes, all_of
from megatron_stare.loop.workers.remote import Weights, WorkerShare
from megatron_stare.loop.workers.worker import Plan
from megatron_stare.policy.topology import Topology
from megatron_stare.sync.announcement import Report, Snapshot


class Workers:
    """Implements parts.Workers and Examiners. `shares` are those of this rank, in order; `holding`
    is what it has of prompts that rank 0 decides about.
    """

    def __init__(self, config: Config, topology: Topology, ranks: Sequence[int]) -> None:
        """`ranks`: those that have workers. Their processes start at once, and are ready when the
        trainer is. Collective.
        """
        self._config, self._ranks, self._rank = config, ranks, topology.rank
        per_node = config.rollout.workers
        on_gpu = config.rollout.engine == "embedded" and torch.cuda.is_available()
        self._directory = journal_directory(config)
        self._file: BinaryIO | None = None
        # all ranks begin the same life, and the first writes it down
        life = topology.gather(uuid.uuid4().hex[:12])[0]
        lives = functools.cache(
            functools.partial(begin_life, self._directory, life=life, noted=topology.is_first)
        )
        # One process imports what all of them need, and those that die are forked from it again.
        multiprocessing.get_context("forkserver").set_forkserver_preload(
            ["megatron_stare.loop.workers.worker"]
        )
        place = list(ranks).index(topology.rank) if topology.rank in ranks else -1
        self.shares = [
            WorkerShare(
                Plan(
                    config,
                    number=number * len(ranks) + place,
                    count=len(ranks) * per_node,
                    per_node=per_node,
                    local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
                    device=torch.cuda.current_device() if on_gpu else None,
                ),
                lives,
            )
            for number in range(per_node if place >= 0 else 0)
        ]
        self.holding = Holding()
        self._nodes = Nodes(topology, ranks, per_node, self.shares, self.holding)

    def everywhere(self) -> list[Share]:
        """The shares of all nodes (Shares.everywhere), on rank 0."""
        return self._nodes.everywhere()

    def tell(self, snapshot: Snapshot) -> Sequence[Future[Sequence[Report | None]]]:
        """On rank 0: tell every process of every node of the servers; their reports."""
        own = all_of([share.tell(snapshot) for share in self.shares])
        return [own, *self._nodes.tell(snapshot)]

    def examine(
        self, one: EvaluationSet, directory: Path | None
    ) -> Sequence[Future[Sequence[Row]]]:
        """See Examiners. What one process would decode together goes to one."""
        together = decoded_together(self._config, one.samples)
        places = dealt(one.prompts, self._ranks, self._config.rollout.workers, together)
        return [
            share.examine(
                one,
                [n for n, place in enumerate(places) if place == (self._rank, number)],
                directory,
            )
            for number, share in enumerate(self.shares)
        ]

    def abort(self) -> None:
        """See Examiners."""
        for share in self.shares:
            share.abort()

    def give(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Weights for every process's embedded engine, in memory that all of them read."""
        if not self.shares:
            return
        named = [(name, tensor.detach().contiguous().cpu()) for name, tensor in weights]
        table = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
        file = memory_of(memoryview(_bytes(tensor)) for _, tensor in named)
        for share in self.shares:
            share.give(Weights(version, table, file))
        if self._file is not None:
            self._file.close()
        self._file = file

    def close(self) -> None:
        """End the processes, and the connections to other nodes."""
        self._nodes.close()
        for share in self.shares:
            share.close()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
