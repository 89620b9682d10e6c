"""SGLang servers: tokens per second of the pool next to a bare client's,
and a weight sync next to a raw broadcast.

    make sglang
    OMP_NUM_THREADS=1 python benchmarks/servers.py                        both parts
    OMP_NUM_THREADS=1 python benchmarks/servers.py --parts generate --rounds 7 --json servers.json

generate: one CPU server and a model of 2 MB, `--requests` prompts, `--concurrency` in flight. The
bare client posts the same JSON with httpx and counts ids: no check, no retry, no text. Both take
turns, each `--rounds` times.
sync: a model of `--mib` MiB to two servers. "raw" broadcasts the same bytes in buckets of the same
size in a gloo group of the same shape, whose receivers do nothing else; in "raw and copied" they
also copy the bytes to where weights would lie, which no server can do without; in "copied, hashed"
each receiver then takes the SHA-256 of what it holds, as SGLang's check does on a CPU, and the
sender that of each bucket while it is sent: what no check with this hash can do without. "one hash,
alone" is one process that takes it of all bytes while the others rest: what a server with a core to
itself adds at the least. "sync" is all of WeightSync, without and with its checksums, by --method.
Tokens per CPU second (of client and server together) is the steadier figure where others use the
machine. Medians of the rounds; ratios are medians of the ratios of neighbouring rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._measuring import machine
from megatron_stare.config import SGLangConfig, UserError
from megatron_stare.rollout.engine import Request, SamplingParams
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.process import server_command
from megatron_stare.rollout.sglang.weights import cpu_hash
from megatron_stare.sync.served_engine import make_sync
from megatron_stare.sync.weight_sync import flattened, in_buckets
from tests.rollout.sglang.idle import sample_all, send_weights
from tests.rollout.sglang.world import VOCABULARY, make_model, served, sync

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=200)
WAIT = datetime.timedelta(seconds=300)
SENT, COPIED, HASHED = 1, 2, 3  # what a raw broadcast does


@contextlib.contextmanager
def servers(checkpoint: Path, directory: Path, **settings: Any) -> Iterator[SGLangPool]:
    """Launched servers that hold the checkpoint's weights."""
    config = SGLangConfig(sync_timeout=300, **settings)
    with contextlib.closing(SGLangPool(config, served(checkpoint), directory / "servers")) as pool:
        pool.start().result()
        sync(pool, checkpoint, 0, directory)
        yield pool


def prompts(count: int, round_number: int) -> list[Request]:
    """Prompts of 8 to 23 tokens, none of them twice."""
    generator = torch.Generator().manual_seed(round_number)
    return [
        Request(
            torch.randint(1, VOCABULARY, (8 + n % 16,), generator=generator).numpy(),
            (round_number, n),
        )
        for n in range(count)
    ]


async def bare(url: str, asked: Sequence[Request], stops: list[int], concurrency: int) -> int:
    """Post every prompt, `concurrency` at a time; the number of ids that came back."""
    room = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(
        base_url=url, limits=limits, trust_env=False, timeout=300
    ) as client:

        async def one(request: Request) -> int:
            sampling = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": SAMPLING.max_new_tokens}
            others = {
                "top_k": -1,
                "min_p": 0.0,
                "stop_token_ids": stops,
                "skip_special_tokens": True,
            }
            body = {"input_ids": request.prompt_ids.tolist(), "sampling_params": sampling | others}
            async with room:
                answer = await client.post(
                    "/generate", json=body | {"return_logprob": True, "logprob_start_len": -1}
                )
            return len(answer.json()["output_ids"])

        return sum(await asyncio.gather(*map(one, asked)))


def cpu_seconds(pool: SGLangPool) -> float:
    """Processor time that this process and the servers have taken so far."""
    heads = [
        psutil.Process(server.process.process.pid) for server in pool.servers if server.process
    ]
    processes = [
        psutil.Process(),
        *heads,
        *(child for head in heads for child in head.children(recursive=True)),
    ]
    return sum(
        times.user + times.system for times in (process.cpu_times() for process in processes)
    )


