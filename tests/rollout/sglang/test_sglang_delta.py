"""A run whose weights reach a real server as deltas, through faults of the relay between them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_stare.config import dump
from megatron_stare.reporting.logbook import read_metrics
from megatron_stare.rollout.sglang.process import ServerProcess, free_port
from tests.paths import ROOT
from tests.rollout.sglang.test_sglang_run import run
from tests.rollout.sglang.world import CHECKSUMS, VERIFY
from tests.small_run import small_config
from tests.sync.delta.world import weights_in

pytestmark = pytest.mark.sglang
STEPS, KILLED, CORRUPTED = 9, 2, (4, 5, 6)


class KilledRelay:
    """A relay in a process of its own, which may be killed and started again."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory, free_port()
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "megatron_stare", "relay", str(self.directory)]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )

    def ready(self) -> None:
        assert self.process.stdout is not None and b"relay in" in self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def corrupt(self) -> None:
        """Change the last bit of the last file, whether it is whole or being written."""
        for file in sorted(self.directory.glob("*/model-*.safetensors"))[-1:]:
            with contextlib.suppress(FileNotFoundError), file.open("r+b") as content:
                content.seek(-1, os.SEEK_END)
                last = content.read(1)[0]
                content.seek(-1, os.SEEK_END)
                content.write(bytes([last ^ 1]))


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[KilledRelay]:
    found = KilledRelay(tmp_path / "relay")
    try:
        found.ready()
        yield found
    finally:
        found.kill()


@pytest.mark.skipif(not CHECKSUMS, reason="this SGLang computes no checksums")
def test_a_run_with_deltas_survives_a_kill_and_a_damaged_file(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, relay: KilledRelay
) -> None:
    """Every sync compares the server's checksums; every second one is full, the others deltas."""
    settings = (
        *("rollout.engine=sglang", f"sglang.urls=[{server.url}]", "sglang.sync_method=delta"),
        *(f"sglang.relays=[http://127.0.0.1:{relay.port}]", "sglang.full_sync_interval=2"),
        *(f"policy.hf_checkpoint={checkpoint}", "policy.dtype=bf16", "sglang.sync_bucket_mib=1"),
        *(f"train.num_rollout={STEPS}", "sglang.sync_timeout=120", VERIFY),
    )
    dump(small_config(tmp_path, *settings), tmp_path / "config.yaml")
    log, done = tmp_path / "run" / "metrics.jsonl", threading.Event()
    acted: list[int] = []

    def trouble() -> None:
        """After its step each: once the run has seen a delta."""
        while not done.wait(0.02):
            step = len(read_metrics(log)) if log.exists() else 0
            if step == KILLED and step not in acted:
                relay.kill()
                time.sleep(0.5)  # the run finds no relay
                relay.start()
                acted.append(step)
            elif step in CORRUPTED and step not in acted:
                relay.corrupt()
                acted.append(step)

    thread = threading.Thread(target=trouble)
    thread.start()
    finished = run([sys.executable], "train", str(tmp_path / "config.yaml"))
    done.set()
    thread.join()
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = read_metrics(log)
    assert len(rows) == STEPS and set(acted) == {KILLED, *CORRUPTED}
    assert sum(row["sync_delta"] for row in rows) >= 2
    assert rows[-1]["sync_delta_fallbacks"] >= 2, "the kill, and at least one damaged file"
    assert all(0 < row["changed_fraction"] <= 1 for row in rows)
    assert {str(tensor.dtype) for tensor in weights_in(relay.directory).values()} == {
        "torch.bfloat16"
    }
    assert "no relay answers" not in finished.stderr and "Connect" in finished.stderr
