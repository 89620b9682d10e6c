"""What the host side costs at cluster size, in CPU seconds, memory and bytes.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/scale.py
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/scale.py --parts exchange --worlds 4 8 16

client: one pool takes `--rollouts` responses of up to 32,768 tokens from 64 servers that hold no
model, whole and streamed in turn. Their log-probs have as many digits as real ones.
interrupt: `--in-flight` requests without a token, ended at once.
pack: rollouts that this process holds into micro-batches; and how the cost grows with tokens.
exchange: rank 0 of a gloo world holds `--mib` MiB of rollouts, and each rank gets its share. "peak"
is a rank's high-water mark less what it had before and less its share.
Only the process named is counted, all its threads. Nothing here samples in several processes: there
is one client per run so far.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._measuring import PeakMemory, machine
from megatron_stare.config import PolicyConfig, SGLangConfig
from megatron_stare.numerics.exchange import Parcel, deliver
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.packing import pack
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.rollout.engine import Request, SamplingParams
from megatron_stare.rollout.sglang.pool import SGLangPool
from tests.distributed import run_distributed
from tests.rollout.sglang.fake_server import fake_servers
from tests.rollout.sglang.world import make_model, served

LONGEST = 32_768
SERVERS = 64


@contextlib.contextmanager
def pool_on(model: Path, stream_interval: int, **settings: Any) -> Iterator[SGLangPool]:
    """A pool on SERVERS servers that hold its weights."""
    with fake_servers(SERVERS, digits=True, longest=LONGEST, **settings) as urls:
        config = SGLangConfig(
            urls=urls,
            request_timeout=3600.0,
            verify_weights=False,
            stream_interval=stream_interval,
        )
        with contextlib.closing(SGLangPool(config, served(model), model)) as pool:
            pool.begin().result()
            pool.expect(0)
            for url in urls:
                body = {"weight_version": pool.tag}
                httpx.post(f"{url}/update_weights_from_disk", json=body)
            pool.loaded(pool.servers)
            yield pool


def client(model: Path, rollouts: int, rounds: int) -> dict[str, float]:
    """Milliseconds of CPU for 32,768 tokens, from the request to a checked Rollout."""
    milliseconds: dict[str, list[float]] = {"whole": [], "streamed": []}
    for number in range(rounds):
        for name, interval in (("whole", 0), ("streamed", 512)):
            with pool_on(model, interval, shortest=LONGEST // 8) as pool:
                ids = numpy.random.default_rng(number).integers(3, 60, (rollouts, 3))
                requests = [Request(row, (number, place)) for place, row in enumerate(ids)]
                begun = time.process_time()
                answers = pool.submit(requests, SamplingParams(1.0, 1.0, LONGEST))
                tokens = sum(answer.result().length for answer in answers)
                spent = time.process_time() - begun
                milliseconds[name].append(1e3 * spent * LONGEST / tokens)
    return {f"client, {name} [ms]": statistics.median(v) for name, v in milliseconds.items()}


def interrupt(model: Path, in_flight: int) -> dict[str, float]:
    """CPU seconds until every request in flight has come back aborted."""
    with pool_on(model, 512, hold_at=1 << 30, shortest=LONGEST) as pool:
        requests = [Request(numpy.array([3, 4, 5]), (0, place)) for place in range(in_flight)]
        answers = pool.submit(requests, SamplingParams(1.0, 1.0, 64))
        running = 0
        while running < in_flight:
            time.sleep(0.5)
            loads = [httpx.get(f"{s.client.url}/v1/loads").json() for s in pool.servers]
            running = sum(load["loads"][0]["num_running_reqs"] for load in loads)
        begun = time.process_time()
        pool.abort()
        ended = sum(answer.result().status == "aborted" for answer in answers)
        assert ended == in_flight, f"{ended} of {in_flight} came back aborted"
        return {f"interrupt of {in_flight} [s]": time.process_time() - begun}


def groups_of(count: int, tokens: int) -> list[Group]:
    """`count` groups of 8 rollouts of at most `tokens` tokens."""
    random = numpy.random.default_rng(0)

    def rollout() -> Rollout:
        size = int(random.integers(tokens // 2, tokens + 1))
        ids, mask = random.integers(0, 1 << 17, size), numpy.ones(size, numpy.bool_)
        return Rollout(ids, -random.random(size).astype("f4"), mask, "completed", 0, advantage=1.0)

    return [
        Group(Prompt(number, numpy.arange(100), ""), tuple(rollout() for _ in range(8)))
        for number in range(count)
    ]


def packing() -> dict[str, float]:
    """8,192 short rollouts [s]; one long one [ms]; the exponent of the cost in tokens."""
    topology, policy = topologies.start(PolicyConfig()), PolicyConfig(max_tokens_per_gpu=65_536)

    def seconds(groups: list[Group]) -> float:
        spent = []
        for _ in range(5):
            begun = time.process_time()
            pack(groups, topology, policy, hidden_size=4096, weight_version=0)
            spent.append(time.process_time() - begun)
        return min(spent)

    short = seconds(groups_of(1024, 64))
    sizes = (4096, 8192, 16_384, LONGEST)
    costs = [seconds(groups_of(8, size)) for size in sizes]
    slope = float(numpy.polyfit(numpy.log(sizes), numpy.log(costs), 1)[0])
    topologies.stop()
    long = 1e3 * costs[-1] / 64 * 4 / 3  # of a mean length of three quarters
    return {
        "pack of 8,192 short [s]": short,
        "pack, 32,768 tokens [ms]": long,
        "pack, exponent": slope,
    }


def one_rank(rank: int, world_size: int, mib: int) -> tuple[float, float, float]:
    """MiB of memory beyond the share, MiB received, CPU seconds."""
    size, count = 1 << 20, mib
    own = numpy.ones(size, numpy.uint8) if rank == 0 else numpy.zeros(0, numpy.uint8)
    parcels = [Parcel(size, 0, (number % world_size,)) for number in range(count)]
    begun = time.process_time()
    with PeakMemory(topologies.runtime.device()) as memory:
        found = deliver(lambda _: own, parcels, dist.group.WORLD)
    share = sum(content.nbytes for content in found.values()) / (1 << 20)
    assert memory.bytes is not None, "Linux counts it"
    shared = share if rank else 0.0  # what it holds itself is not copied
    return memory.bytes / (1 << 20) - shared, share, time.process_time() - begun


def exchange(worlds: list[int], mib: int) -> dict[str, float]:
    """The largest peak of any rank, and the CPU seconds of all ranks together."""
    found: dict[str, float] = {}
    for world in worlds:
        ranks = run_distributed(one_rank, world, mib, timeout_s=600)
        found[f"exchange, {world} ranks: peak [MiB]"] = max(peak for peak, _, _ in ranks)
        found[f"exchange, {world} ranks: CPU of all [s]"] = sum(spent for _, _, spent in ranks)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = ["client", "interrupt", "pack", "exchange"]
    parser.add_argument("--parts", nargs="+", choices=every, default=every)
    parser.add_argument("--rollouts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=4096)
    parser.add_argument("--worlds", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model = make_model(Path(place) / "model", "qwen2", max_position_embeddings=1 << 17)
        parts = {
            "client": lambda: client(model, options.rollouts, options.rounds),
            "interrupt": lambda: interrupt(model, options.in_flight),
            "pack": packing,
            "exchange": lambda: exchange(options.worlds, options.mib),
        }
        found = dict(itertools.chain(*(parts[part]().items() for part in options.parts)))
    table = Table("measure", "value")
    for name, value in found.items():
        table.add_row(name, f"{value:.3g}")
    about = machine(topologies.runtime.device())
    Console().print(table, about)
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "figures": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
