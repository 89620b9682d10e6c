"""The seconds of a step beside training: rollouts on the servers, and weights on their way to them.

A decoding step of b sequences on a server of g GPUs reads the weights once and every sequence's
keys and values: (weights + b S kv) / g bytes; it also does 2 b W / g operations. A rollout batch
takes as long as all its tokens at that rate, and no less than its longest response takes by itself.
Of an expert model a step reads the experts that any of its tokens chose.

Prompts that are sampled again (rollout.resampling) are a second batch after the first. How many
UEC-RL needs depends on the policy: they are given as the most there can be, and not in the seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_stare.config import Config
from megatron_stare.planning.machine import Machine
from megatron_stare.planning.memory import cache_bytes_per_token, model_bytes
from megatron_stare.planning.shapes import Shape
from megatron_stare.planning.work import Tokens
from megatron_stare.scoring.advantages import checked_estimator

STATIC_SHARE = 0.85  # of a server's memory for weights and cache (its mem-fraction-static)


@dataclass(frozen=True)
class Sampling:
    """Rollouts of one step. `concurrency`: sequences decoded together on one server. `seconds` are
    of all rollouts whose number is known.
    """

    servers: int
    weights: float  # bytes on one GPU
    cache: float  # bytes on one GPU
    concurrency: float
    tokens_a_second: float  # of all servers
    seconds: float
    again: int  # rollouts of prompts that are sampled again: of UEC-RL the most there can be
    again_seconds: float | None  # None: it depends on the policy
    sync_bytes: float
    sync_seconds: float

    @property
    def fits(self) -> bool:
        """Whether a server holds its weights and at least one of the longest sequences."""
        return self.concurrency >= 1


def sampling(
    config: Config, shape: Shape, rollout_gpus: int, tokens: Tokens, machine: Machine
) -> Sampling:
    """Of rollout.over_sampling_batch_size prompts: what dynamic sampling asks for in one round."""
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
    again, known = _sampled_again(config)
    concurrency = min(most, config.sglang.max_concurrency, rollouts / servers)
    step = _decoding_seconds(concurrency, shape, weights, per_token * tokens.seen, gpus, machine)
    rate = servers * concurrency / step
    alone = _decoding_seconds(1.0, shape, weights, per_token * longest, gpus, machine)
    least = config.rollout.rollout_max_response_len * alone
    first, second = (
        max(count * tokens.response / rate, least) if rate else float("inf")
        for count in (rollouts, again)
    )
    whole = model_bytes(shape)
    return Sampling(
        servers=servers,
        weights=weights,
        cache=max(cache, 0.0),
        concurrency=concurrency,
        tokens_a_second=rate,
        seconds=first + (second if known else 0.0),
        again=again,
        again_seconds=second if known else None,
        sync_bytes=whole,
        sync_seconds=_sync_seconds(config, whole, machine),
    )


def _sampled_again(config: Config) -> tuple[int, bool]:
    """Rollouts of a step's prompts after their first ones; false: so many at most."""
    rollout, settings = config.rollout, config.rollout.resampling
    if settings.method == "aepo":
        prompts = math.ceil(settings.prompt_share * rollout.rollout_batch_size)
        return prompts * rollout.n_samples_per_prompt, True
    if settings.method == "uec_rl":
        prompts = rollout.over_sampling_batch_size or rollout.rollout_batch_size
        return prompts * settings.samples, False
    return 0, False


def _sync_seconds(config: Config, whole: float, machine: Machine) -> float:
    """Weights come in and go out over rank 0's own link: at the same time in a broadcast, but for
    its last bucket; one after the other elsewhere.
    """
    bucket = min(whole, float(config.sglang.sync_bucket_mib << 20))
    overlapped = whole - bucket if config.sglang.sync_method == "broadcast" else 0.0
    return (2 * whole - overlapped) / machine.link_rate(machine.gpus_per_node + 1)


def _decoding_seconds(
    sequences: float, shape: Shape, weights: float, cache: float, gpus: int, machine: Machine
) -> float:
    """One token of each of these sequences; weights and cache are bytes on one GPU."""
    read = weights
    if shape.experts:
        routed = 2 * shape.expert_matrices / gpus
        untouched = (1 - shape.experts_per_token / shape.experts) ** sequences
        read -= routed * untouched
    moved = (read + sequences * cache) / (machine.memory_rate * machine.decode_share)
    products = 2 * sequences * (shape.active_matrices + shape.head) / gpus
    return moved + products / (machine.operations * machine.matrix_share) + machine.decode_latency
