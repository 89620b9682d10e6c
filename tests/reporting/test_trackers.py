"""Every tracker that run.logbooks can name, over a run that is killed and resumed."""

from __future__ import annotations

import importlib
import json
import socket
import struct
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_stare.config import Config, RunConfig, UserError, override
from megatron_stare.reporting.logbook import Logbook, open_logbook, read_metrics
from megatron_stare.reporting.trackers import SentSteps, trackers_of

ENTROPY = {1: 0.5, 2: 0.25, 3: 0.125, 4: 0.0625}


def twice(run: RunConfig) -> None:
    """Steps 1 to 3, then again from step 2: a kill after step 3, and the checkpoint of step 1."""
    for first, last in ((1, 3), (2, 4)):
        with open_logbook(run, first - 1, enabled=True) as book:
            assert isinstance(book, Logbook)
            for step in range(first, last + 1):
                book.write(step, {"entropy": ENTROPY[step], "gate": True, "note": "a"})
    rows = read_metrics(Path(run.dir) / "metrics.jsonl")
    assert {row["step"]: row["entropy"] for row in rows} == ENTROPY and len(rows) == len(ENTROPY)


def test_a_step_is_sent_once_even_after_a_kill(tmp_path, capsys):
    first = SentSteps(tmp_path, "one", None)
    assert [first.start_step(step) for step in (1, 2, 2, 1)] == [True, True, False, False]
    SentSteps(tmp_path, "one", 2)
    assert capsys.readouterr().err == ""
    again, other = SentSteps(tmp_path, "one", 1), SentSteps(tmp_path, "other", 1)
    assert [again.start_step(step) for step in (2, 3)] == [False, True] and other.start_step(1)
    assert "one keeps the lines that it has of steps 2 to 2" in capsys.readouterr().err


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    twice(RunConfig(dir=str(tmp_path), logbooks=["tensorboard"]))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["entropy", "gate"]
    assert [(event.step, event.value) for event in events.Scalars("entropy")] == [*ENTROPY.items()]


def test_tensorboard_of_a_run_that_was_killed_before_its_first_checkpoint(tmp_path):
    """It starts over: metrics.jsonl is empty again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunConfig(dir=str(tmp_path), logbooks=["tensorboard"])
    for last in (3, 2):
        with open_logbook(run, 0, enabled=True) as book:
            assert isinstance(book, Logbook)
            for step in range(1, last + 1):
                book.write(step, {"entropy": ENTROPY[step]})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("entropy")] == [1, 2]


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, which wandb writes after 7 bytes of its own.

    Blocks of 32 KiB; before each piece of a record checksum, length and kind (1 whole, 2 first, 3
    middle, 4 last).
    """
    whole, place, block = b"", 0, 32768
    while place + 7 <= len(content):
        left = block - (place + 7) % block  # of this block, which counts wandb's own bytes
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="optional: megatron-stare[tracking]")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    twice(RunConfig(dir=str(tmp_path), logbooks=["wandb"]))
    seen, ids = [], set()
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for content in log_records(path.read_bytes()[7:]):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                items = {(i.key or i.nested_key[0]): i.value_json for i in record.history.item}
                seen.append((record.history.step.num, float(items["entropy"])))
    assert sorted(seen) == [*ENTROPY.items()], "every step once"
    assert ids == {json.loads((tmp_path / "trackers.json").read_text())["wandb"]["id"]}


def test_mlflow_offline(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="optional: megatron-stare[tracking]")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    twice(RunConfig(dir=str(tmp_path), logbooks=["mlflow"]))
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("megatron_stare")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "entropy")
    assert [(metric.step, metric.value) for metric in history] == [*ENTROPY.items()]
    assert run.info.status == "FINISHED" and run.info.run_name == tmp_path.name


def test_prometheus_answers_with_the_newest_line_on_loopback(tmp_path):
    pytest.importorskip("prometheus_client", reason="optional: megatron-stare[tracking]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = RunConfig(dir=str(tmp_path / "one"), prometheus_port=port)

    def asked() -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return [line for line in answer.read().decode().splitlines() if line[0] != "#"]

    with open_logbook(run, 0, enabled=True) as book:
        assert asked() == [] and book is not None
        book.write(1, {"entropy": 0.5, "eval/aime24/avg_at_k": 1.0, "note": "a"})
        book.write(2, {"entropy": 0.25})
        assert asked() == [
            'megatron_stare_entropy{metric="entropy",run="one"} 0.25',
            'megatron_stare_step{metric="step",run="one"} 2.0',
        ]
        book.write(3, {"reward/a_b": 0.5, "reward/a/b": 0.75})
        assert asked()[:2] == [
            'megatron_stare_reward_a_b{metric="reward/a_b",run="one"} 0.5',
            'megatron_stare_reward_a_b{metric="reward/a/b",run="one"} 0.75',
        ]
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
            place = f"http://127.0.0.1:{port}/metrics"
            other = urllib.request.Request(place, headers={"Host": host})
            with pytest.raises(urllib.error.HTTPError, match="421"):
                urllib.request.urlopen(other, timeout=10)
        with pytest.raises(UserError, match=f"run.prometheus_port={port}"):
            Logbook(tmp_path / "two", trackers=trackers_of(run))


@pytest.mark.parametrize(
    ("name", "package"),
    [("wandb", "wandb"), ("mlflow", "mlflow"), ("prometheus", "prometheus_client")],
)
def test_a_missing_package_is_named_with_the_remedy(tmp_path, monkeypatch, name, package):
    def nothing(wanted: str, *rest: object) -> object:
        if wanted.split(".")[0] == package:
            raise ImportError(wanted)
        return importlib.__import__(wanted, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("builtins.__import__", nothing)
    port = 9 if name == "prometheus" else 0
    logbooks = [] if port else [name]
    run = RunConfig(dir=str(tmp_path), logbooks=logbooks, prometheus_port=port)
    with pytest.raises(UserError, match=r"megatron-stare\[tracking\]"):
        Logbook(tmp_path, trackers=trackers_of(run))


def test_an_unknown_logbook_is_refused():
    with pytest.raises(UserError, match="'csv', which is none of tensorboard, wandb, mlflow"):
        override(Config(), ["run.logbooks=[csv]"])
