"""The worker processes of a run."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from megatron_stare.collect.journal import journal_directory, start_attempt
from megatron_stare.collect.rounds import RolloutWorkers, decoded_together
from megatron_stare.collect.workers.channel import memory_of
from megatron_stare.collect.workers.process_worker import ProcessWorker, Weights
from megatron_stare.collect.workers.worker_main import WorkerParts, WorkerSettings
from megatron_stare.config import Config
from megatron_stare.policy.topology import Topology
from megatron_stare.rollout.sglang.pool_replica import Report, Snapshot
from megatron_stare.rollout.sglang.weights import bytes_of


class WorkerProcesses:
    """The worker processes of a run. They run on the first node: `workers` is empty on every rank
    but 0.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        build: Callable[[Config], WorkerParts],
    ) -> None:
        """The processes start at once and are ready when the trainer is. `build` runs in each."""
        self._config = config
        count = config.rollout.workers if topology.is_first else 0
        on_gpu = config.rollout.engine == "embedded" and torch.cuda.is_available()
        device = torch.cuda.current_device() if on_gpu else None
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # One process imports what all of them need; all workers are forked from it.
        multiprocessing.get_context("forkserver").set_forkserver_preload([build.__module__])
        attempts = functools.cache(functools.partial(start_attempt, journal_directory(config)))
        self.workers = [
            ProcessWorker(
                WorkerSettings(config, build, number, count, local_ranks, device), attempts
            )
            for number in range(count)
        ]

    def announce(self, snapshot: Snapshot) -> Sequence[Future[Report | None]]:
        """Send every process the state of the servers."""
        return [worker.announce(snapshot) for worker in self.workers]

    def evaluate(self, problems: Any, kept: Any) -> Sequence[Future[Sequence[Any]]]:
        """Sample and judge an evaluation set; prompts that are decoded together go to one process.
        The futures have the problems of Examiner.problems.
        """
        together = decoded_together(self._config, problems.samples)
        workers = RolloutWorkers([0], self._config.rollout.workers, self.workers)
        owners = workers.assigned(problems.prompts, together)
        return [
            worker.evaluate(
                problems,
                [place for place, (_, owner) in enumerate(owners) if owner == number],
                kept,
            )
            for number, worker in enumerate(self.workers)
        ]

    def abort(self) -> None:
        """Abort all requests of all processes."""
        for worker in self.workers:
            worker.abort()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load weights into every process's embedded engine, from memory that all of them map."""
        if not self.workers:
            return
        named = list(weights)
        table = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
        file = memory_of(bytes_of(tensor) for _, tensor in named)
        for worker in self.workers:
            worker.load_weights(Weights(version, table, file))

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.close()
