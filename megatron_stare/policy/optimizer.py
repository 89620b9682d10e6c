"""Megatron-Core's own wrappers, optimizer and schedule around a model; and the optimizer's state as
pieces of whole tensors, of which each rank writes and reads what it holds.

Megatron-Core 0.19 offers two forms for the state of its distributed optimizer: `fully_reshardable`,
which loads under any layout and gathers a whole replica's state on every rank to save it, and
`dp_reshardable`, which gathers nothing and loads under the same tensor and pipeline layout only.
The form here loads under any layout and gathers nothing. A rank of the distributed optimizer holds
elements [start, stop) of a parameter's shard, flattened; these elements are cut into boxes (rows in
part, whole rows, rows in part), and a box is an ordinary piece of the whole tensor. An optimizer
that is not distributed holds whole shards, and reads and writes the same form.

The step is not saved: one update is one step of optimizer and schedule alike.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_stare.config import OptimizerConfig, PolicyConfig, TuningConfig, UserError
from megatron_stare.policy import build, runtime
from megatron_stare.policy.topology import Topology

MOMENTS = ("exp_avg", "exp_avg_sq")
ALIGNMENT = 512  # bytes, of a tensor in host memory
_PREFIX = "optimizer.state."
_MASTER = "fp32_param"  # the fp32 copy of a weight of half precision


def wrap(
    chunks: list[Any],
    runnable: list[Any],
    policy: PolicyConfig,
    tuning: TuningConfig,
    topology: Topology,
) -> list[Any]:
    """Megatron's gradient buffers and data parallelism around each runnable chunk."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    transformer: Any = chunks[0].config
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=policy.use_distributed_optimizer,
        overlap_grad_reduce=bool(tuning.overlap_grad_reduce),
    )
    wrapped = []
    for inner in runnable:
        wrapped.append(
            DistributedDataParallel(transformer, settings, inner, pg_collection=topology.groups)
        )
        wrapped[-1].broadcast_params()
    if tuning.overlap_grad_reduce:  # only the last micro-batch's gradients are sent
        pauses = [chunk.no_sync for chunk in wrapped]
        transformer.no_sync_func = pauses if len(pauses) > 1 else pauses[0]
    if tuning.gradient_accumulation_fusion:
        for module in (module for chunk in chunks for module in chunk.modules()):
            if hasattr(module, "fuse_wgrad_accumulation"):  # TransformerEngine's
                module.fuse_wgrad_accumulation = True

    def sum_gradients(model: list[nn.Module], num_tokens: Tensor, **groups: Any) -> None:
        # Our coefficients already carry the global denominator: divide by nothing.
        finalize_model_grads(model, None, **groups)

    transformer.finalize_model_grads_func = sum_gradients
    return wrapped


def build_optimizer(
    config: OptimizerConfig,
    policy: PolicyConfig,
    tuning: TuningConfig,
    chunks: list[Any],
    topology: Topology,
) -> Any:
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer

    dtype = build.DTYPES[policy.dtype]
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=policy.dtype == "bf16",
        params_dtype=dtype,
        use_distributed_optimizer=policy.use_distributed_optimizer,
        fp8_recipe=None if policy.fp8 == "none" else tuning.fp8_recipe,
    )
    return get_megatron_optimizer(
        settings, chunks, use_gloo_process_groups=False, pg_collection=topology.groups
    )


