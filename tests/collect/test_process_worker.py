"""Worker processes: a run is the same for any number of them, and outlives their deaths."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.collect import process_worker
from megatron_stare.collect.journal import Frame, journal_directory, read_frames
from megatron_stare.collect.process_worker import ProcessWorker
from megatron_stare.collect.worker_main import GROUP, Channel, WorkerSettings
from megatron_stare.config import Config, EngineError, UserError, dump, override
from megatron_stare.loop.assemble import build_worker_parts
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import Topology
from tests.distributed import run_distributed
from tests.paths import ROOT
from tests.rollout.sglang.fake_server import fake_servers
from tests.rollout.sglang.test_requests_streaming import wait_until
from tests.small_run import rows_of, small_config


@pytest.mark.slow
def test_metrics_are_the_same_for_any_number_of_workers(tmp_path: Path, topology: Topology):
    rows = []
    for workers in (0, 1, 2):
        config = small_config(
            tmp_path,
            f"rollout.workers_per_node={workers}",
            "rollout.engine_batch_size=8",  # two prompts: several workers have something to do
            f"run.dir={tmp_path}/run_{workers}",
            f"evaluation.eval_data.held={tmp_path}/problems.jsonl",
            "evaluation.eval_interval=2",
        )
        assert Trainer(config, topology).run(Interrupt())
        rows.append(rows_of(config))
    assert len(rows[0]) == 3 and all(those == rows[0] for those in rows)
    assert ["eval/held/avg_at_k" in row for row in rows[0]] == [False, True, True]


def one_run(rank: int, world_size: int, directory: str) -> bool:
    config = small_config(Path(directory), "rollout.workers_per_node=1")
    return Trainer(config, topologies.start(config.policy)).run(Interrupt())


def test_a_worker_that_cannot_be_started_ends_the_run(tmp_path: Path):
    """Processes that die with their parent, as the ranks of these tests are, may have none."""
    with pytest.raises(RuntimeError, match=r"worker process 0 could not be started .*daemonic"):
        run_distributed(one_run, 1, str(tmp_path))


@pytest.mark.slow
def test_interrupted_episodes_continue_with_another_number_of_workers(
    tmp_path: Path, topology: Topology
):
    options = ("tools.environment=calculator", "rollout.engine_batch_size=8")
    options += (f"evaluation.eval_data.held={tmp_path}/problems.jsonl",)
    options += ("evaluation.eval_interval=1", "evaluation.n_samples_per_eval_prompt=2")
    whole = small_config(tmp_path, *options, "rollout.workers_per_node=0")
    assert Trainer(whole, topology).run(Interrupt())
    ended = [*options, f"run.dir={tmp_path}/ended"]
    with Interrupt() as interrupt:
        run = Trainer(small_config(tmp_path, *ended, "rollout.workers_per_node=2"), topology)
        evaluate = run.evaluator.evaluate

        def signalled(step: int) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            interrupt.asked()  # a signal is handled between two instructions
            run.evaluator.stop()
            return evaluate(step)

        run.evaluator.evaluate = signalled  # type: ignore[method-assign]
        assert not run.run(interrupt)
    config = small_config(tmp_path, *ended, "rollout.workers_per_node=1")
    assert len(rows_of(config)) < 2
    assert Trainer(config, topology).run(Interrupt())
    # Not bit for bit: a turn is decoded together with the turns of that moment.
    names = ("step", "reward", "response_length", "episode/turns", "eval/held/avg_at_k", "entropy")
    metrics = [[[row[name] for name in names] for row in rows_of(run)] for run in (whole, config)]
    assert len(metrics[0]) == 3 and metrics[1] == [
        pytest.approx(row, rel=1e-4) for row in metrics[0]
    ]


@pytest.mark.parametrize("way", ["router", pytest.param("colocated", marks=pytest.mark.slow)])
def test_workers_ask_the_current_servers(way: str, tmp_path: Path, topology: Topology):
    with fake_servers(1, shortest=8, longest=24) as urls:
        options = {
            "router": (f"sglang.router_url={urls[0]}",),
            "colocated": ("sglang.colocated=true",),
        }[way]
        config = served(tmp_path, list(urls), *options, "rollout.workers_per_node=2")
        assert Trainer(config, topology).run(Interrupt())
        with urllib.request.urlopen(f"{urls[0]}/seen") as answer:
            seen = json.load(answer)
    assert seen["paths"]["/generate"] >= 3 * 16 and len(rows_of(config)) == 3
    assert bool(seen["keys"]) == (way == "router")
    released = seen["paths"].get("/release_memory_occupation", 0)
    assert (released >= 3) == (way == "colocated")


def served(directory: Path, urls: list[str], *options: str) -> Config:
    """A run whose rollouts come from fake servers: a request that reaches HOLD waits."""
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
    files = [file.read_bytes() for file in journal_directory(config).rglob("*.frames")]
    found = [each for content in files for each in read_frames(content)]
    return [tuple(each.extra["key"]) for each in found if isinstance(each, Frame)]


def children_of(process: int) -> set[int]:
    """Processes that this one started."""
    lists = [file.read_text() for file in Path(f"/proc/{process}/task").glob("*/children")]
    return {int(word) for text in lists for word in text.split()}


def is_there(process: int) -> bool:
    """Whether it runs and is not a zombie."""
    status = Path(f"/proc/{process}/stat")
    return status.is_file() and status.read_text().rpartition(")")[2].split()[0] != "Z"


class Killer(threading.Thread):
    """Kills a worker process when some of its rollouts with this number or a later one, and not
    all, are finished.
    """

    def __init__(
        self, worker: ProcessWorker, config: Config, number: int = 0, sent: int = signal.SIGKILL
    ) -> None:
        super().__init__()
        self.worker, self.config, self.number, self.sent = worker, config, number, sent
        self.finished: list[tuple[int, int]] = []
        self.orphans: set[int] = set()

    def run(self) -> None:
        wait_until(self._in_time)
        self.orphans = children_of(self.worker.process.pid)
        os.kill(self.worker.process.pid, self.sent)
        self.finished = journaled(self.config)

    def _in_time(self) -> bool:
        there = any(number >= self.number for _, number in journaled(self.config))
        return there and bool(children_of(self.worker.process.pid))


@pytest.mark.parametrize("streamed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_killed_worker_restarts_and_loses_no_finished_rollout(
    streamed: bool, tmp_path: Path, topology: Topology
):
    kind = "fully_async" if streamed else "on_policy"
    with fake_servers(2, shortest=8, longest=24, hold_at=14) as urls:
        options = ("rollout.workers_per_node=2", f"rollout.asynchrony={kind}")
        options += ("rollout.max_staleness=9",)
        run = Trainer(served(tmp_path, list(urls), *options), topology)
        workers = run.collector.dispatcher.workers if streamed else run.collector.workers.own
        killer = Killer(workers[0], run.config)
        killer.start()
        assert run.run(Interrupt())
        killer.join()
    assert killer.finished and killer.orphans
    assert [worker.starts for worker in workers] == [2, 1]
    keys = journaled(run.config)
    assert len(keys) == len(set(keys)) >= 3 * 16, "what was finished was not sampled again"
    assert set(killer.finished) <= set(keys)
    rows = rows_of(run.config)
    assert len(rows) == 3 and rows[-1]["journal_rollouts"] >= 1
    wait_until(lambda: not any(is_there(process) for process in killer.orphans))


def test_a_stalled_worker_is_found_and_replaced(
    tmp_path: Path, topology: Topology, caplog: pytest.LogCaptureFixture
):
    """It is stopped while it has prompts in flight and a call to answer."""
    with fake_servers(2, shortest=8, longest=24, hold_at=14) as urls:
        options = ("rollout.workers_per_node=2", "rollout.asynchrony=fully_async")
        options += ("rollout.max_staleness=9", "run.hang_timeout=12")
        run = Trainer(served(tmp_path, list(urls), *options), topology)
        workers = run.collector.dispatcher.workers
        stopper = Killer(workers[0], run.config, sent=signal.SIGSTOP)
        stopper.start()
        assert run.run(Interrupt())
        stopper.join()
    assert workers[0].starts >= 2 and len(rows_of(run.config)) == 3
    assert "worker process 0 has not answered" in caplog.text
    keys = journaled(run.config)
    assert len(keys) == len(set(keys)), "what was finished was not sampled again"


def await_second_start(directory: Path) -> None:
    """A process that runs process_worker.main is killed, and started a second time."""
    config = small_config(directory, "run.hang_timeout=1")
    settings = WorkerSettings(config, build_worker_parts, 0, 1, 1, None)
    worker = ProcessWorker(settings, lambda step: {})
    try:
        wait_until(lambda: worker.starts == 2)
    finally:
        worker.close()


def answering(connection: Any, settings: Any) -> None:
    """A process that sends messages all the time, and no beat."""
    channel = Channel(connection)
    while True:
        channel.send((GROUP, -1, {}, None))
        time.sleep(0.01)


def test_a_worker_that_stalls_and_still_sends_messages_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(process_worker, "main", answering)
    monkeypatch.setattr(process_worker, "BEAT_SECONDS", 0.1)
    await_second_start(tmp_path)
    assert "worker process 0 has not answered for 0.5 s" in caplog.text


def torn(connection: Any, settings: Any) -> None:
    """A process that stops in the middle of a message."""
    os.write(connection.fileno(), struct.pack("!i", 100) + b"half")
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_worker_that_stops_in_the_middle_of_a_message_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    forked = multiprocessing.get_context("fork")  # imports nothing, so that it starts at once
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: forked)
    monkeypatch.setattr(process_worker, "main", torn)
    monkeypatch.setattr(process_worker, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(process_worker, "START_SECONDS", 1.0)
    await_second_start(tmp_path)


def test_the_wait_for_unfinished_rollouts_is_bounded(
    tmp_path: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch
):
    """run.hang_timeout=0 replaces no stopped process."""
    monkeypatch.setattr(process_worker, "START_SECONDS", 0.5)
    monkeypatch.setattr(process_worker, "PATIENCE_SECONDS", 2.0)  # for its end
    run = Trainer(
        small_config(tmp_path, "rollout.workers_per_node=1", "run.hang_timeout=0"), topology
    )
    (worker,) = run.collector.workers.own
    try:
        wait_until(lambda: worker.process is not None and worker.process.pid is not None)
        os.kill(worker.process.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"worker process 0 has not sent its unfinished"):
            worker.partial_rollouts()
    finally:
        for part in (run.collector, run.engine, run.judge):
            part.close()


@pytest.mark.slow
def test_a_worker_that_is_killed_during_resampling_continues_it(tmp_path: Path, topology: Topology):
    """Its journal distinguishes first rollouts (0 .. 3) from further ones (4 .. 7)."""
    again = ("rollout.resampling.method=aepo", "rollout.resampling.prompt_share=1")
    with fake_servers(2, shortest=8, longest=24, hold_at=14) as urls:
        options = (*again, "rollout.workers_per_node=2", "rollout.max_staleness=9")
        config = served(tmp_path, list(urls), *options)
        run = Trainer(config, topology)
        killer = Killer(run.collector.workers.own[0], config, number=4)
        killer.start()
        assert run.run(Interrupt())
        killer.join()
    assert [worker.starts for worker in run.collector.workers.own] == [2, 1]
    keys = journaled(config)
    assert len(keys) == len(set(keys)) and set(killer.finished) <= set(keys)
    assert {number for _, number in keys} == set(range(8)) and len({key[0] for key in keys}) == 12
    files = [file.read_bytes() for file in journal_directory(config).rglob("*.frames")]
    frames = [each for content in files for each in read_frames(content)]
    for each in frames:
        assert isinstance(each, Frame)
        assert (each.record.temperature is None) == (each.extra["key"][1] < 4)


def unready(response: str, label: str, metadata: dict[str, Any]) -> float:
    """A reward that has no value for anything."""
    raise ValueError("the flag is not set")


def test_a_workers_error_arrives_with_its_remedy(tmp_path: Path, topology: Topology):
    options = ("scoring.reward=tests.collect.test_process_worker.unready",)
    options += ("rollout.workers_per_node=1", "rollout.rollout_batch_size=16")
    run = Trainer(small_config(tmp_path, *options), topology)
    with pytest.raises(UserError, match="the flag is not set"):
        run.run(Interrupt())
    assert not is_there(run.collector.workers.own[0].process.pid)


@pytest.mark.slow
def test_a_worker_and_its_children_end_with_a_killed_trainer(tmp_path: Path):
    with fake_servers(1, shortest=8, longest=24, hold_at=14) as urls:
        config = served(tmp_path, list(urls), "train.num_rollout=1000")
        dump(config, tmp_path / "run.yaml")
        command = [sys.executable, "-m", "megatron_stare", "train", str(tmp_path / "run.yaml")]
        trainer = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
        try:
            wait_until(lambda: bool(journaled(config)))
            wait_until(lambda: len(generations_of(trainer.pid)) == 3)  # to the verifiers
            below = set().union(*generations_of(trainer.pid))
        finally:
            trainer.kill()
            trainer.wait()
        wait_until(lambda: not any(is_there(process) for process in below))


def generations_of(process: int) -> list[set[int]]:
    """Its children, their children, and so on."""
    found, last = list[set[int]](), children_of(process)
    while last:
        found.append(last)
        last = set().union(*map(children_of, last))
    return found


def on_nodes(rank: int, world_size: int, directory: str, urls: list[str]) -> dict[str, Any]:
    """Three runs of two ranks: of the embedded engine on one node and on two, and on servers."""
    multiprocessing.current_process().daemon = False  # it has workers
    found: dict[str, Any] = {}
    quick = ("rollout.workers_per_node=1", "rollout.engine_batch_size=8", "train.num_rollout=2")
    for name, node in {"one": 0, "two": rank, "served": rank}.items():
        os.environ["GROUP_RANK"] = str(node)
        make = functools.partial(served, urls=urls) if name == "served" else small_config
        config = override(make(Path(directory)), [*quick, f"run.dir={directory}/{name}"])
        run = Trainer(config, topologies.start(config.policy))
        workers, trained = run.collector.workers, run.learner.step
        holders: list[int] = []

        def noted(groups: Any, *others: Any, trained: Any = trained, holders: Any = holders) -> Any:
            holders.extend(group.holder for group in groups)
            return trained(groups, *others)

        run.learner.step = noted  # type: ignore[method-assign]
        assert run.run(Interrupt())
        found[name] = (len(workers.own), holders, rows_of(config) if rank == 0 else [])
    return found


@pytest.mark.slow
def test_the_first_node_samples_for_all_nodes(tmp_path: Path):
    small_config(tmp_path)
    with fake_servers(2, shortest=8, longest=24) as urls:
        first, second = run_distributed(on_nodes, 2, str(tmp_path), list(urls))
    assert [first[name][0] for name in first] == [1, 1, 1]
    assert [second[name][0] for name in second] == [0, 0, 0]
    for name in first:
        assert set(first[name][1]) == {0} and first[name][1] == second[name][1]
    assert first["one"][2] == first["two"][2], "the same bit for bit"
    rows = first["served"][2]
    assert len(rows) == 2 and rows[-1]["response_length"] > 4
    journals = sorted((tmp_path / "served/rollouts").rglob("*.frames"))
    folders = {path.parent.name for path in journals}
    assert folders == {"worker_0"}
    assert {path.name for path in journals} == {"step_00000001.frames"}, "others are not needed"
