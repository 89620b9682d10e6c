"""The stages with servers: K6, weights over every transport; K7, a server that dies while weights
are sent, and memory that servers give back and take; K8, log-probs, decoding, a long answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_stare.commands.gpuday.results import (
    Day,
    Measurement,
    at_least,
    at_most,
    holds,
    within,
)
from megatron_stare.commands.gpuday.runs import ShortRun, family, median
from megatron_stare.commands.gpuday.stages import checked
from megatron_stare.config import Config
from megatron_stare.http_client import authorization, session
from megatron_stare.loop.parts import load_tokenizer
from megatron_stare.planning.calibration import SERVER
from megatron_stare.planning.machine import H100, Machine
from megatron_stare.planning.memory import cache_bytes_per_token, model_bytes
from megatron_stare.planning.serving import decoding_seconds
from megatron_stare.planning.shapes import model_shape
from megatron_stare.policy.huggingface.shape import shape_of
from megatron_stare.rollout.sglang.access import api_key
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.sync.served_engine import served_model

STEPS = 3
# transport: servers with GPUs of their own, and the figure of the planner that a bucket gives
TRANSPORTS = {"broadcast": (2, "bucket_seconds"), "tensor": (0, "handle_seconds"), "disk": (2, "")}
PARTS = ("gather", "send", "load", "hash", "verify")


def transports(day: Day) -> Iterator[Measurement]:
    """Seconds of a sync, by part; a run whose checksums differ repeats the sync, then fails."""
    for method, (apart, figure) in TRANSPORTS.items():
        if apart and day.gpus < 2 and not day.rehearsal:
            continue
        servers = 1 if day.rehearsal else min(apart, day.gpus // 2)
        method_key = f"sglang.sync_method={method}"
        short = ShortRun(day, f"sync_{method}", STEPS, method_key, servers=servers)
        rows = short.finish()[1:]  # the first sync opens the connections
        wrong = sum(row.get("engine_corrupt_syncs", 0) for row in rows)
        yield holds(f"{method}: checksums are equal", wrong == 0, f"{wrong:g} corrupt syncs")
        gloo = "gloo" in (short.directory.parent / "K6.log").read_text(errors="replace")
        if apart and not day.rehearsal and method == "broadcast":
            yield holds("broadcast: over NCCL, not gloo", not gloo)
        serving = short.plan(median(rows, "response_length")).serving
        assert serving is not None
        spent, buckets = median(rows, "seconds_sync"), _buckets(serving.sync_bytes, short)
        yield at_most(f"{method}: seconds of a sync", spent, serving.sync_seconds, "s")
        for part in PARTS:
            if f"sync_seconds_{part}" in rows[-1]:  # absent on a CPU
                seconds = median(rows, f"sync_seconds_{part}")
                yield Measurement(f"{method}: seconds of {part}", seconds, "", "s")
        if figure:
            each = (spent - median(rows, "sync_seconds_gather")) / buckets
            expected = getattr(H100, figure)
            yield at_most(f"{method}: seconds of a bucket", max(each, 1e-6), expected, "s", figure)


def _buckets(whole: float, short: ShortRun) -> int:
    return math.ceil(whole / (short.config.sglang.sync_bucket_mib << 20))


SYNC_TIMEOUT, AFTER = 30, 60  # seconds; NCCL's watchdog would end the trainer after the first
BUCKET_MIB = 16  # small, so that a sync lasts long enough to be interrupted
RECEIVED = '"POST /update_weights_from_distributed'
CYCLES = 20
MOST_GROWTH = 256.0  # MiB


def faults(day: Day) -> Iterator[Measurement]:
    """kill -9 of a server in a sync; then cycles of release and resume."""
    if day.gpus >= 3 or day.rehearsal:
        yield from _killed_in_a_sync(day)
    yield from _cycles(day)


def _killed_in_a_sync(day: Day) -> Iterator[Measurement]:
    options = (f"sglang.sync_timeout={SYNC_TIMEOUT}", f"sglang.sync_bucket_mib={BUCKET_MIB}")
    short = ShortRun(day, "killed", 10_000, *options, servers=2)
    logs, after = short.directory / "servers", 3 if day.rehearsal else AFTER
    process = short.start()
    try:
        short.reach(process, 2)
        before = _received(logs)
        short.wait(process, lambda: _received(logs) > before, "bucket of the next sync")
        os.killpg(os.getpgid(family(process, "--model-path")[-1]), signal.SIGKILL)
        killed, step = time.monotonic(), len(short.rows())
        short.reach(process, step + 2)
        spent = time.monotonic() - killed
        yield at_most(
            "seconds from kill -9 to the second next step", spent, 2.0 * SYNC_TIMEOUT, "s"
        )
        last = SYNC_TIMEOUT + after
        short.wait(process, lambda: time.monotonic() - killed > last, f"{last} s after the kill")
        rows = short.rows()
        yield holds(f"the trainer still runs {last} s after the kill", True, f"{len(rows)} steps")
        restarts = rows[-1].get("engine_restarts", 0)
        yield holds("the server is started again", restarts >= 1, f"{restarts:g} restarts")
        peak, later = (median(part, "gpu_memory_peak") for part in (rows[:step], rows[step + 2 :]))
        if peak:
            yield at_most("rank 0's memory after the kill", later, peak, "GiB")
        process.send_signal(signal.SIGTERM)
        process.wait(120.0)
    finally:
        process.kill()
        process.wait()


def _received(logs: Path) -> int:
    """Buckets that servers have answered, by their logs."""
    texts = (log.read_text(errors="replace") for log in logs.glob("*.log"))
    return sum(text.count(RECEIVED) for text in texts)


def _cycles(day: Day) -> Iterator[Measurement]:
    """Free memory of the first GPU after every step, in which its server released and resumed."""
    cycles, free = 3 if day.rehearsal else CYCLES, list[float]()
    short = ShortRun(day, "cycles", cycles, "rollout.rollout_max_response_len=16")
    process = short.start()
    try:
        for step in range(1, cycles + 1):
            short.reach(process, step)
            free.append(torch.cuda.mem_get_info()[0] / 2**20 if torch.cuda.is_available() else 0.0)
        process.wait(120.0)
    finally:
        process.kill()
        process.wait()
    lost = max(free[1:3]) - min(free[-3:])
    yield holds(f"{cycles} cycles of release and resume", process.returncode == 0)
    yield holds("memory stays flat", lost < MOST_GROWTH, f"{lost:.0f} MiB lost after step 2")


CACHES = {"bf16": "", "fp8": "--kv-cache-dtype fp8_e4m3"}
MOST_NATS = 0.05  # mean difference of log-probs in bf16
SEQUENCES, PROMPT, FEW, MANY = (1, 32, 95, 190), 256, 32, 288
LONG = 20480


def decoding(day: Day) -> Iterator[Measurement]:
    """Parity with both caches, tokens a second for several numbers of sequences, a long answer."""
    small, apart = day.rehearsal, 1 if day.gpus > 1 else 0
    most = 12 if small else 4096
    for name, options in CACHES.items():
        if small and options:
            continue  # no CPU has that cache
        words = (f"sglang.server_args={options}", f"rollout.rollout_max_response_len={most}")
        short = ShortRun(day, f"parity_{name}", 1, *words[not options :], servers=apart)
        yield from _parity(short, name, 4 if small else 64, most)
    yield from _rates(ShortRun(day, "rates", 1, servers=1).config, day)
    longest = 32 if small else LONG
    sizes: tuple[str, ...] = ("rollout.rollout_batch_size=1", "rollout.n_samples_per_prompt=2")
    sizes += (f"rollout.rollout_max_response_len={longest}",)
    sizes += (f"policy.max_tokens_per_gpu={longest + 512}",)
    (row,) = ShortRun(day, "long", 1, *sizes, servers=apart).finish()
    late = row.get("engine_fault_timeout", 0)
    found = f"{row['response_length']:.0f} tokens"
    yield holds(f"an answer of up to {longest:,} tokens in one request", late == 0, found)


def _parity(short: ShortRun, name: str, prompts: int, tokens: int) -> Iterator[Measurement]:
    """Every pair of columns of `parity`; its own verdict is the row before them."""
    sizes = ("--prompts", str(prompts), "--tokens", str(tokens))
    command, said = short.command("parity"), "within its limit"
    try:
        checked([*command, *sizes])
    except RuntimeError as error:
        said = str(error)
    yield holds(f"parity, {name} cache", said == "within its limit", said)
    file = short.directory / "parity.json"
    for pair in json.loads(file.read_text())["pairs"] if file.is_file() else ():
        what = f"{name} cache: {pair['pair']}, mean of {pair['tokens']:,} tokens"
        yield within(what, pair["mean"], MOST_NATS, "nats")
        ends = [f"{first}: {value:.2g}" for first, value in pair["by_position"].items()]
        yield Measurement(f"{what} by position", ", ".join(ends))


def _rates(config: Config, day: Day) -> Iterator[Measurement]:
    """Seconds of a decoding step against the plan, and the figures that fit them best."""
    few, many = (4, 12) if day.rehearsal else (FEW, MANY)
    model = served_model(config, load_tokenizer(config.policy.hf_checkpoint))
    alone = dataclasses.replace(config.sglang, first_gpu=0)  # nothing trains meanwhile
    with contextlib.closing(SGLangPool(alone, model, day.path / "rates")) as pool:
        pool.start().result()
        url, spent = pool.servers[0].client.url, dict[int, float]()
        for count in SEQUENCES[: 2 if day.rehearsal else None]:
            _, less, more = (asyncio.run(_asked(url, config, count, n)) for n in (few, few, many))
            spent[count] = max((more - less) / (many - few), 1e-6)
    length = PROMPT + (few + many) / 2
    for count, seconds in spent.items():
        planned = count / _planned(config, count, length, SERVER)
        yield at_least(f"decoding {count} sequences", count / seconds, planned, "tokens/s")
    best = min(_machines(), key=lambda one: _distance(config, spent, length, one))
    for name in ("decode_share", "decode_latency", "decode_layer"):
        yield Measurement(name, getattr(best, name), getattr(SERVER, name), "", "-", name)


async def _asked(url: str, config: Config, count: int, tokens: int) -> float:
    """Seconds of `count` answers of `tokens` tokens each, in one request."""
    ids = [[2 + (place * 7 + number) % 250 for place in range(PROMPT)] for number in range(count)]
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    body, begin = {"input_ids": ids, "sampling_params": sampling}, time.perf_counter()
    async with session(authorization(api_key(config.sglang))) as connections:
        answer = await connections.post(f"{url}/generate", json=body, raise_for_status=True)
        await answer.read()
    return time.perf_counter() - begin


def _planned(config: Config, count: int, length: float, machine: Machine) -> float:
    """The planner's seconds of a decoding step."""
    shape = shape_of(model_shape(config.policy.hf_checkpoint))
    cache = cache_bytes_per_token(shape, config) * length
    return decoding_seconds(count, shape, model_bytes(shape), cache, 1, machine)


def _machines() -> Iterator[Machine]:
    for share in range(30, 101, 5):
        for latency in range(1, 101):
            yield dataclasses.replace(
                SERVER, decode_share=share / 100, decode_latency=latency * 1e-4
            )


def _distance(config: Config, spent: dict[int, float], length: float, machine: Machine) -> float:
    """Mean relative difference of measured and planned seconds."""
    return statistics.mean(
        abs(_planned(config, count, length, machine) / seconds - 1)
        for count, seconds in spent.items()
    )