def build_scheduler(config: OptimizerConfig, optimizer: Any, total_steps: int) -> Any:
    """Warm-up from 0, then the decay style.

    Stepped before each update: the first one has lr / warm-up. Without lr_decay_iters the decay
    reaches min_lr one step after the last planned update, so that this one still learns.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    decay_steps = config.lr_decay_iters or max(total_steps, config.lr_warmup_iters) + 1
    if config.lr_warmup_iters >= decay_steps:
        raise UserError(
            f"optimizer.lr_warmup_iters={config.lr_warmup_iters} must be below "
            f"lr_decay_iters={decay_steps}; lower it"
        )
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_iters,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def resume_schedule(scheduler: Any, saved: dict[str, Any]) -> list[str]:
    """Continue at the saved step, on the schedule of the present config.

    Returns one line for each value that differs from that of the run that wrote the checkpoint.
    """
    now = scheduler.state_dict()
    changed = {"max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style", "end_wd"}
    lines = [
        f"schedule: {name} {saved[name]} -> {now[name]}, from the next update on"
        for name in sorted(changed)
        if saved[name] != now[name]
    ]
    scheduler.num_steps = saved["num_steps"]
    scheduler.step(0)
    return lines


def parts(optimizer: Any) -> list[Any]:
    """The optimizers inside it: experts have one of their own. Megatron-Core also makes one without
    content, for the dense parameters of a run that trains adapters of experts alone.
    """
    every = optimizer.chained_optimizers
    return [part for part in every if not getattr(part, "is_stub_optimizer", False)]


def mains(part: Any) -> Iterator[tuple[Tensor, int, Tensor]]:
    """(parameter of the model, first element, the optimizer's own copy or view from there on)."""
    if part.config.use_distributed_optimizer:
        for ranges in part.gbuf_ranges:
            for bucket in (bucket for buckets in ranges.values() for bucket in buckets):
                for parameter, place in bucket["param_map"].items():
                    group, order = part.model_param_group_index_map[parameter]
                    main = part.optimizer.param_groups[group]["params"][order]
                    yield parameter, place["param"].start, main
        return
    whole = zip(
        getattr(part, "float16_groups", ()),
        getattr(part, "fp32_from_float16_groups", ()),
        strict=True,
    )
    owner = {id(main): own for pair in whole for own, main in zip(*pair, strict=True)}
    for group in part.optimizer.param_groups:
        for main in group["params"]:
            yield owner.get(id(main), main), 0, main


def to_host(optimizer: Any, block: Tensor) -> Tensor:
    """Move the optimizer's moments and fp32 copies to host memory; weights stay. All tensors lie in
    one block: `block`, the result of the last call, if they fit into it, else a new one, which is
    returned.

    Megatron's own `offload_to_cpu` would take fp32 weights along, out of their buffers.
    """
    owned = list(_owned(optimizer))
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in owned]
    if block.numel() < sum(sizes):
        block = _pinned(sum(sizes))
    for tensor, part in zip(owned, block[: sum(sizes)].split(sizes), strict=True):
        host = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = host.copy_(tensor.detach())
    return block


def _pinned(size: int) -> Tensor:
    """A block of host memory. With CUDA it is registered as long as it exists: torch's own pinned
    memory has a power of two of bytes, up to twice what is asked for, and memory that is freed
    while it is registered stays pinned, at an address that cannot be registered again.
    """
    block = torch.empty(size, dtype=torch.uint8, device="cpu")
    if torch.cuda.is_available() and size:
        cudart: Any = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(block.data_ptr(), size, 0))
        weakref.finalize(block, cudart.cudaHostUnregister, block.data_ptr()).atexit = False
    return block


def to_device(optimizer: Any) -> None:
    """Bring back what `to_host` moved, out of its block."""
    for tensor in _owned(optimizer):
        tensor.data = tensor.data.to(runtime.device(), copy=True)


def free_gradients(runnable: list[Any]) -> None:
    """Give back the memory of the gradient buffers, which hold nothing between updates."""
    for chunk in runnable:
        chunk.offload_grad_buffers()


def restore_gradients(runnable: list[Any]) -> None:
    """Take it again, zeroed, where it was given back."""
    for chunk in runnable:
        if any(
            not buffer.grad_data.untyped_storage().nbytes()
            for buffer in chunk.buffers + chunk.expert_parallel_buffers
        ):
            chunk.restore_grad_buffers()


def _owned(optimizer: Any) -> Iterator[Tensor]:
    """The tensors that are the optimizer's alone."""
    for part in parts(optimizer):
        for parameter, _, main in mains(part):
            state = part.optimizer.state.get(main, {})
            yield from (state[name] for name in MOMENTS if name in state)
            if main.dtype != parameter.dtype:
                yield main


