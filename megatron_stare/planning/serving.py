"""The seconds of a step outside training: rollouts on the servers, and the weight sync.

A decoding step of b sequences on a server of g GPUs reads the weights, or does 2 b W operations,
whichever takes longer; it then reads every sequence's keys and values, b S kv / g bytes, reads and
writes the states of gated delta nets, and pays for its launches, its all-reduces and its scheduler.
Of an expert model a step reads the experts that any of its tokens chose.

The rollouts of a server are scheduled one by one: as many together as its cache holds, the next one
when one ends. So the tail, in which few long responses are left, comes after the phase of full
throughput. Lengths are spread evenly from 0, cut at the limit, with the mean that is asked for; the
longest one has the limit.

Prompts that are sampled again (rollout.resampling) form a second batch after the first. Their
number under UEC-RL depends on the policy: the plan gives an upper bound and no seconds.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_stare.config import Config
from megatron_stare.config.rollout import MEMORY_SHARE
from megatron_stare.planning.machine import Machine
from megatron_stare.planning.memory import (
    cache_bytes_per_token,
    model_bytes,
    served_bytes,
    state_bytes,
)
from megatron_stare.planning.work import Tokens
from megatron_stare.policy.huggingface.shape import Shape
from megatron_stare.scoring.advantages import checked_estimator

GOLDEN = 0.6180339887498949  # its multiples modulo 1 visit every part of [0, 1) in turn


class Drafts(NamedTuple):
    """Speculation: draft tokens of a decoding step, and the tokens that the step yields."""

    tokens: int = 0
    accept_length: float = 1.0


NO_DRAFTS = Drafts()


@dataclass(frozen=True)
class Serving:
    """The servers' part of one step."""

    servers: int
    rollouts: int  # of a step, without resampled ones
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


def static_share(config: Config, machine: Machine, occupied: float = 0.0) -> float:
    """A server's fraction of its GPU for weights and cache: that of sglang.server_args, or of a
    colocated server what the trainer, which holds `occupied` bytes, leaves of the GPU.
    """
    given = re.search(rf"{MEMORY_SHARE}[ =]([0-9.]+)", config.sglang.server_args)
    if given or not config.sglang.colocated:
        return float(given[1]) if given else machine.static_share
    free = machine.usable_bytes - occupied - machine.server_bytes
    return min(machine.static_share, math.floor(100 * free / machine.memory_bytes) / 100)


