"""A run whose servers are killed ten times, at random moments:
nothing is lost, nothing is doubled.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.logbook import read_metrics
from megatron_stare.rollout.engine import State
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.server import Server
from megatron_stare.sync.served_engine import ServedEngine
from tests.rollout.sglang.world import TOLERANCE, VERIFY, make_model
from tests.small_run import small_config

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

KILLS, STEPS, PROMPTS, SAMPLES = 10, 14, 4, 8
PATIENCE_SECONDS = 400.0
SETTINGS = (
    "rollout.engine=sglang",
    "sglang.num_servers=2",
    VERIFY,
    "sglang.health_interval=0.5",
    "sglang.sync_timeout=120",
    "policy.max_tokens_per_gpu=512",
    "rollout.rollout_max_response_len=300",
    f"rollout.rollout_batch_size={PROMPTS}",
    f"rollout.n_samples_per_prompt={SAMPLES}",
    "rollout.dynamic_sampling=false",  # one round of generation per step
    "scoring.reward=tests.rollout.sglang.test_pool_kills.recorded",
    f"train.num_rollout={STEPS}",
)


def recorded(response: str, label: str, metadata: dict[str, Any]) -> float:
    """Notes the sample in the run's record; right for about half of them."""
    with open(metadata["record"], "a") as file:
        file.write(json.dumps([metadata["number"], response]) + "\n")
    return float(sum(response.encode()) % 2 == 0)


class Killer(threading.Thread):
    """Kills a server that is generating, ten times:
    both in the first step, then about one a step.
    """

    def __init__(self, trainer: Trainer, pool: SGLangPool) -> None:
        super().__init__(daemon=True)
        self.trainer, self.pool, self.moments = trainer, pool, random.Random(7)
        self.killed: list[str] = []

    def run(self) -> None:
        for number in range(KILLS):
            while self.trainer.step < number - 1 or len(self.busy()) < (2 if number == 0 else 1):
                time.sleep(0.005)
            time.sleep(self.moments.uniform(0, 0.4 if number else 0.1))
            while not (found := self.busy()):
                time.sleep(0.005)
            victim = self.moments.choice(found)
            process = victim.process
            assert process is not None
            os.kill(process.process.pid, signal.SIGKILL)
            while process.alive():
                time.sleep(0.005)
            self.killed.append(victim.name)

    def busy(self) -> list[Server]:
        """Servers that generate at this moment."""
        return [
            server
            for server in self.pool.servers
            if server.in_flight
            and server.state is State.READY
            and server.process
            and server.process.alive()
        ]


class Patient(Interrupt):
    """Asks for nothing, but holds the run back after the last kill until every server is back."""

    def __init__(self, killer: Killer) -> None:
        super().__init__()
        self.killer = killer
        self.processes: list[psutil.Process] = []

    def asked(self) -> bool:
        deadline = time.monotonic() + PATIENCE_SECONDS
        pool = self.killer.pool
        if len(self.killer.killed) == KILLS and not self.processes:
            while (
                len(pool.health.recoveries) < KILLS
                and pool.failure is None
                and time.monotonic() < deadline
            ):
                time.sleep(0.05)
            parents = [
                psutil.Process(server.process.process.pid)
                for server in pool.servers
                if server.process
            ]
            self.processes = [
                *parents,
                *(child for one in parents for child in one.children(recursive=True)),
            ]
        return super().asked()


def row(number: int, record: Path) -> str:
    """A problem that knows its number and where its responses are recorded."""
    metadata = {"number": number, "record": str(record)}
    return json.dumps({"prompt": f"{number}+1=", "label": "", "metadata": metadata}) + "\n"


def test_ten_kills_lose_and_double_nothing(
    tmp_path: Path,
    topology: Topology,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
):
    """Every response is its own prompt's under the step's weights:
    else the trainer's log-probs of it would differ.
    """
    problems, record = tmp_path / "problems.jsonl", tmp_path / "record.jsonl"
    problems.write_text("".join(row(number, record) for number in range(STEPS * PROMPTS)))
    model = make_model(tmp_path / "served", "qwen2")
    places = (f"policy.hf_checkpoint={model}", f"data.prompt_data={problems}")
    trainer = Trainer(small_config(tmp_path, *SETTINGS, *places), topology)
    assert isinstance(trainer.engine, ServedEngine) and trainer.engine.pool is not None
    pool = trainer.engine.pool
    killer = Killer(trainer, pool)
    patient = Patient(killer)
    killer.start()
    with caplog.at_level(logging.WARNING):
        assert trainer.run(patient), "the run did not complete"
    assert len(killer.killed) == KILLS and set(killer.killed[:2]) == {"sglang_0", "sglang_1"}

    samples = [json.loads(line) for line in record.read_text().splitlines()]
    assert len(samples) == STEPS * PROMPTS * SAMPLES
    for step in range(STEPS):
        taken = Counter(
            number for number, _ in samples[step * PROMPTS * SAMPLES :][: PROMPTS * SAMPLES]
        )
        assert len(taken) == PROMPTS and set(taken.values()) == {SAMPLES}
    assert Counter(number for number, _ in samples) == dict.fromkeys(
        range(STEPS * PROMPTS), SAMPLES
    )
    long = [(number, response) for number, response in samples if len(response) > 8]
    assert len(set(long)) == len(long) > len(samples) / 2, "no answer was taken twice"

    metrics = read_metrics(Path(trainer.config.run.dir) / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert all(
        row["sequences"] == PROMPTS * SAMPLES and row["logprob_diff_max"] < TOLERANCE
        for row in metrics
    )
    assert (
        metrics[-1]["engine_recoveries"]
        == metrics[-1]["engine_restarts"]
        == len(pool.health.recoveries)
        == KILLS
    )
    assert metrics[-1]["engine_fault_connection"] > 0 and metrics[-1]["engine_fault_garbage"] == 0
    for words in ("died with", "is back after"):
        assert sum(words in line for line in caplog.messages) == KILLS
    with capsys.disabled():
        print(
            "\nseconds of recovery:",
            " ".join(f"{seconds:.1f}" for seconds in pool.health.recoveries),
        )
    assert len(patient.processes) >= 6
    assert not psutil.wait_procs(patient.processes, timeout=10)[1], (
        "a closed pool leaves no process"
    )
