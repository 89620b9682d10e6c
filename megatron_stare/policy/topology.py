"""Process groups, made once and passed on: the only reader of Megatron's global parallel state."""

from __future__ import annotations

import datetime
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_stare.config import EngineError, NoSignalError, PolicyConfig, TaskSolved, UserError
from megatron_stare.config.environment import prepare_environment
from megatron_stare.numerics.selection import Across
from megatron_stare.policy import runtime
from megatron_stare.system import return_memory, unseen_gpus

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
# Of the world and of all groups that Megatron splits off it. Tensors in host memory, pickled
# objects and barriers use gloo: a rank that waits in NCCL occupies multiprocessors that the servers
# on its GPU need.
BOTH_BACKENDS = "cpu:gloo,cuda:nccl"

Node = tuple[str, str]  # host name and torchrun's number of the node


@dataclass(frozen=True)
class Topology:
    """This rank's process groups, read from `groups`, Megatron's ProcessGroupCollection.

    `data` joins the ranks that hold different tokens of one batch; batch-wide sums run over it.
    `expert` joins the ranks that divide a layer's experts among them, `expert_tensor` those that
    split one expert; both cut across the others.
    """

    groups: Any
    rank: int
    world_size: int
    tensor: ProcessGroup
    pipeline: ProcessGroup
    context: ProcessGroup
    data: ProcessGroup
    expert: ProcessGroup
    expert_tensor: ProcessGroup
    host: ProcessGroup  # of all ranks, for tensors in host memory and for control
    data_rank: int  # of this rank's part of the sequences; the same on its context-parallel ranks
    data_size: int
    context_rank: int
    context_size: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    expert_rank: int
    places: tuple[tuple[int, int], ...]  # data_rank and context_rank of every rank, in rank order
    virtual_size: int

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the head, which computes losses and statistics."""
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def across(self) -> Across:
        """Exact reductions over everything the ranks of `data` hold."""
        return Across(self.data if dist.get_world_size(self.data) > 1 else None)

    def ranks_of_tokens(self, data_rank: int, context_rank: int) -> tuple[int, ...]:
        """The ranks that train on one data rank's sequences, cut for one context rank."""
        place = (data_rank, context_rank)
        return tuple(rank for rank, own in enumerate(self.places) if own == place)

    def from_last_stage(self, value: Tensor) -> Tensor:
        """The last pipeline stage's `value` on every stage; others pass a buffer of its shape."""
        if self.pipeline_size > 1:
            dist.broadcast(
                value,
                dist.get_global_rank(self.pipeline, self.pipeline_size - 1),
                group=self.pipeline,
            )
        return value

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank. For what does not grow with tokens:
        it is pickled, and every rank's takes the room of the largest.
        """
        return gather_values(value, self.host)


@contextmanager
def session(config: PolicyConfig, seed: int = 0) -> Iterator[Topology]:
    """`start` on entry, `stop` on exit, where the memory of models in cycles becomes free."""
    try:
        yield start(config, seed)
    finally:
        stop()
        return_memory()


def start(config: PolicyConfig, seed: int = 0) -> Topology:
    """Join the process group that torchrun describes (or one of a
    single process) and split it as configured.

    Raises UserError where the sizes cannot be laid out on this world, or torch sees no GPU on a
    machine with a driver.
    """
    if not torch.cuda.is_available() and (fault := unseen_gpus(torch.version.cuda)):
        raise UserError(fault)
    runtime.prepare()
    from megatron.core import parallel_state

    joined = dist.is_initialized()
    world_size = dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))
    _check_sizes(config, world_size)
    prepare_environment(config)
    if torch.cuda.is_available():
        # A warning names operations without a deterministic kernel.
        torch.use_deterministic_algorithms(config.deterministic, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if not joined:
        _join(world_size)
    _connect()
    if parallel_state.model_parallel_is_initialized():
        _leave_groups()
    return _split(config, seed)


@contextmanager
def imagined(config: PolicyConfig, rank: int, world_size: int) -> Iterator[Topology]:
    """This process as one rank of an imagined world: groups have sizes and ranks, and what
    is sent over them goes nowhere. For models without storage, and for sizes in memory. UserError
    as of `start`.
    """
    runtime.prepare()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "a process stands in one world"
    _check_sizes(config, world_size)
    prepare_environment(config)
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    sys.excepthook = hook  # torch's writes [rank0]: before each line of a traceback, for good
    try:
        yield _split(config, seed=0, is_imagined=True)
    finally:
        stop()


def _split(config: PolicyConfig, seed: int, is_imagined: bool = False) -> Topology:
    """The world's groups, and Megatron's random state. A rank of an imagined world knows no other
    rank's place.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import random as megatron_random

    virtual = config.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_size(config),
        create_gloo_process_groups=False,
    )
    megatron_random.model_parallel_cuda_manual_seed(seed + 1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    host = _world() if is_imagined else _host_group()
    own = dist.get_rank(groups.dp), dist.get_rank(groups.cp)
    places = [own] if is_imagined else gather_values(own, host)
    return Topology(
        groups=groups,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor=groups.tp,
        pipeline=groups.pp,
        context=groups.cp,
        data=groups.dp_cp,
        expert=groups.ep,
        expert_tensor=groups.expt_tp,
        host=host,
        data_rank=own[0],
        data_size=dist.get_world_size(groups.dp),
        context_rank=own[1],
        context_size=dist.get_world_size(groups.cp),
        tensor_size=dist.get_world_size(groups.tp),
        pipeline_rank=dist.get_rank(groups.pp),
        pipeline_size=dist.get_world_size(groups.pp),
        expert_rank=dist.get_rank(groups.ep),
        places=tuple(places),
        virtual_size=virtual,
    )


def this_node() -> Node:
    """The node of this rank: its machine, of which torchrun may have made several."""
    return socket.gethostname(), os.environ.get("GROUP_RANK", "")


def gather_values(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """`Topology.gather` over one group; None: over all ranks."""
    everything: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everything, value, group=group)
    return everything


def agreed[T](topology: Topology, work: Callable[[], T]) -> list[T]:
    """The results of `work` on all ranks, on every rank; none may grow with tokens. Collective.

    An exception on one rank is raised on all of them, so that they can save together: a UserError
    as it is, any other as an EngineError that names the rank.
    """
    outcome: tuple[str, Any] = ("", None)
    failure: Exception | None = None
    try:
        outcome = ("", work())
    except Exception as error:
        failure, outcome = error, (type(error).__name__, str(error))
    everyone = topology.gather(outcome)
    if isinstance(failure, UserError | EngineError):
        raise failure
    for rank, (kind, text) in enumerate(everyone):
        for known in (TaskSolved, NoSignalError, UserError):
            if kind == known.__name__:
                raise known(text)
        if kind:
            raise EngineError(f"rank {rank}: {kind}: {text}") from failure
    return [value for _, value in everyone]


def release_workspaces() -> None:
    """Give device memory back that holds nothing between updates: Megatron's buffer of gathered
    sequences and its tables of rotary angles (of up to 32 lengths, 16 MiB each for 32k positions of
    width 128), cuBLAS's workspaces, and the blocks that the allocator keeps for later.
    """
    runtime.prepare()
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.get_global_memory_buffer().buffer.clear()
        _forget_angles()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def stop() -> None:
    """Leave the process group, if there is one; a later `start` may join another."""
    if not dist.is_initialized():
        return
    from megatron.core import parallel_state

    _forget_angles()  # their keys are modules, which have process groups
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _forget_angles() -> None:
    """Empty Megatron's caches of rotary angles."""
    from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding

    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()


def _world() -> ProcessGroup:
    assert dist.group.WORLD is not None, "the world was joined"
    return dist.group.WORLD


def _host_group() -> ProcessGroup:
    """The world's group, or a new group if the world has no backend for host memory."""
    world = _world()
    if torch.device("cpu") in world._device_types:
        return world
    return dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)