def serving(
    config: Config,
    shape: Shape,
    rollout_gpus: int,
    tokens: Tokens,
    machine: Machine,
    occupied: float = 0.0,
    drafts: Drafts = NO_DRAFTS,
    adapters: float = 0.0,
) -> Serving:
    """The plan of rollout.over_sampling_batch_size prompts: one round of dynamic sampling.
    `occupied` are bytes of each GPU that a colocated trainer holds while its servers sample;
    `adapters` those of all adapters, for which a server that applies them has two places.
    """
    gpus = config.sglang.gpus_per_server
    servers = max(1, rollout_gpus // gpus)
    whole, sent = model_bytes(shape), served_bytes(shape, config)
    weights, of_bf16 = (sent + 2 * adapters) / gpus, sent / whole
    share = machine.memory_bytes * static_share(config, machine, occupied)
    cache = min(share, machine.usable_bytes - occupied) - weights
    per_token, state = cache_bytes_per_token(shape, config), state_bytes(shape, config)
    holds_longest = cache >= per_token * config.longest_sequence + state
    most = cache / (per_token * (tokens.prompt + tokens.response) + state) * holds_longest
    groups, rollouts = _sampled(config)
    resampled, is_exact = _resampled(config)
    concurrency = min(most, config.sglang.max_concurrency, rollouts / servers)

    def step(sequences: float, length: float) -> float:
        cache = per_token * length + 2 * state  # a step reads the state and writes it
        return decoding_seconds(sequences, shape, weights, cache, gpus, machine, drafts, of_bf16)

    rate = servers * concurrency / step(concurrency, tokens.seen)
    prompts = groups * tokens.prompt * 2 * shape.active_matrices / (servers * gpus)
    prefill = prompts / (machine.operations * machine.matrix_share)

    def lasting(count: int) -> float:
        if not concurrency:
            return math.inf
        longest = config.rollout.rollout_max_response_len
        lengths = spread(-(-count // servers), tokens.response, longest)
        return prefill * count / rollouts + scheduled(
            lengths, int(max(1.0, concurrency)), tokens.prompt, step
        )

    first, second = lasting(rollouts), lasting(resampled) if resampled else 0.0
    plan = Serving(
        servers=servers,
        rollouts=rollouts,
        weights=weights,
        cache=max(cache, 0.0),
        concurrency=concurrency,
        tokens_a_second=rate,
        seconds=first + (second if is_exact else 0.0),
        resampled=resampled,
        resampled_seconds=second if is_exact else None,
        sync_bytes=sent,
        sync_seconds=sync_seconds(config, whole, sent, machine),
    )
    return adapters_apart(plan, adapters, config, machine) if adapters else plan


def spread(count: int, mean: float, limit: float) -> list[float]:
    """`count` lengths of mean about `mean`, spread evenly from 0 and cut at `limit`, in an order
    that mixes short and long ones; the longest is `limit`.

    min(x, L) with x even over [0, B] has the mean L - L^2 / 2B, which gives B.
    """
    mean = min(mean, limit * (1 - 1e-3))
    most = 2 * mean if 2 * mean <= limit else limit**2 / (2 * (limit - mean))
    lengths = [min(limit, most * ((0.5 + place * GOLDEN) % 1)) for place in range(count)]
    lengths[lengths.index(max(lengths))] = limit
    return lengths


def scheduled(
    lengths: list[float], places: int, prompt: float, step: Callable[[float, float], float]
) -> float:
    """Seconds of a server that decodes rollouts of these lengths in this order, `places` of them
    at a time. `step` gives the seconds of a token for a number of sequences and their mean length.
    """
    waiting = iter(lengths)
    ends: list[tuple[float, float]] = []  # the token at which a rollout ends, and began
    now = seconds = begun = 0.0
    while True:
        while len(ends) < places and (length := next(waiting, None)) is not None:
            heapq.heappush(ends, (now + length, now))
            begun += now
        if not ends:
            return seconds
        end, start = heapq.heappop(ends)
        held = len(ends) + 1
        mean = prompt + (now + end) / 2 - begun / held
        seconds += (end - now) * step(held, mean)
        now, begun = end, begun - start


def _sampled(config: Config) -> tuple[int, int]:
    """Prompts of a round of dynamic sampling, and their rollouts."""
    groups = config.rollout.over_sampling_batch_size or config.rollout.rollout_batch_size
    greedy = checked_estimator(config.scoring).greedy  # one more of each prompt, as a baseline
    return groups, groups * (config.rollout.n_samples_per_prompt + int(greedy))


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


def sync_seconds(config: Config, whole: float, sent: float, machine: Machine) -> float:
    """Rank 0 receives `whole` and sends `sent` bytes over its own link: at once in a broadcast,
    except for the last bucket; one after the other with other transports. Memory handles send
    nothing: the weights are gathered inside the node. Every bucket costs a request and its loading.
    """
    size = float(config.sglang.sync_bucket_mib << 20)
    bucket, count = min(sent, size), math.ceil(sent / size)
    if config.sglang.transport == "tensor":
        return whole / machine.link_rate(1) + count * machine.handle_seconds
    overlapped = sent - bucket if config.sglang.transport == "broadcast" else 0.0
    moved = (whole + sent - overlapped) / machine.link_rate(machine.gpus_per_node + 1)
    return moved + count * machine.bucket_seconds


def adapters_apart(plan: Serving, size: float, config: Config, machine: Machine) -> Serving:
    """The plan where servers get adapters of `size` bytes apart: rank 0 sends them in base64, 4
    bytes for 3, to each rank of the servers. A colocated server gets the base too, whose memory it
    has released.
    """
    ranks = plan.servers * config.sglang.gpus_per_server
    moved = ranks * size * 4 / 3 / machine.link_rate(machine.gpus_per_node + 1)
    seconds = moved + machine.bucket_seconds
    if config.sglang.colocated:
        size, seconds = size + plan.sync_bytes, seconds + plan.sync_seconds
    return dataclasses.replace(plan, sync_bytes=size, sync_seconds=seconds)


def decoding_seconds(
    sequences: float,
    shape: Shape,
    weights: float,
    cache: float,
    gpus: int,
    machine: Machine,
    drafts: Drafts = NO_DRAFTS,
    share: float = 1.0,
) -> float:
    """One token for each of these sequences; weights and cache are bytes on one GPU. With drafts:
    a decoding step computes with 1 + `drafts.tokens` tokens of each and yields the accept length.
    `share`: bytes of a weight over those in bf16.
    """
    tokens = sequences * (1 + drafts.tokens)
    read = weights
    if shape.experts:
        routed = 2 * share * shape.expert_matrices / gpus
        untouched = (1 - shape.experts_per_token / shape.experts) ** (tokens * machine.router_skew)
        read -= routed * untouched
    rate = machine.memory_rate * machine.decode_share
    products = 2 * tokens * (shape.active_matrices + shape.head) / gpus
    products /= machine.operations * machine.matrix_share
    # a layer with experts launches about twice as many kernels
    latency = machine.decode_latency + (shape.layers + shape.sparse_layers) * machine.decode_layer
    if gpus > 1:
        near = gpus <= machine.gpus_per_node
        each = machine.collective_latency if near else machine.network_latency
        latency += 2 * shape.layers * each
    seconds = max(read / rate, products) + sequences * cache / rate + latency
    return seconds / drafts.accept_length
