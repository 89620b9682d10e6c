"""The command `relay`: killed in the middle of an update, and ended by a signal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch

from megatron_stare.commands.servers import relay
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.sync.delta.encoding import KeptWeights, Table, packed
from megatron_stare.sync.delta.relay import WeightRelay
from megatron_stare.sync.delta.transport import RelayLink
from megatron_stare.sync.disk import OWN_MARKER
from tests.paths import ROOT

FULL, DELTA, KEY = "run-0", "run-1", "a-key"


def part(kept: KeptWeights, value: float, *, last: bool) -> bytes:
    """All of one tensor, or, unless it is the last part, how it becomes this value."""
    bucket = [("a", torch.full((5000,), value))]
    delta = kept.replace(bucket, encoding=not last)
    chosen = kept.whole(["a"]) if last else delta
    table = Table(FULL if last else DELTA, "" if last else FULL, 0, last, chosen.entries)
    return packed(table, chosen.blocks)


def test_a_relay_killed_in_mid_update_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    place = tmp_path / "relay"
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_stare", "relay", str(place), "--port", "0"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "SGLANG_API_KEY": KEY, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = re.search(r"'sglang.relays=\[(http://127.0.0.1:\d+)\]'", line)[1]
        assert KEY not in line and "SGLANG_API_KEY" in line
        link, kept = RelayLink(url, KEY, 30.0), KeptWeights()
        for value, last, held in ((1.0, True, FULL), (2.0, False, "")):
            link.start("full")
            link.send(part(kept, value, last=last))
            link.wait()
            assert (link.fault, link.held) == ("", held)
        assert (place / "incomplete" / "model-00000.safetensors").is_file()
        assert not (place / "weights").exists()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    again = WeightRelay(place)
    assert again.held == "" and [file.name for file in place.iterdir()] == [OWN_MARKER]
    again.close()


def test_a_signal_ends_it_and_takes_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    interrupt, place = Interrupt(), tmp_path / "relay"

    def end() -> None:
        while not (port := re.search(r":(\d+)\]", capsys.readouterr().out)):
            time.sleep(0.01)
        content = part(KeptWeights(), 1.0, last=True)
        httpx.post(f"http://127.0.0.1:{port[1]}/update", content=content).raise_for_status()
        found.extend(file.name for file in place.iterdir())
        interrupt.noted = 15

    found: list[str] = []
    thread = threading.Thread(target=end)
    thread.start()
    relay(place, "0.0.0.0", 0, interrupt)
    thread.join()
    assert sorted(found) == [OWN_MARKER, "weights"]
    assert [file.name for file in place.iterdir()] == [OWN_MARKER]
