"""Megatron-Core's own wrappers, optimizer and schedule around a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron_stare.config import OptimizerConfig, PolicyConfig, TuningConfig, UserError
from megatron_stare.policy import build, runtime
from megatron_stare.policy.topology import Topology

MOMENTS = ("exp_avg", "exp_avg_sq")
ALIGNMENT = 512  # bytes, of a tensor in host memory


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
    # Our coefficients already carry the global denominator: reduce the gradients, divide by
    # nothing.
    transformer.finalize_model_grads_func = functools.partial(_sum_gradients, finalize_model_grads)
    return wrapped


def _sum_gradients(
    finalize: Callable[..., None], model: list[nn.Module], num_tokens: Tensor, **groups: Any
) -> None:
    finalize(model, None, **groups)


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


def to_host(optimizer: Any, runnable: list[Any], block: Tensor) -> Tensor:
    """Move the optimizer's moments and fp32 copies to host memory, and free the gradient buffers,
    which hold nothing between updates. Weights stay. All tensors lie in one block: `block`, the
    result of the last call, if they fit into it, else a new one, which is returned.

    Megatron's own `offload_to_cpu` would take fp32 weights along, out of their buffers.
    """
    owned = list(_owned(optimizer))
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in owned]
    if block.numel() < sum(sizes):
        block = _pinned(sum(sizes), block)
    for tensor, part in zip(owned, block[: sum(sizes)].split(sizes), strict=True):
        host = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = host.copy_(tensor.detach())
    free_gradients(runnable)
    return block


def _pinned(size: int, old: Tensor) -> Tensor:
    """A block of host memory in the place of `old`. With CUDA it is registered: torch's own pinned
    memory has a power of two of bytes, up to twice what is asked for.
    """
    on_gpu = torch.cuda.is_available()
    cudart: Any = torch.cuda.cudart() if on_gpu else None
    if on_gpu and old.numel():
        torch.cuda.check_error(cudart.cudaHostUnregister(old.data_ptr()))
    block = torch.empty(size, dtype=torch.uint8, device="cpu")
    if on_gpu and size:
        torch.cuda.check_error(cudart.cudaHostRegister(block.data_ptr(), size, 0))
    return block


def to_device(optimizer: Any, runnable: list[Any]) -> None:
    """Bring back what `to_host` moved, out of its block; gradient buffers are zero."""
    for tensor in _owned(optimizer):
        tensor.data = tensor.data.to(runtime.device(), copy=True)
    restore_gradients(runnable)


def free_gradients(runnable: list[Any]) -> None:
    """Give back the gradient buffers' memory; freed ones stay so."""
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
