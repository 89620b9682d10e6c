"""Several runs from one cold start: the quickstart's comparison, and any other recipe's.

    run.dir/seed<N>/world        the quickstart's data and random model (compare.world=mirror_grid)
    run.dir/seed<N>/cold_start   the supervised checkpoint that all arms start from
    run.dir/seed<N>/<arm>        one ordinary run each
    run.dir/summary.json, report.html

Arms run as child processes, one per core if memory holds as many and one at a time on a GPU, and
show in one table. A child is the ordinary command on the arm's own config.yaml; it ends with a
checkpoint if its parent dies. A part that is complete is skipped, and any other is resumed: an
interrupted comparison continues.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import torch.distributed as dist

from megatron_stare.compare.worlds import calculator as calculator_world
from megatron_stare.compare.worlds import mirror_grid as quickstart_world
from megatron_stare.config import (
    CompareConfig,
    Config,
    NoSignalError,
    RunAlarm,
    UserError,
    nearest,
    override,
)
from megatron_stare.loop import cold_start, run_directory
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.resolve import check_ahead
from megatron_stare.loop.trainer import Trainer
from megatron_stare.loop.watchdog import HUNG, RANKS
from megatron_stare.losses.registry import all_objectives, find_objective, reading
from megatron_stare.policy import runtime
from megatron_stare.policy.huggingface.files import read_header, weight_files
from megatron_stare.policy.topology import Topology, release_workspaces
from megatron_stare.reporting import heartbeat
from megatron_stare.reporting.console import print_summary
from megatron_stare.reporting.live import training
from megatron_stare.reporting.logbook import METRICS_NAME, Tail
from megatron_stare.reporting.report import keep_report
from megatron_stare.reporting.summary import SUMMARY_NAME, mean_runs, summarize_run, target_of
from megatron_stare.rollout.sglang.access import KEY_VARIABLE, api_key
from megatron_stare.system import atomic_write, end_with_parent, return_memory


class World(NamedTuple):
    """Data and model that a quickstart generates."""

    make: Callable[[Path, int], None]  # into a directory, for a seed
    heldout: tuple[str, ...]  # names of its held-out files
    caveats: tuple[str, ...]  # to be printed with its numbers


ONE_STEP = (
    "Every batch is used for one gradient step, so the ratio is 1 and clipping (clip-higher too) "
    "is inactive."
)
WORLDS = {
    "mirror_grid": World(
        quickstart_world.make_world, ("heldout_hard", "heldout_easy"), quickstart_world.CAVEATS
    ),
    "calculator": World(
        calculator_world.make_calculator_world, ("heldout",), calculator_world.CAVEATS
    ),
}


def compare(
    config: Config, topology: Topology, interrupt: Interrupt, command: str, force: bool = False
) -> bool:
    """Run every arm for every seed, then write summary and report. `force`: even if the plan of an
    arm does not fit. False where a signal ended it early. UserError: some failed; the others, and
    the report, are whole.
    """
    if topology.is_first:
        run_directory.claim(config)
    seeds = config.compare.seeds or [config.run.seed]
    runs: dict[tuple[int, str], Config] = {}
    for seed in seeds:
        prepared = _prepare_seed(config, seed, topology, interrupt)
        if prepared is None:
            return False
        runs |= {(seed, arm): run for arm, run in prepared.items()}
    runs = {key: _own_port(run, place) for place, (key, run) in enumerate(runs.items())}
    if topology.world_size == 1:
        failed = run_side_by_side(list(runs.values()), interrupt, force)
    else:
        failed = _one_after_another(list(runs.values()), topology, interrupt)
    if failed is None:
        return False
    if topology.is_first:
        _write_summary(config, runs, seeds, command, failed)
        keep_report(Path(config.run.dir))
    if failed:
        first = ": ".join(next(iter(failed.items())))
        if topology.is_first:
            print_summary(Path(config.run.dir))
        raise UserError(
            f"{len(failed)} of {len(runs)} runs ended early, the first: {first}; how far they came "
            f"is in {Path(config.run.dir) / 'report.html'}"
        )
    return True


def _one_after_another(
    configs: list[Config], topology: Topology, interrupt: Interrupt
) -> dict[str, str] | None:
    """Train every config in this process, on all ranks; results as of run_side_by_side."""
    failed: dict[str, str] = {}
    for config in configs:
        try:
            with run_directory.locked(Path(config.run.dir), enabled=topology.is_first):
                if not Trainer(config, topology).run(interrupt):
                    return None
        except (NoSignalError, RunAlarm, FloatingPointError) as error:
            failed[label(config)] = str(error)
        return_memory()
        release_workspaces()  # for the next arm's servers on the same GPU
    return failed


def check_load(config: Config, load: str) -> None:
    """UserError: `load` names a checkpoint of one run, and the config is a comparison."""
    if config.compare.arms and load != "latest":
        raise UserError(
            f"load={load} names a checkpoint of one run, and this is a comparison; give the "
            f"directory of one of its runs, e.g. {Path(config.run.dir) / 'seed0'}/ARM"
        )


def on_paper(config: Config, directory: Path) -> dict[str, Config]:
    """The config of every arm's run, by arm, without running anything; "" is the only run of a
    config without arms. The world is made in `directory`, and the model that the cold start would
    start from stands for its result.
    """
    if not config.compare.arms:
        return {"": cold_start.planned(config)}
    seed = (config.compare.seeds or [config.run.seed])[0]
    seeded = override(config, [f"run.seed={seed}"])
    if config.compare.world:
        WORLDS[config.compare.world].make(directory, seed)
        seeded = _in_world(seeded, directory)
    start, place = seeded.policy.hf_checkpoint, Path(config.run.dir) / f"seed{seed}"
    return {arm: _arm_config(seeded, arm, start, place) for arm in _arm_names(config.compare)}


def between_losses(config: Config, names: list[str]) -> Config:
    """The config with an arm for every name: the recipe's own arm of that name, else the objective
    with its published settings, or a loss of the user's by its dotted path. UserError: none is
    known, or a name stands twice.
    """
    own, objectives = config.compare.arms, all_objectives()
    for name in names:
        if "." in name and name not in own:
            find_objective(name)
        elif name not in own and name not in objectives:
            known = {*own, *objectives}
            raise UserError(
                f"--losses names {name!r}, which is unknown{nearest(name, known, 'algorithms')}"
            )
        if names.count(name) > 1:
            raise UserError(f"--losses names {name!r} {names.count(name)} times; once is enough")
    arms = own | {name: [f"loss.name={name}"] for name in names if name not in own}
    compared = dataclasses.replace(config.compare, arms=arms, run=names)
    return dataclasses.replace(config, compare=compared)


def _prepare_seed(
    config: Config, seed: int, topology: Topology, interrupt: Interrupt
) -> dict[str, Config] | None:
    """Make the world and the cold start of one seed if they are missing.
    The configs of its arms; None: interrupted.
    """
    directory = Path(config.run.dir) / f"seed{seed}"
    seeded = override(config, [f"run.seed={seed}"])
    if config.compare.world:
        if topology.is_first:
            WORLDS[config.compare.world].make(directory / "world", seed)
        dist.barrier()
        seeded = _in_world(seeded, directory / "world")
    names = _arm_names(config.compare)
    _check_ahead(seeded, names, directory)
    alone = override(seeded, [f"run.dir={directory}"])
    ready = cold_start.started(alone, topology, interrupt)
    if ready is None:
        return None
    start = ready.policy.hf_checkpoint
    return {name: _arm_config(seeded, name, start, directory) for name in names}


def _check_ahead(config: Config, names: list[str], directory: Path) -> None:
    """UserError: an arm that has not begun names a file, model or function that does not exist."""
    faults: dict[str, list[str]] = {}
    for arm in names:
        try:
            if not run_directory.has_begun(directory / arm):
                check_ahead(_arm_config(config, arm, config.policy.hf_checkpoint, directory))
        except UserError as error:
            faults.setdefault(str(error), []).append(arm)
    if faults:
        lines = (f"arm {', '.join(arms)}: {fault}" for fault, arms in faults.items())
        raise UserError("\nerror: ".join(lines))


def _arm_names(settings: CompareConfig) -> list[str]:
    for name in settings.run:
        if name not in settings.arms:
            raise UserError(
                f"compare.run names arm {name!r}, which is unknown{nearest(name, settings.arms)}"
            )
    return settings.run or list(settings.arms)


def _arm_config(config: Config, arm: str, start: str, directory: Path) -> Config:
    """The config of an arm. Settings that nothing in the arm reads and that the arm does not set
    are those of other arms: they stay at their defaults.
    """
    own = config.compare.arms[arm]
    given = {each.partition("=")[0].removeprefix("loss.") for each in own}
    alone = dataclasses.replace(config, compare=CompareConfig())
    found = override(alone, [*own, f"policy.hf_checkpoint={start}", f"run.dir={directory / arm}"])
    return dataclasses.replace(found, loss=reading(found.loss, given))


def _own_port(config: Config, place: int) -> Config:
    """The config with a Prometheus port of its own: runs are trained at the same time."""
    port = config.run.prometheus_port
    return override(config, [f"run.prometheus_port={port + place}"]) if port else config


def _in_world(config: Config, directory: Path) -> Config:
    """The config on the files of its world."""
    files = {
        "policy.hf_checkpoint": "model",
        "data.prompt_data": "train.jsonl",
        "cold_start.data": "cold_start.jsonl",
    }
    for name in WORLDS[config.compare.world].heldout:
        files[f"evaluation.eval_data.{name}"] = f"{name}.jsonl"
    return override(config, [f"{key}={directory / file}" for key, file in files.items()])


def caveats(config: Config) -> list[str]:
    """The sentences to print with the comparison's numbers."""
    of_world = WORLDS[config.compare.world].caveats if config.compare.world else ()
    steps = config.train.num_steps_per_rollout * config.train.epochs
    fresh = steps == 1 and config.rollout.asynchrony == "on_policy"
    return [*of_world, *([ONE_STEP] if fresh else [])]