Rates = dict[str, list[float]]


def measure_generation(
    pool: SGLangPool, count: int, concurrency: int, rounds: int
) -> tuple[Rates, Rates]:
    """Tokens per second and per CPU second of either side, by round;
    the first round warms up and is not counted.
    """
    url, stops = pool.servers[0].client.url, sorted(pool.model.stop_ids)
    rates: Rates = {"bare client": [], "pool": []}
    efforts: Rates = {"bare client": [], "pool": []}
    for number in range(rounds + 1):
        sides = ["bare client", "pool"] if number % 2 else ["pool", "bare client"]
        for place, side in enumerate(sides):
            asked = prompts(count, 2 * number + place)
            began, spent = time.perf_counter(), cpu_seconds(pool)
            if side == "pool":
                rollouts = sample_all(pool, asked, SAMPLING).result()
                tokens = sum(len(rollout.response_ids) for rollout in rollouts)
            else:
                tokens = asyncio.run(bare(url, asked, stops, concurrency))
            if number:
                rates[side].append(tokens / (time.perf_counter() - began))
                efforts[side].append(tokens / (cpu_seconds(pool) - spent))
    assert not any(pool.counts().values()), pool.counts()
    return rates, efforts


def receive(port: int, rank: int, size: int, sizes: list[int]) -> None:
    """A member of the raw group: takes what is broadcast, copies it where the byte ahead is COPIED
    or more, hashes what it holds and says so where it is HASHED, ends where it is 0.
    """
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False, timeout=WAIT)
    group: Any = dist.ProcessGroupGloo(dist.PrefixStore("raw", store), rank, size, WAIT)
    go = torch.empty(1, dtype=torch.uint8)
    weights = [torch.ones(length, dtype=torch.uint8) for length in sizes]
    while True:
        group.broadcast([go]).wait()
        if not go.item():
            return
        for place in weights:
            part = torch.empty_like(place)
            group.broadcast([part]).wait()
            if go.item() >= COPIED:
                place.copy_(part)
        if go.item() == HASHED:
            for place in weights:
                cpu_hash(place)
            group.allreduce([go]).wait()


class RawGroup:
    """This process and as many bare receivers as there are servers."""

    def __init__(self, receivers: int, parts: list[torch.Tensor]) -> None:
        self.parts, size = parts, 1 + receivers
        store = dist.TCPStore(
            "127.0.0.1", 0, size, is_master=True, timeout=WAIT, wait_for_workers=False
        )
        context = multiprocessing.get_context("spawn")
        sizes = [part.numel() for part in parts]
        self.children = [
            context.Process(target=receive, args=(store.port, rank, size, sizes), daemon=True)
            for rank in range(1, size)
        ]
        for child in self.children:
            child.start()
        self.group: Any = dist.ProcessGroupGloo(dist.PrefixStore("raw", store), 0, size, WAIT)

    def broadcast(self, work: int) -> None:
        """Until all bytes are sent, and with HASHED until all have hashed them."""
        self._say(work)
        with ThreadPoolExecutor(1) as background:
            for part in self.parts:
                hashing = background.submit(cpu_hash, part) if work == HASHED else None
                self.group.broadcast([part]).wait()
                if hashing is not None:
                    hashing.result()
        if work == HASHED:
            self.group.allreduce([torch.ones(1, dtype=torch.uint8)]).wait()

    def close(self) -> None:
        self._say(0)
        for child in self.children:
            child.join()

    def _say(self, word: int) -> None:
        self.group.broadcast([torch.tensor([word], dtype=torch.uint8)]).wait()


RAW_SIDES = {"raw broadcast": SENT, "raw and copied": COPIED, "copied, hashed": HASHED}
ALONE = "one hash, alone"
SYNC_SIDES = (*RAW_SIDES, ALONE, "sync", "sync with checksums")


