"""The seconds of a step outside training: rollouts on the servers, and the weight sync.

A decoding step of b sequences on a server of g GPUs reads the weights once and every sequence's
keys and values: (weights + b S kv) / g bytes; it also does 2 b W / g operations. A rollout batch
takes as long as all its tokens at that rate, and no less than its longest response takes by itself.
Of an expert model a step reads the experts that any of its tokens chose.

Prompts that are sampled again (rollout.resampling) form a second batch after the first. Their
number under UEC-RL depends on the policy: the plan gives an upper bound and no seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_stare.config import Config
from megatron_stare.planning.machine import Machine
from megatron_stare.planning.memory import cache_bytes_per_token, model_bytes
from megatron_stare.planning.work import Tokens
from megatron_stare.policy.huggingface.shape import Shape
from megatron_stare.scoring.advantages import checked_estimator

STATIC_SHARE = 0.85  # of a server's memory for weights and cache (its mem-fraction-static)


@dataclass(frozen=True)
class Serving:
    """The servers' part of one step."""

    servers: int
    weights: float  # bytes on one GPU
    cache: float  # bytes on one GPU
    concurrency: float  # sequences decoded together on one server
    tokens_a_second: float  # of all servers
    seconds: float  # without resampled rollouts whose number is unknown
    resampled: int  # rollouts of prompts sampled again; for UEC-RL an upper bound
    resampled_seconds: float | None  # None: it depends on the policy
    sync_bytes: float
    sync_seconds: float

    @property
    def fits(self) -> bool:
        """Whether a server holds its weights and at least one of the longest sequences."""
        return self.concurrency >= 1


def serving(
    config: Config, shape: Shape, rollout_gpus: int, tokens: Tokens, machine: Machine
) -> Serving:
    """The plan of rollout.over_sampling_batch_size prompts: one round of dynamic sampling."""
    gpus = config.sglang.gpus_per_server
    servers = max(1, rollout_gpus // gpus)
    weights = model_bytes(shape) / gpus
    cache = machine.memory_bytes * STATIC_SHARE - weights
    per_token = cache_bytes_per_token(shape, config)
    longest = config.data.rollout_max_prompt_len + config.rollout.rollout_max_response_len
    most = cache / (per_token * (tokens.prompt + tokens.response))
    if cache < per_token * longest:
        most = 0.0
    groups = config.rollout.over_sampling_batch_size or config.rollout.rollout_batch_size
    greedy = checked_estimator(config.scoring).greedy  # one more of each prompt, as a baseline
    rollouts = groups * (config.rollout.n_samples_per_prompt + greedy)
    resampled, is_exact = _resampled(config)
    concurrency = min(most, config.sglang.max_concurrency, rollouts / servers)
    step = _decoding_seconds(concurrency, shape, weights, per_token * tokens.seen, gpus, machine)
    rate = servers * concurrency / step
    alone = _decoding_seconds(1.0, shape, weights, per_token * longest, gpus, machine)
    least = config.rollout.rollout_max_response_len * alone
    first, second = (
        max(count * tokens.response / rate, least) if rate else float("inf")
        for count in (rollouts, resampled)
    )
    whole = model_bytes(shape)
    return Serving(
        servers=servers,
        weights=weights,
        cache=max(cache, 0.0),
        concurrency=concurrency,
        tokens_a_second=rate,
        seconds=first + (second if is_exact else 0.0),
        resampled=resampled,
        resampled_seconds=second if is_exact else None,
        sync_bytes=whole,
        sync_seconds=_sync_seconds(config, whole, machine),
    )


def _resampled(config: Config) -> tuple[int, bool]:
    """Rollouts of prompts that are sampled again, and whether the number is exact or a bound."""
    rollout, settings = config.rollout, config.rollout.resampling
    if settings.method == "aepo":
        prompts = math.ceil(settings.prompt_share * rollout.rollout_batch_size)
        return prompts * rollout.n_samples_per_prompt, True
    if settings.method == "uec_rl":
        prompts = rollout.over_sampling_batch_size or rollout.rollout_batch_size
        return prompts * settings.samples, False
    return 0, False


def _sync_seconds(config: Config, whole: float, machine: Machine) -> float:
    """Rank 0 receives and sends the weights over its own link: at the same time in a broadcast,
    except for the last bucket; one after the other with other transports.
    """
    bucket = min(whole, float(config.sglang.sync_bucket_mib << 20))
    overlapped = whole - bucket if config.sglang.sync_method == "broadcast" else 0.0
    return (2 * whole - overlapped) / machine.link_rate(machine.gpus_per_node + 1)


def _decoding_seconds(
    sequences: float, shape: Shape, weights: float, cache: float, gpus: int, machine: Machine
) -> float:
    """One token for each of these sequences; weights and cache are bytes on one GPU."""
    read = weights
    if shape.experts:
        routed = 2 * shape.expert_matrices / gpus
        untouched = (1 - shape.experts_per_token / shape.experts) ** sequences
        read -= routed * untouched
    moved = (read + sequences * cache) / (machine.memory_rate * machine.decode_share)
    products = 2 * sequences * (shape.active_matrices + shape.head) / gpus
    return moved + products / (machine.operations * machine.matrix_share) + machine.decode_latency