def _write_summary(
    config: Config,
    runs: dict[tuple[int, str], Config],
    seeds: list[int],
    command: str,
    failed: dict[str, str],
) -> None:
    """summary.json: `runs` of the seed, or their means over seeds; `seeds` holds each seed's own.
    A failed or solved run counts up to its last step, and a caveat says so.
    """
    by_seed: dict[str, dict[str, dict[str, float | int | None]]] = {str(seed): {} for seed in seeds}
    early: list[str] = []
    for (seed, arm), run in runs.items():
        target = target_of(run, config.loss.target_entropy)
        found = by_seed[str(seed)][arm] = summarize_run(Path(run.run.dir), target)
        name = label(run)
        if why := failed.get(name) or run_directory.solved(Path(run.run.dir)):
            early.append(f"{name} ended at step {found['steps']}: {why}")
    summary = {
        "seed": seeds[0],
        "runs": by_seed[str(seeds[0])] if len(seeds) == 1 else mean_runs(by_seed),
        "seeds": by_seed,
        "command": command,
        "caveats": [*caveats(config), *early],
    }
    atomic_write(Path(config.run.dir) / SUMMARY_NAME, json.dumps(summary, indent=2) + "\n")


LOG_NAME = "log.txt"
_POLL_SECONDS = 0.5
# Memory of a run on a CPU: its libraries, and bytes per weight of the model (weights, gradients,
# the optimizer's state, activations, the engine's weights and cache). SmolLM2-135M needs 6 to 9 GB
# in bf16 and in fp32.
_LIBRARIES, _PER_WEIGHT = 1 << 30, 60
# Exit codes of runs that a signal stopped, and of those that had no handlers for it yet.
_STOPPED = (0, 128 + signal.SIGINT)
_STOPPED_EARLY = (128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)
Running = list[tuple[Config, "subprocess.Popen[bytes]"]]