def state_pieces(optimizer: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Megatron's descriptions of the state on this rank, for saving, and for loading in place.

    weights: `model_state.sharded_weights`, which knows each parameter's place in the whole model.
    """
    places, found = _places(weights), list[Any]()
    for part in parts(optimizer):
        is_shared_out = part.config.use_distributed_optimizer
        for parameter, start, main in mains(part):
            tensors = {name: part.optimizer.state[main][name] for name in MOMENTS}
            if main.dtype != parameter.dtype:  # else it is the weight itself
                tensors[_MASTER] = main
            for name, tensor in tensors.items():
                for place in _built(places[id(parameter)], f"{_PREFIX}{name}."):
                    found += _boxes_of(place, start, tensor.detach(), is_shared_out)
    return {str(number): piece for number, piece in enumerate(found)}


def make_room(optimizer: Any, step: int) -> None:
    """Zero moments, to load `state_pieces` into; and the step at which the optimizer continues."""
    for part in parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        for group in part.optimizer.param_groups:
            if isinstance(part.optimizer, torch.optim.Adam):  # it counts for each parameter
                for parameter in group["params"]:
                    part.optimizer.state[parameter]["step"] = torch.tensor(float(step))
            else:  # a fused one counts for the group
                group["step"] = step


def boxes(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, shape) of boxes that hold elements [start, stop) of a tensor of this shape,
    flattened, in the order of the elements. At most 2 d - 1 boxes in d dimensions.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows [first, last)
    if first > last:  # all of it inside one row
        yield from _inside(shape, last, start, stop)
        return
    yield from _inside(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _inside(shape, last, last * row, stop)


def _inside(
    shape: Sequence[int], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes of a range that lies in row `index`."""
    begin = index * math.prod(shape[1:])
    for offset, size in boxes(shape[1:], start - begin, stop - begin):
        yield (index, *offset), (1, *size)


def _places(weights: dict[str, Any]) -> dict[int, Any]:
    """Each parameter's description (a sharded tensor, or a factory of several), by its identity."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    return {
        id(item.data): item
        for item in nested_values(weights)
        if isinstance(item, ShardedTensor | ShardedTensorFactory)
    }


def _built(place: Any, prefix: str) -> list[Any]:
    """The sharded tensors that make up a parameter's shard, on the meta device:
    their storage offsets say where in it they lie.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    shape = torch.empty(place.data.shape, dtype=torch.float32, device="meta")
    key = prefix + place.key
    if isinstance(place, ShardedTensorFactory):
        return list(dataclasses.replace(place, key=key, data=shape).build())
    return [dataclasses.replace(place, key=key, data=shape, dtype=shape.dtype)]


def _boxes_of(place: Any, start: int, tensor: Tensor, is_shared_out: bool) -> Iterator[Any]:
    """The pieces of `place` among the elements [start, start + n) of its parameter's shard."""
    if not place.data.is_contiguous():
        raise RuntimeError(
            f"{place.key}: Megatron cuts it into pieces that are no runs of elements"
        )
    flat, begin = tensor.view(-1), place.data.storage_offset()
    lowest = max(start - begin, 0)
    highest = min(start + flat.numel() - begin, place.data.numel())
    position = begin + lowest - start
    leading = place.prepend_axis_num
    for offset, size in boxes(place.local_shape, lowest, highest):
        count = math.prod(size)
        moved = [a + b for a, b in zip(place.global_offset[leading:], offset, strict=True)]
        size = (1,) * leading + size
        yield dataclasses.replace(
            place,
            data=flat[position : position + count].view(size),
            local_shape=size,
            global_offset=(*place.global_offset[:leading], *moved),
            prepend_axis_num=0,
            axis_fragmentations=None,  # boxes form no regular grid
            # Of the ranks that share the state out, each is the only one with its part.
            replica_id=(*place.replica_id[:2], 0) if is_shared_out else place.replica_id,
        )
        position += count
