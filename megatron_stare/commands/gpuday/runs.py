"""The stages that are short runs of the kit's model, started by the command line as a user starts
them: K6, weights to servers; K7, a server that dies; K8, decoding; K9, a whole run; K10, Slurm.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_stare.commands.gpuday.models import even_length, model_of, problems
from megatron_stare.commands.gpuday.rows import (
    Day,
    Measurement,
    Skipped,
    at_least,
    at_most,
    holds,
    within,
)
from megatron_stare.commands.gpuday.stages import (
    below,
    checked,
    checkout,
    kept,
    kill,
    last_line,
    succeeds,
    text_of,
)
from megatron_stare.config import Config, override
from megatron_stare.http_client import authorization, session
from megatron_stare.loop.resolve import load_tokenizer
from megatron_stare.planning.calibration import SERVER
from megatron_stare.planning.machine import H100, Machine
from megatron_stare.planning.memory import cache_bytes_per_token, model_bytes
from megatron_stare.planning.plan import GIB, RunPlan, make_plan
from megatron_stare.planning.serving import decoding_seconds
from megatron_stare.planning.shapes import model_shape
from megatron_stare.policy.huggingface.shape import shape_of
from megatron_stare.recipes import Cluster, find_recipe
from megatron_stare.reporting.logbook import METRICS_NAME, read_alarms, read_metrics
from megatron_stare.rollout.sglang.access import api_key
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.sync.served_engine import served_model

# Seconds until a run, or a job with its queue, comes to a state; and between two looks at it.
OF_A_RUN, OF_A_JOB = (540.0, 0.005), (3600.0, 2.0)
Rows = list[dict[str, Any]]  # lines of metrics.jsonl
State = Callable[[], bool]


class ShortRun:
    """`steps` steps in the folder `name` of the day. `servers`: how many have GPUs of their own; 0:
    one for each GPU of the trainer; None: rollouts in the trainer's process. In a rehearsal one
    rank trains, and 0 is one server on the CPU.
    """

    def __init__(
        self, day: Day, name: str, steps: int, *options: str, servers: int | None = 0
    ) -> None:
        self.directory, self.log, self.steps = day.path / name, day.path / f"{name}.log", steps
        shutil.rmtree(self.directory, ignore_errors=True)  # of a stage that runs again
        self.log.unlink(missing_ok=True)
        small, self.apart = day.rehearsal, 0 if day.rehearsal else servers or 0
        self.ranks = 1 if small else max(1, day.gpus - self.apart)
        if self.ranks > 4:  # replicas of TP4
            self.ranks -= self.ranks % 4
        batch, samples, length = (2, 4, 12) if small else (8, 8, 1024)
        self.settings = [
            f"policy.hf_checkpoint={model_of(day)}",
            f"policy.dtype={'fp32' if small else 'bf16'}",
            f"policy.max_tokens_per_gpu={128 if small else 8192}",
            f"policy.use_distributed_optimizer={str(not small).lower()}",
            f"data.prompt_data={problems(day)}",
            "data.rollout_max_prompt_len=64",
            f"rollout.rollout_batch_size={batch}",
            f"rollout.n_samples_per_prompt={samples}",
            f"rollout.rollout_max_response_len={length}",
            "rollout.max_generation_rounds=8",
            f"scoring.reward={even_length.__module__}.{even_length.__name__}",
            f"train.num_rollout={steps}",
            "run.save_interval=0",
            f"run.dir={self.directory}",
        ]
        if servers is not None:
            count = servers or self.ranks
            self.settings += ["rollout.engine=sglang", f"sglang.num_servers={count}"]
        if self.ranks >= 4:
            tensor = ["policy.tensor_model_parallel_size=4", "policy.sequence_parallel=true"]
            self.settings += tensor
        if not small and servers == 0:
            self.settings += ["sglang.colocated=true", "policy.offload_while_generating=true"]
        self.settings += [*options, *day.overrides]

    @property
    def config(self) -> Config:
        return override(Config(), self.settings)

    @property
    def source(self) -> str:
        """A YAML file that sets nothing."""
        file = self.directory.with_suffix(".yaml")
        file.write_text("{}\n")
        return str(file)

    def command(self, name: str = "train") -> list[str]:
        """The command `name` of the package on the run's configuration."""
        return self.on_ranks(name, self.source, *self.settings)

    def on_ranks(self, *words: str) -> list[str]:
        """The command of the package that these words are, on every rank of the run."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        ranks = [*torchrun, str(self.ranks)] if self.ranks > 1 else []
        return [sys.executable, *ranks, "-m", "megatron_stare", *words]

    @contextlib.contextmanager
    def running(self) -> Iterator[psutil.Popen]:
        """The run as a process, continued where it has begun. When the block ends, this and all
        below it are killed: they would write a last checkpoint, of 112 GB for the model of 8B.
        """
        with self.log.open("a") as log:
            process = psutil.Popen(self.command(), stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            kill([process, *below(process.pid)])
            process.wait()

    def finish(self) -> Rows:
        """The rows of the whole run. RuntimeError: it failed."""
        with self.running() as process:
            self.reach(process, self.steps)
        return self.rows()

    def rows(self) -> Rows:
        """The rows that the run has written to metrics.jsonl so far."""
        file = self.directory / METRICS_NAME
        return read_metrics(file) if file.is_file() else []

    def reach(self, process: psutil.Popen, step: int) -> None:
        """Wait until `step` is written. RuntimeError: it does not come."""
        self.wait(process, f"step {step}", lambda: len(self.rows()) >= step)

    def wait(self, process: psutil.Popen, what: str, come: State) -> None:
        """Wait for a state. RuntimeError: the run ended, or it takes too long."""
        _wait(what, come, lambda: process.poll() is not None, self.log, *OF_A_RUN)

    def plan(self, rows: Rows) -> RunPlan:
        """The plan of the run, for responses of the rows' length."""
        apart = self.apart or int(not self.config.sglang.colocated)
        length = median(rows, "response_length")
        return make_plan(self.config, Cluster(self.ranks, apart), response_tokens=length)