def run_side_by_side(
    configs: list[Config], interrupt: Interrupt, force: bool = False
) -> dict[str, str] | None:
    """Train every config to its end. The last lines of failed runs' logs, by run; None: a signal
    stopped them. UserError: a run failed before its first step, as the others would.
    """
    for config in configs:
        with run_directory.locked(Path(config.run.dir)):
            run_directory.claim(config)
    tails = {config.run.dir: Tail(Path(config.run.dir) / METRICS_NAME) for config in configs}
    for tail in tails.values():
        tail.read()
    failed: dict[str, str] = {}
    waiting = [config for config in configs if not _complete(config, tails)]
    jobs = _runs_at_once(waiting)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    total = sum(config.train.num_rollout for config in configs)
    completed = sum(tail.step for tail in tails.values())
    running: Running = []
    stopped = False
    beats: list[int] = []
    with training("training", total, completed=completed) as live, heartbeat.waiting():
        while waiting or running:
            while waiting and len(running) < jobs and not interrupt.noted:
                config = waiting.pop(0)
                running.append((config, _start(config, threads, force)))
            if interrupt.noted and not stopped:  # once: a second signal would end them at once
                waiting, stopped = [], True
                _stop(running)
            time.sleep(_POLL_SECONDS)
            if beats != (beats := _beats(running)):
                heartbeat.moved()
            codes = [child.poll() for _, child in running]
            for (config, _), code in zip(running, codes, strict=True):
                for row in tails[config.run.dir].read():
                    live.step(row, run=label(config))
                if code not in (None, *_STOPPED, *(_STOPPED_EARLY if interrupt.noted else ())):
                    failed[label(config)] = _failure(config, code, running)
                started = tails[config.run.dir].step > 0
                solved = run_directory.solved(Path(config.run.dir)) if code == 0 else ""
                if not started and (why := failed.get(label(config), solved)):
                    _stop(running)
                    raise UserError(f"arm {Path(config.run.dir).name} failed: {why}")
            running = [one for one, code in zip(running, codes, strict=True) if code is None]
    whole = all(_complete(config, tails) or label(config) in failed for config in configs)
    return failed if whole else None


