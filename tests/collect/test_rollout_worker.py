"""RolloutWorker: which requests it sends when, and what becomes of their rollouts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megatron_stare.collect import rollout_worker
from megatron_stare.collect.journal import Journal
from megatron_stare.collect.judging import build_judge
from megatron_stare.collect.rollout_worker import RolloutWorker
from megatron_stare.config import Config, EngineError, UserError, override
from megatron_stare.records import Prompt, Rollout
from megatron_stare.rollout.engine import Request

CASES = "tests.scoring.verifier_cases"
PAIR = ("rollout.n_samples_per_prompt=2", f"scoring.reward={CASES}.obedient")


class Patient:
    """An engine whose rollouts the test itself finishes; `asked` has what it was given last."""

    version = 0

    def __init__(self) -> None:
        self.asked: dict[tuple[int, int], tuple[Request, Future[Rollout]]] = {}
        self.submissions = 0
        self.refusal: Exception | None = None

    def submit(self, requests: Sequence[Request], params: object) -> list[Future[Rollout]]:
        if self.refusal is not None:
            raise self.refusal
        self.submissions += 1
        made = [(request, Future[Rollout]()) for request in requests]
        self.asked |= {pair[0].seed[2:]: pair for pair in made}  # type: ignore[misc]
        return [future for _, future in made]

    def abort(self, requests: Sequence[Request]) -> None:
        for key in {request.seed[2:] for request in requests} & self.asked.keys():
            self.finish(key, said("part", "aborted"))  # type: ignore[arg-type]

    def finish(self, key: tuple[int, int], rollout: Rollout) -> None:
        self.asked.pop(key)[1].set_result(rollout)


def said(text: str, status: str = "completed", version: int = 0) -> Rollout:
    return Rollout((1,), (-0.1,), (1,), status=status, weight_version=version, text=text)  # type: ignore[arg-type]


def prompts(*indices: int) -> list[Prompt]:
    return [Prompt(index, (1,) * (1 + index % 3), "4") for index in indices]


@contextlib.contextmanager
def worker_of(engine: Patient, *options: str, journal: Journal | None = None) -> Any:
    config = override(Config(), [*PAIR, *options])
    with contextlib.closing(build_judge(config)) as judge:
        given: Any = engine
        worker = RolloutWorker(config, given, judge, journal)
        with contextlib.closing(worker):
            worker.set_step(0)
            yield worker


def test_a_finished_group_is_judged_before_others_finish():
    engine = Patient()
    settings = ("scoring.verifier_processes=2", "scoring.verifier_timeout=100")
    with worker_of(engine, *settings) as worker:
        hung, sampled, finished, failed = worker.start(prompts(0, 1, 2, 3))
        assert engine.submissions == 1, "decoded together"
        for key, text in {(0, 0): "hang", (0, 1): "4", (1, 0): "4", (2, 0): "5"}.items():
            engine.finish(key, said(text))
        engine.finish((2, 1), said("4"))
        engine.asked[3, 0][1].set_exception(EngineError("lost"))
        assert [r.reward for r in finished.result(timeout=60).rollouts] == [0.0, 1.0]
        with pytest.raises(EngineError, match="lost"):
            failed.result(timeout=60)
        assert not hung.done() and not sampled.done()


def test_ended_rollouts_continue_and_stopped_ones_are_kept():
    engine = Patient()
    with worker_of(engine) as worker:
        (group,) = worker.start(prompts(7))
        engine.finish((7, 0), said("4"))
        worker.pause().result(timeout=60)
        worker.set_step(0)
        request = engine.asked[7, 1][0]
        assert request.part is not None and request.part.status == "aborted"
        worker.stop()
        with pytest.raises(EngineError, match="stopped"):
            group.result(timeout=60)
        known = worker.partial_rollouts()
    engine = Patient()
    with worker_of(engine) as worker:
        (group,) = worker.start(prompts(7), known)
        assert list(engine.asked) == [(7, 1)]
        engine.finish((7, 1), said("4"))
        assert [r.reward for r in group.result(timeout=60).rollouts] == [1.0, 1.0]


@pytest.mark.parametrize("samples", [2, 5])
@pytest.mark.parametrize("numbers", [(0, 1, 2, 3), (0, 1, 3), (3,), (1, 2)])
def test_a_resumed_prompt_gets_as_many_rollouts_as_the_run_now_samples(
    samples: int, numbers: tuple[int, ...]
):
    engine = Patient()
    with worker_of(engine, "rollout.n_samples_per_prompt=4") as worker:
        worker.start(prompts(7))
        for number in numbers[:3]:
            engine.finish((7, number), said("4"))
        worker.pause().result(timeout=60)
        worker.stop()
        known = worker.partial_rollouts()
    kept = set(numbers[:3]) & set(range(samples))
    engine = Patient()
    with worker_of(engine, f"rollout.n_samples_per_prompt={samples}") as worker:
        (group,) = worker.start(prompts(7), known)
        assert {number for _, number in engine.asked} == set(range(samples)) - kept
        assert worker.counts().get("changed_rollouts_dropped", 0) == max(0, 4 - samples)
        for key in list(engine.asked):
            engine.finish(key, said("4"))
        assert len(group.result(timeout=60).rollouts) == samples
        dropped = len(set(numbers[:3]) - kept) + (4 - len(numbers[:3])) - (samples - len(kept))
        assert samples > 4 or worker.counts()["changed_rollouts_dropped"] == dropped


@pytest.mark.parametrize(
    "change",
    [
        "rollout.rollout_temperature=0.5",
        "rollout.rollout_max_response_len=64",
        "rollout.skip_special_tokens=false",
        "tools.max_turns=3",
        "tools.format=qwen3_coder",
    ],
)
def test_rollouts_of_other_settings_are_sampled_again(change: str, tmp_path: Path):
    """Finished ones of a journal and of a checkpoint, and parts of a checkpoint."""
    tools = "tools.environment=calculator"
    engine = Patient()
    with worker_of(engine, tools, journal=Journal(tmp_path)) as worker:
        worker.start(prompts(7, 8))
        engine.finish((7, 0), said("4"))
        engine.finish((8, 0), said("4"))
        worker.pause().result(timeout=60)
        worker.stop()
        known = {7: worker.partial_rollouts()[7]}
    for options, dropped in ([tools], 0), ([tools, change], 3):
        engine = Patient()
        with worker_of(engine, *options, journal=Journal(tmp_path)) as worker:
            worker.start(prompts(7, 8), known)
            asked = {(7, 1), (8, 1)} if not dropped else {(7, 0), (7, 1), (8, 0), (8, 1)}
            assert set(engine.asked) == asked
            assert (engine.asked[7, 1][0].part is None) == bool(dropped)
            assert worker.counts().get("changed_rollouts_dropped", 0) == dropped + bool(dropped)


def test_the_greedy_baseline_is_no_sample_of_a_run_with_more_samples():
    engine = Patient()
    with worker_of(engine, "scoring.advantage=remax") as worker:
        worker.start(prompts(7))
        engine.finish((7, 2), said("4"))
        worker.stop()
        known = worker.partial_rollouts()
    engine = Patient()
    with worker_of(engine, "rollout.n_samples_per_prompt=3") as worker:
        worker.start(prompts(7), known)
        assert set(engine.asked) == {(7, 0), (7, 1), (7, 2)}


def test_an_error_in_a_thread_fails_every_group_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    engine = Patient()
    with worker_of(engine) as worker:
        first, second = worker.start(prompts(0, 1))
        monkeypatch.setattr(worker, "_judge_when_complete", lambda entry: {}[entry.prompt.index])
        engine.finish((0, 0), said("4"))
        for start in (lambda: (first, second), lambda: worker.start(prompts(2))):
            for group in start():
                with pytest.raises(EngineError, match=r"rollout worker failed .KeyError"):
                    group.result(timeout=60)
        assert "Traceback" in caplog.text and set(worker.partial_rollouts()) == {0, 1, 2}


def test_a_thread_that_cannot_be_started_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch):
    refused = RuntimeError("can't start new thread")
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=refused))
    with pytest.raises(RuntimeError, match="can't start new thread"), worker_of(Patient()):
        pass


def test_a_thread_that_waits_for_ever_keeps_neither_close_nor_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(rollout_worker, "CLOSE_SECONDS", 0.1)
    ended = threading.Event()
    with worker_of(Patient()) as worker:
        worker.in_turn(ended.wait)
    assert "does not end" in caplog.text
    (thread,) = [one for one in threading.enumerate() if one.name == "rollout-worker"]
    assert thread.daemon, "the interpreter waits for others at its end"
    ended.set()
    thread.join(60)
    assert not thread.is_alive()


def test_what_arrives_after_the_end_is_dropped(caplog: pytest.LogCaptureFixture):
    engine = Patient()
    with worker_of(engine) as worker:
        (group,) = worker.start(prompts(0))
    engine.finish((0, 0), said("4"))
    assert not group.done() and not caplog.records


def test_an_error_in_a_reward_fails_only_its_group(monkeypatch: pytest.MonkeyPatch):
    engine = Patient()
    with worker_of(engine) as worker:
        failed, judged = worker.start(prompts(0, 1))
        with monkeypatch.context() as patched:
            patched.setattr(worker.judge, "start", lambda given: {}[given[0][0].index])
            for number in (0, 1):
                engine.finish((0, number), said("4"))
            with pytest.raises(KeyError):
                failed.result(timeout=60)
        for number in (0, 1):
            engine.finish((1, number), said("4"))
        assert [r.reward for r in judged.result(timeout=60).rollouts] == [1.0, 1.0]


def test_a_refused_request_fails_only_its_group():
    engine = Patient()
    engine.refusal = UserError("too long")
    with worker_of(engine) as worker:
        (group,) = worker.start(prompts(0))
        with pytest.raises(UserError, match="too long"):
            group.result(timeout=60)
        assert not worker.partial_rollouts()


def test_folders_of_a_journal_are_read_by_all_and_filtered(tmp_path: Path):
    attempts = {"a": 0}
    for number in (0, 1):
        journal = Journal(tmp_path, f"rank_{number}", attempts=attempts)
        journal.open(0)
        for key in ((0, 0), (1, 0), (2, 0), (3, 0)):
            if key[0] // 2 == number:  # as another number of ranks had them
                journal.write(key, said(f"{key}"))
        journal.close()
    again = Journal(tmp_path, "rank_1", lambda key: key[0] % 2 == 1, attempts)
    again.open(0)
    assert {key: found.text for key, found in again.found.items()} == {
        (1, 0): "(1, 0)",
        (3, 0): "(3, 0)",
    }
    again.close()