def measure_sync(
    pool: SGLangPool, checkpoint: Path, directory: Path, rounds: int
) -> dict[str, list[float]]:
    """Seconds of the raw broadcasts and of a sync without and with checksums, round by round."""
    weights = load_file(checkpoint / "model.safetensors")
    parts = [
        flattened(bucket.tensors)
        for bucket in in_buckets(weights.items(), pool.settings.sync_bucket_mib << 20)
    ]
    sender = make_sync(pool, pool.settings, str(checkpoint), directory / "weights")
    seconds: dict[str, list[float]] = {side: [] for side in SYNC_SIDES}
    version = pool.version
    with contextlib.closing(RawGroup(len(pool.servers), parts)) as raw:
        for number in range(rounds + 1):
            for side, found in seconds.items():
                version += 1
                pool.expect(version)
                object.__setattr__(pool.settings, "verify_weights", side == "sync with checksums")
                began = time.perf_counter()
                if side in RAW_SIDES:
                    raw.broadcast(RAW_SIDES[side])
                elif side == ALONE:
                    for part in parts:
                        cpu_hash(part)
                else:
                    send_weights(sender, weights.items(), pool.servers)
                if number:
                    found.append(time.perf_counter() - began)
    return seconds


def ratio(found: list[float], base: list[float]) -> float:
    """Median of the ratios of rounds that ran at once."""
    return statistics.median(one / other for one, other in zip(found, base, strict=True))


def table(title: str, unit: str, found: dict[str, list[float]]) -> tuple[Table, dict[str, Any]]:
    """Median, range, and ratio to the first side."""
    base = next(iter(found.values()))
    shown = Table("", unit, "lowest", "highest", "of the first", title=title)
    for side, values in found.items():
        row = (statistics.median(values), min(values), max(values), ratio(values, base))
        shown.add_row(side, *(f"{value:,.3f}" if value < 100 else f"{value:,.0f}" for value in row))
    return shown, {
        side: {"rounds": values, "ratio": ratio(values, base)} for side, values in found.items()
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", nargs="+", choices=("generate", "sync"), default=["generate", "sync"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument(
        "--mib", type=int, default=800, help="size of the model that is synced, about"
    )
    parser.add_argument("--bucket-mib", type=int, default=256, help="sglang.sync_bucket_mib")
    parser.add_argument("--method", choices=("broadcast", "tensor", "disk"), default="broadcast")
    parser.add_argument("--directory", default="", help="sglang.sync_directory, for disk")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    try:
        server_command(SGLangConfig())
    except UserError as error:
        print(f"benchmarks/servers.py: left out: {error}")
        return
    console, report = Console(width=110), {"machine": machine(torch.device("cpu"))}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if "generate" in options.parts:
            model = make_model(directory / "small", "qwen2")
            with servers(
                model, directory, max_concurrency=options.concurrency, sync_method="tensor"
            ) as pool:
                rates, efforts = measure_generation(
                    pool, options.requests, options.concurrency, options.rounds
                )
            for name, unit, found in (
                ("generate", "tokens/s", rates),
                ("effort", "tokens/CPU s", efforts),
            ):
                shown, report[name] = table("Generation", unit, found)
                console.print(shown)
        if "sync" in options.parts:
            layers = max(1, round((options.mib * (1 << 20) / 4 - 2 * 16384 * 768) / 6_295_296))
            shape = {
                "vocab_size": 16384,
                "hidden_size": 768,
                "intermediate_size": 2048,
                "num_hidden_layers": layers,
            }
            model = make_model(
                directory / "large", "qwen2", num_attention_heads=12, num_key_value_heads=4, **shape
            )
            size = (model / "model.safetensors").stat().st_size >> 20
            own = {"sync_method": options.method, "sync_directory": options.directory}
            with servers(
                model, directory, num_servers=2, sync_bucket_mib=options.bucket_mib, **own
            ) as pool:
                seconds = measure_sync(pool, model, directory, options.rounds)
            shown, report["sync"] = table(
                f"Sync of {size} MiB to two servers, in {options.bucket_mib} MiB buckets",
                "seconds",
                seconds,
            )
            console.print(shown)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