def _runs_at_once(configs: list[Config]) -> int:
    """One on a GPU, whose memory each run plans for itself alone. Else one per core, and no more
    than the available memory holds; a line says so.
    """
    if runtime.device().type != "cpu":
        return 1
    wanted = max(1, min(len(configs), os.cpu_count() or 1))
    models = {Path(config.policy.hf_checkpoint) for config in configs}
    weights = max(map(_weights_in, models), default=0)
    need, available = _LIBRARIES + _PER_WEIGHT * weights, psutil.virtual_memory().available
    jobs = max(1, min(wanted, available // need))
    if jobs < wanted:
        print(
            f"{jobs} of {wanted} runs at a time: each may need {need / 1e9:.1f} GB of memory, and "
            f"{available / 1e9:.1f} GB are available",
            file=sys.stderr,
        )
    return jobs


def _weights_in(model: Path) -> int:
    """The number of weights in the files of a Hugging Face directory."""
    tensors = (info for file in weight_files(model) for info in read_header(file)[0])
    return sum(math.prod(info.shape) for info in tensors)


def _beats(running: Running) -> list[int]:
    """When the ranks of the running children wrote their beats: their own watchdogs do so."""
    files = [file for config, _ in running for file in Path(config.run.dir, RANKS).glob("*.json")]
    return [file.stat().st_mtime_ns for file in files]


def _complete(config: Config, tails: dict[str, Tail]) -> bool:
    directory = Path(config.run.dir)
    last = tails[config.run.dir].step
    return last >= config.train.num_rollout or bool(last and run_directory.solved(directory))


def label(config: Config) -> str:
    """A run's name in the comparison, e.g. seed0/stare."""
    return "/".join(Path(config.run.dir).parts[-2:])


def _start(config: Config, threads: int, force: bool) -> subprocess.Popen[bytes]:
    directory = Path(config.run.dir)
    config_file = str(directory / run_directory.CONFIG_NAME)
    with (directory / LOG_NAME).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_stare", "train", config_file, *["--force"] * force],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)} | _secrets(config),
            preexec_fn=functools.partial(end_with_parent, signal.SIGTERM),
        )


def _secrets(config: Config) -> dict[str, str]:
    """Environment variables with secrets, which the arm's config.yaml does not hold."""
    key = api_key(config.sglang)
    return {KEY_VARIABLE: key} if key else {}


def _stop(running: Running) -> None:
    for _, child in running:
        child.send_signal(signal.SIGTERM)


def _failure(config: Config, code: int | None, running: Running) -> str:
    """The last line of a failed child's log. A child that hung ends all runs."""
    log = Path(config.run.dir) / LOG_NAME
    if code == HUNG:
        _stop(running)
        print(f"arm {Path(config.run.dir).name} hung; see {log}", file=sys.stderr)
        sys.exit(HUNG)
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else code}; see {log}"