def _leave_groups() -> None:
    """Megatron forgets its groups but leaves their threads and sockets,
    some sixty threads a layout over gloo.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    held = list(vars(ProcessGroupCollection.use_mpu_process_groups()).values())
    held.append(parallel_state.get_tensor_and_data_parallel_group())  # in no collection
    parallel_state.destroy_model_parallel()
    groups = {id(group): group for group in held if isinstance(group, ProcessGroup)}
    for group in groups.values():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def expert_tensor_size(config: PolicyConfig) -> int:
    """Ranks over which one expert is split: as given, else as every other layer is."""
    return config.expert_tensor_parallel_size or config.tensor_model_parallel_size


def _check_sizes(config: PolicyConfig, world_size: int) -> None:
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    context = config.context_parallel_size
    if world_size % (tensor * pipeline * context):
        raise UserError(
            f"policy.tensor_model_parallel_size={tensor} x pipeline_model_parallel_size={pipeline} "
            f"x context_parallel_size={context} = {tensor * pipeline * context} does not divide "
            f"the {world_size} process(es) of this run; start a multiple of it with torchrun "
            "--nproc-per-node, or lower a size"
        )
    expert, split = config.expert_model_parallel_size, expert_tensor_size(config)
    if world_size % (expert * split * pipeline):
        raise UserError(
            f"policy.expert_model_parallel_size={expert} x expert_tensor_parallel_size={split} x "
            f"pipeline_model_parallel_size={pipeline} = {expert * split * pipeline} does not "
            f"divide the {world_size} process(es) of this run; start a multiple of it with "
            "torchrun --nproc-per-node, or lower a size"
        )
    if config.virtual_pipeline_model_parallel_size > 1 and pipeline == 1:
        raise UserError(
            "policy.virtual_pipeline_model_parallel_size="
            f"{config.virtual_pipeline_model_parallel_size} needs "
            "policy.pipeline_model_parallel_size above 1; set it to 1"
        )
    if config.sequence_parallel and tensor == 1:
        raise UserError(
            "policy.sequence_parallel=true needs policy.tensor_model_parallel_size above 1; set it "
            "to false"
        )


def _connect() -> None:
    """Make the world's communicator on GPUs, over which any two ranks send to each other later.
    `device_id` in the init would at once make one for each of Megatron's groups, used or not.
    """
    world = _world()
    if torch.cuda.is_available() and torch.device("cuda") in world._device_types:
        dist.all_reduce(torch.zeros(1, device=runtime.device()))


def _join(world_size: int) -> None:
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(_own_gpu())
        backend = BOTH_BACKENDS
    hook = sys.excepthook
    alone: dict[str, Any] = {}
    if "RANK" not in os.environ:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": world_size}
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, **alone)
    if hook.__module__ == dist.distributed_c10d.__name__:
        sys.excepthook = hook  # each call wraps the last one's, which writes [rank0]: once more


def _own_gpu() -> int:
    """The number of this rank's GPU on its node. UserError: the node has fewer."""
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= count:
        raise UserError(
            f"rank {number} of this node has no GPU: torch sees {count} "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r}); lower "
            "torchrun's --nproc-per-node, or give the process more GPUs"
        )
    return number