def _wait(what: str, come: State, over: State, log: Path, limit: float, pause: float) -> None:
    """Wait for a state. RuntimeError: all is over before, or it takes more seconds than `limit`."""
    deadline = time.monotonic() + limit
    while not come():
        if (over() and not come()) or time.monotonic() > deadline:
            raise RuntimeError(f"no {what}; the last line of {log}: {last_line(text_of(log))}")
        time.sleep(pause)


def median(rows: Rows, key: str) -> float:
    """Over the rows that have it; 0 if none has."""
    return float(statistics.median([row[key] for row in rows if key in row] or [0.0]))


# K6. Transport: servers with GPUs of their own, and the planner's figure that a bucket gives.
TRANSPORTS = {"broadcast": (2, "bucket_seconds"), "tensor": (0, "handle_seconds"), "disk": (2, "")}
PARTS = ("gather", "send", "load", "hash", "verify")


def transports(day: Day) -> Iterator[Measurement]:
    """K6: seconds of a sync, by part; a run whose checksums differ repeats the sync, then fails."""
    for method, (apart, figure) in TRANSPORTS.items():
        if apart and day.gpus < 2 and not day.rehearsal:
            continue
        servers = 1 if day.rehearsal else min(apart, day.gpus // 2)
        key = f"sglang.sync_method={method}"
        short = ShortRun(day, f"sync_{method}", 3, key, servers=servers)
        rows = short.finish()[1:]  # the first sync opens the connections
        wrong = sum(row.get("engine_corrupt_syncs", 0) for row in rows)
        yield holds(f"{method}: checksums are equal", wrong == 0, f"{wrong:g} corrupt syncs")
        if method == "broadcast" and not day.rehearsal:
            over_nccl = "broadcast over gloo" not in text_of(short.log)
            yield holds("broadcast: over NCCL, not gloo", over_nccl)
        serving, spent = short.plan(rows).serving, median(rows, "seconds_sync")
        assert serving is not None
        yield at_most(f"{method}: seconds of a sync", spent, serving.sync_seconds, "s")
        for part in PARTS:
            if f"sync_seconds_{part}" in rows[-1]:  # absent on a CPU
                seconds = median(rows, f"sync_seconds_{part}")
                yield Measurement(f"{method}: seconds of {part}", seconds, "", "s")
        if figure:
            buckets = math.ceil(serving.sync_bytes / (short.config.sglang.sync_bucket_mib << 20))
            each = (spent - median(rows, "sync_seconds_gather")) / buckets
            expected = getattr(H100, figure)
            yield at_most(f"{method}: seconds of a bucket", max(each, 1e-6), expected, "s", figure)


# K7
SYNC_TIMEOUT, AFTER = 30, 60  # seconds; NCCL's watchdog would end the trainer after the first
BUCKET_MIB = 16  # small, so that a sync lasts long enough to be interrupted
RECEIVED = '"POST /update_weights_from_distributed'
CYCLES = 20
MOST_GROWTH = 256.0  # MiB


def faults(day: Day) -> Iterator[Measurement]:
    """K7: kill -9 of a server in a sync; then cycles of release and resume."""
    options = (f"sglang.sync_timeout={SYNC_TIMEOUT}", f"sglang.sync_bucket_mib={BUCKET_MIB}")
    short = ShortRun(day, "killed", 10_000, *options, servers=2)
    logs, last = short.directory / "servers", SYNC_TIMEOUT + (3 if day.rehearsal else AFTER)
    with short.running() as process:
        short.reach(process, 2)
        before = _received(logs)
        short.wait(process, "bucket of the next sync", lambda: _received(logs) > before)
        os.killpg(os.getpgid(max(_servers(process))), signal.SIGKILL)
        killed, step = time.monotonic(), len(short.rows())
        short.reach(process, step + 2)
        what, spent = "seconds from kill -9 to the second next step", time.monotonic() - killed
        yield at_most(what, spent, 2.0 * SYNC_TIMEOUT, "s")
        what = f"{last} s after the kill"
        short.wait(process, what, lambda: time.monotonic() - killed > last)
        rows = short.rows()
    yield holds(f"the trainer still runs {what}", True, f"{len(rows)} steps")
    restarts = rows[-1].get("engine_restarts", 0)
    yield holds("the server is started again", restarts >= 1, f"{restarts:g} restarts")
    if peak := median(rows[:step], "gpu_memory_peak"):
        later = median(rows[step + 2 :], "gpu_memory_peak")
        yield at_most("gpu_memory_peak after the kill", later, peak, "GiB")
    yield from _cycles(day)


def _received(logs: Path) -> int:
    """Buckets that servers have answered, by their logs."""
    return sum(text_of(log).count(RECEIVED) for log in logs.glob("*.log"))


def _servers(process: psutil.Popen) -> Iterator[int]:
    """The first process of every server of a run."""
    for each in below(process.pid):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if "--model-path" in each.cmdline():
                yield each.pid


def _cycles(day: Day) -> Iterator[Measurement]:
    """Free memory of the first GPU after every step, in which its server released and resumed."""
    cycles, free = 3 if day.rehearsal else CYCLES, list[float]()
    short = ShortRun(day, "cycles", cycles, "rollout.rollout_max_response_len=16")
    with short.running() as process:
        for step in range(1, cycles + 1):
            short.reach(process, step)
            free.append(torch.cuda.mem_get_info()[0] / 2**20 if torch.cuda.is_available() else 0.0)
    lost = max(free[1:3]) - min(free[-3:])
    yield holds(f"{cycles} cycles of release and resume", True)
    yield holds("memory stays flat", lost < MOST_GROWTH, f"{lost:.0f} MiB lost after step 2")


# K8
MOST_NATS = 0.05  # mean difference of log-probs in bf16
SEQUENCES, PROMPT = (1, 32, 95, 190), 256


def decoding(day: Day) -> Iterator[Measurement]:
    """K8: parity with both caches, tokens a second of 1 to 190 sequences, a long answer."""
    small, apart = day.rehearsal, 1 if day.gpus > 1 else 0
    length = f"rollout.rollout_max_response_len={12 if small else 4096}"
    fp8 = "sglang.server_args=--kv-cache-dtype fp8_e4m3"
    caches = {"bf16": ()} if small else {"bf16": (), "fp8": (fp8,)}  # no CPU has the latter
    for name, options in caches.items():
        short = ShortRun(day, f"parity_{name}", 1, length, *options, servers=apart)
        yield from _parity(short, f"{name} cache", *(("4", "12") if small else ("64", "4096")))
    yield from _rates(ShortRun(day, "rates", 1, servers=1).config, day)
    longest = 32 if small else 20480
    sizes = ["rollout.rollout_batch_size=1", "rollout.n_samples_per_prompt=2"]
    sizes += [f"rollout.rollout_max_response_len={longest}"]
    sizes += [f"policy.max_tokens_per_gpu={longest + 512}"]
    (row,) = ShortRun(day, "long", 1, *sizes, servers=apart).finish()
    late, found = row.get("engine_fault_timeout", 0), f"{row['response_length']:.0f} tokens"
    yield holds(f"an answer of up to {longest:,} tokens in one request", late == 0, found)


def _parity(short: ShortRun, name: str, prompts: str, tokens: str) -> Iterator[Measurement]:
    """Every pair of columns of `parity`; its own verdict is the row before them."""
    command = [*short.command("parity"), "--prompts", prompts, "--tokens", tokens]
    yield succeeds(f"parity, {name}", command)
    file = short.directory / "parity.json"
    for pair in json.loads(file.read_text())["pairs"] if file.is_file() else ():
        what = f"{name}: {pair['pair']}, mean of {pair['tokens']:,} tokens"
        yield within(what, pair["mean"], MOST_NATS, "nats")
        ends = [f"{first}: {value:.2g}" for first, value in pair["by_position"].items()]
        yield Measurement(f"{what} by position", ", ".join(ends))


def _rates(config: Config, day: Day) -> Iterator[Measurement]:
    """Seconds of a decoding step against the plan, and the figures that fit them best."""
    few, many = (4, 12) if day.rehearsal else (32, 288)
    model = served_model(config, load_tokenizer(config.policy.hf_checkpoint))
    alone = dataclasses.replace(config.sglang, first_gpu=0)  # nothing trains meanwhile
    with contextlib.closing(SGLangPool(alone, model, day.path / "rates")) as pool:
        pool.start().result()
        url, spent = pool.servers[0].client.url, dict[int, float]()
        for count in SEQUENCES[: 2 if day.rehearsal else None]:
            _, less, more = (asyncio.run(_asked(url, config, count, n)) for n in (few, few, many))
            spent[count] = max((more - less) / (many - few), 1e-6)
    shape = shape_of(model_shape(config.policy.hf_checkpoint))
    weights, cache = model_bytes(shape), cache_bytes_per_token(shape, config)
    cache *= PROMPT + (few + many) / 2

    def planned(count: int, machine: Machine) -> float:
        return decoding_seconds(count, shape, weights, cache, 1, machine)

    def distance(machine: Machine) -> float:
        """Mean relative difference of planned and measured seconds."""
        return statistics.mean(abs(planned(n, machine) / spent[n] - 1) for n in spent)

    for count, seconds in spent.items():
        expected = count / planned(count, SERVER)
        yield at_least(f"decoding {count} sequences", count / seconds, expected, "tokens/s")
    machines = (
        dataclasses.replace(SERVER, decode_share=share / 100, decode_latency=latency * 1e-4)
        for share in range(30, 101, 5)
        for latency in range(1, 101)
    )
    best = min(machines, key=distance)
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


def training(day: Day) -> Iterator[Measurement]:
    """K9: train, kill a rank with SIGKILL after half of the steps, resume, replay a step."""
    steps = 4 if day.rehearsal else 12
    # Each checkpoint of 8B takes half a minute. The replay starts from the last but one.
    saved = (f"run.save_interval={steps // 4}", "run.record=all")
    short = ShortRun(day, "run", steps, *saved, servers=None if day.rehearsal else 0)
    with short.running() as process:
        short.reach(process, steps // 2 + 1)
        ranks = process.children() if short.ranks > 1 else [process]
        killed = len(short.rows())
        os.kill(max(rank.pid for rank in ranks), signal.SIGKILL)
        process.wait(120.0)
    yield holds(f"a rank is killed at step {killed}", True, str(killed))
    rows = short.finish()
    found = [row["step"] for row in rows]
    yield holds("every step once, after the resume", found == list(range(1, steps + 1)), str(found))
    yield from _against_plan(short, rows[1:])
    yield _without_alarm(short.directory)
    replay = short.on_ranks("train", str(short.directory), "--replay", str(steps - 1))
    yield succeeds(f"replay of step {steps - 1}", replay, "the same figures")


def _without_alarm(run: Path) -> Measurement:
    alarms = sorted({each.alarm for each in read_alarms(run)})
    return holds("no alarm", not alarms, ", ".join(alarms) or "none", "WARN")


def _against_plan(short: ShortRun, rows: Rows) -> Iterator[Measurement]:
    """Medians of the steps against the plan of the same lengths."""
    plan, phases = short.plan(rows), ("rollout", "score", "update", "sync")
    spent = {phase: median(rows, f"seconds_{phase}") for phase in phases}
    busy = spent["score"] + spent["update"]
    yield at_most("seconds of score and update", busy, plan.training.seconds, "s")
    if plan.serving:
        yield at_most("seconds of rollouts", spent["rollout"], plan.serving.seconds, "s")
        yield at_most("seconds of sync", spent["sync"], plan.serving.sync_seconds, "s")
    for phase, seconds in spent.items():
        yield Measurement(f"seconds_{phase}", seconds, "", "s")
    if peak := median(rows, "gpu_memory_peak"):
        planned = (plan.worst.training - plan.worst.communication) / GIB
        yield at_most("gpu_memory_peak", peak, planned, "GiB")
        if mfu := median(rows, "mfu"):  # none of a GPU whose peak is not known
            yield at_least("mfu", mfu, plan.mfu, "of peak")
        yield Measurement("tokens_per_second", median(rows, "tokens_per_second"), "", "per GPU")


# K10
NODES, GPUS_PER_NODE = 2, 8
RECIPE = "short_cot_32b"
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


class Job:
    """A submitted job on NODES nodes, with the output in a file. Options of a cluster (account,
    partition, memory) come from Slurm's own variables, SBATCH_ACCOUNT and the like.
    """

    def __init__(
        self, root: Path, output: Path, script: str, *words: str, **variables: str
    ) -> None:
        self.output = output
        place = [f"--output={output}", f"--chdir={root}", f"--nodes={NODES}"]
        command = ["sbatch", "--parsable", *place, str(root / "slurm" / script), *words]
        submitted = checked(command, MEGATRON_STARE=str(root), **variables)
        self.number = last_line(submitted.partition(";")[0])

    def __getitem__(self, field: str) -> str:
        """A field of `scontrol show job`."""
        shown = checked(["scontrol", "show", "job", self.number])
        found = re.search(rf"\b{field}=(\S*)", shown)
        return found[1] if found else ""

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        checked(["scancel", self.number])

    def over(self) -> bool:
        return self["JobState"] in OVER

    def wait(self, what: str, come: State) -> None:
        """Wait for a state. RuntimeError: the job ended, or it takes too long."""
        _wait(what, come, self.over, self.output, *OF_A_JOB)


def jobs(day: Day) -> Iterator[Measurement]:
    """K10: K0 and K5 on every node, the links between them, and a run that USR1 moves on."""
    root = checkout()
    if root is None or not shutil.which("sbatch"):
        raise Skipped("needs sbatch and the checkout; run it where jobs are submitted")
    try:
        checked(["sinfo", "--noheader"])
    except (OSError, RuntimeError) as error:
        raise Skipped(f"Slurm does not answer: {error}") from error
    yield from _nodes(day, root)
    yield from _requeued(day, root)


def _nodes(day: Day, root: Path) -> Iterator[Measurement]:
    place, output = day.path / "nodes", day.path / "nodes.out"
    shutil.rmtree(place, ignore_errors=True)  # of a stage that runs again
    words = ["--stages", "K0,K5", *["--rehearse"] * day.rehearsal, *day.overrides]
    with Job(root, output, "gpuday.sbatch", *words, GPUDAY=str(place)) as job:
        job.wait("end", job.over)
    files = sorted(place.glob("*/K*.json"))
    yield holds(f"{NODES} nodes accepted", len(files) == 2 * NODES, f"{len(files)} results")
    for file in files:
        result = kept(file.parent, file.stem)
        assert result is not None
        faults = [row.what for row in result.rows if row.verdict == "FAIL"]
        found = f"{result.status}, FAIL: {', '.join(faults) or 'none'}"
        yield holds(f"{file.stem} on {file.parent.name}", not result.faulty, found)
    finding = r"^(OK|WARN|FAIL) +((?:bandwidth|clocks|versions): .*)$"
    for verdict, line in re.findall(finding, text_of(output), re.M):
        yield Measurement("between the nodes", line, verdict=verdict)


def _requeued(day: Day, root: Path) -> Iterator[Measurement]:
    short = ShortRun(day, "requeued", 10_000, servers=None)
    source = short.source if day.rehearsal else RECIPE
    place, shared = day.path / "requeued.out", str(int(not day.rehearsal))
    with Job(root, place, "train.sbatch", source, *short.settings, COLOCATED=shared) as job:
        job.wait("step 3", lambda: len(short.rows()) >= 3)
        if not day.rehearsal:
            count = NODES * GPUS_PER_NODE // find_recipe(RECIPE).sglang.gpus_per_server
            said = re.search(r"servers: (http.*)", text_of(place))
            servers = len(said[1].split()) if said else 0
            found = f"{servers} servers, {count} wanted"
            yield holds("servers have the recipe's GPUs", servers == count, found)
        checked(["scancel", "--batch", "--signal=USR1", job.number])
        job.wait("requeue", lambda: int(job["Restarts"] or 0) > 0)
        step = len(short.rows())
        job.wait(f"step {step + 1} after the requeue", lambda: len(short.rows()) > step)
        steps = [row["step"] for row in short.rows()]
        yield holds("every step once", steps == list(range(1, len(steps) + 1)), f"{len(steps)}")
