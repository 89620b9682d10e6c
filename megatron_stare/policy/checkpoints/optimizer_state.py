"""The optimizer's state as pieces of whole tensors: each rank writes and reads what it holds.

Megatron-Core 0.19 offers two forms for its distributed optimizer: `fully_reshardable`, which loads
under any layout and gathers a whole replica's state on every rank to save it, and `dp_reshardable`,
which gathers nothing and loads under the same tensor and pipeline layout only. The form here loads
under any layout and gathers nothing. A rank of the distributed optimizer holds elements
[start, stop) of a parameter's shard, flattened; these elements are cut into boxes (rows in part,
whole rows, rows in part), and a box is an ordinary piece of the whole tensor. An optimizer that is
not distributed holds whole shards, and reads and writes the same form.

The step is not saved: one update is one step of optimizer and schedule alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_stare.policy.optimizer import MOMENTS, mains, parts

PREFIX = "optimizer.state."
MASTER = "fp32_param"  # the fp32 copy of a weight of half precision


class ParameterState(NamedTuple):
    """The state of one parameter's elements [start, start + n) as this rank holds it:
    n-element tensors by name.
    """

    parameter: Tensor
    start: int
    tensors: dict[str, Tensor]


def pieces(optimizer: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Megatron's descriptions of the state on this rank, for saving, and for loading in place.

    weights: `model_state.sharded_weights`, which knows each parameter's place in the whole model.
    """
    places = _places(weights)
    found: list[Any] = []
    for part in parts(optimizer):
        is_shared_out = part.config.use_distributed_optimizer
        for held in _held(part):
            for name, tensor in held.tensors.items():
                key = PREFIX + f"{name}."
                for place in _built(places[id(held.parameter)], key):
                    found += _boxes_of(place, held.start, tensor.detach(), is_shared_out)
    return {str(number): piece for number, piece in enumerate(found)}


def make_room(optimizer: Any, step: int) -> None:
    """Zero moments for `pieces` to load into, and the step at which the optimizer continues."""
    for part in parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                # torch's Adam counts in a tensor of each parameter's own, fused ones in the group
                if isinstance(part.optimizer, torch.optim.Adam):
                    part.optimizer.state[parameter]["step"] = torch.tensor(float(step))
            if not isinstance(part.optimizer, torch.optim.Adam):
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


def _held(part: Any) -> Iterator[ParameterState]:
    """Every parameter of which this rank holds state."""
    for parameter, start, main in mains(part):
        tensors = {name: part.optimizer.state[main][name] for name in MOMENTS}
        if main.dtype != parameter.dtype:  # else it is the weight itself
            tensors[MASTER] = main
        yield ParameterState(parameter, start, tensors)


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
