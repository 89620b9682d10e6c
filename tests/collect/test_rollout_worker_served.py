"""Runs on servers: which server they ask, and what a kill of the run leaves."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_stare.collect.journal import Frame, journal_directory, read_frames
from megatron_stare.config import Config
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from tests.forked import train
from tests.rollout.sglang.fake_server import fake_servers
from tests.rollout.sglang.test_requests_streaming import wait_until
from tests.small_run import rows_of, small_config


def served(directory: Path, urls: list[str], *options: str) -> Config:
    """A run whose rollouts come from fake servers."""
    return small_config(
        directory,
        *("rollout.engine=sglang", f"sglang.urls=[{','.join(urls)}]", "sglang.sync_method=tensor"),
        *("sglang.verify_weights=false", "sglang.stream_interval=2", "sglang.request_timeout=2"),
        *("rollout.rollout_max_response_len=30", "rollout.dynamic_sampling=false"),
        *("scoring.reward=tests.scoring.verifier_cases.obedient", "scoring.verifier_timeout=50"),
        *("run.save_interval=1", "train.num_rollout=3", *options),
    )


def journaled(config: Config) -> list[tuple[int, int]]:
    """(prompt, number) of every rollout that was ever finished."""
    files = [file.read_bytes() for file in journal_directory(config).glob("*.frames")]
    found = [each for content in files for each in read_frames(content)]
    return [tuple(each.extra["key"]) for each in found if isinstance(each, Frame)]


def descendants_of(process: int) -> set[int]:
    """Processes that this one started, those that they started, and so on."""
    try:
        return {each.pid for each in psutil.Process(process).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def is_there(process: int) -> bool:
    """Whether it runs and is not a zombie."""
    status = Path(f"/proc/{process}/stat")
    return status.is_file() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("way", ["router", pytest.param("colocated", marks=pytest.mark.slow)])
def test_a_run_asks_its_current_servers(way: str, tmp_path: Path, topology: Topology):
    with fake_servers(1, shortest=8, longest=24) as urls:
        options = {
            "router": (f"sglang.router_url={urls[0]}",),
            "colocated": ("sglang.colocated=true",),
        }[way]
        config = served(tmp_path, list(urls), *options)
        assert Trainer(config, topology).run(Interrupt())
        with urllib.request.urlopen(f"{urls[0]}/seen") as answer:
            seen = json.load(answer)
    assert seen["paths"]["/generate"] >= 3 * 16 and len(rows_of(config)) == 3
    assert bool(seen["keys"]) == (way == "router")
    released = seen["paths"].get("/release_memory_occupation", 0)
    assert (released >= 3) == (way == "colocated")


@pytest.mark.parametrize("asynchrony", ["on_policy", "fully_async"])
def test_a_killed_run_samples_no_finished_rollout_again(
    asynchrony: str, tmp_path: Path, topology: Topology
):
    """The kill comes when the first group is judged; processes of the run end with it."""
    with fake_servers(2, shortest=8, longest=24, hold_at=14) as urls:
        options = (f"rollout.asynchrony={asynchrony}", "rollout.max_staleness=9")
        config = served(tmp_path, list(urls), *options)
        child = train(config)
        try:
            wait_until(
                lambda: bool(descendants_of(child.pid) and journaled(config)) or bool(child.code)
            )
            assert child.code is None, child.output
            below = descendants_of(child.pid)
        finally:
            child.kill()
        finished = journaled(config)
        wait_until(lambda: not any(is_there(process) for process in below))
        assert Trainer(config, topology).run(Interrupt())
    keys = journaled(config)
    assert finished and set(finished) <= set(keys)
    assert len(keys) == len(set(keys)) >= 3 * 16, "none was sampled again"
    rows = rows_of(config)
    assert len(rows) == 3 and rows[-1]["journal_rollouts"] >= 1


@pytest.mark.slow
def test_interrupted_episodes_continue(tmp_path: Path, topology: Topology):
    """A run that a signal ends in an evaluation, and one that is not ended."""
    options = ("tools.environment=calculator", "rollout.engine_batch_size=8")
    options += (f"evaluation.eval_data.held={tmp_path}/problems.jsonl",)
    options += ("evaluation.eval_interval=1", "evaluation.n_samples_per_eval_prompt=2")
    whole = small_config(tmp_path, *options)
    assert Trainer(whole, topology).run(Interrupt())
    config = small_config(tmp_path, *options, f"run.dir={tmp_path}/ended")
    with Interrupt() as interrupt:
        run = Trainer(config, topology)
        evaluate = run.evaluator.evaluate

        def signalled(step: int) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            interrupt.asked()  # a signal is handled between two instructions
            run.evaluator.stop()
            return evaluate(step)

        run.evaluator.evaluate = signalled  # type: ignore[method-assign]
        assert not run.run(interrupt)
    assert len(rows_of(config)) < 2
    assert Trainer(config, topology).run(Interrupt())
    # Not bit for bit: a turn is decoded together with the turns of that moment.
    names = ("step", "reward", "response_length", "episode/turns", "eval/held/avg_at_k", "entropy")
    metrics = [[[row[name] for name in names] for row in rows_of(run)] for run in (whole, config)]
    assert len(metrics[0]) == 3 and metrics[1] == [
        pytest.approx(row, rel=1e-4) for row in metrics[0]
    ]
