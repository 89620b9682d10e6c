"""Messages between two processes: neither waits for the other, and none keeps a file open."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import threading
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import numpy
import pytest

from megatron_stare.collect.journal import frame, whole_frames
from megatron_stare.collect.worker_main import GROUP, Channel, WorkerProcess, memory_of
from megatron_stare.records import Group, Prompt
from tests.collect.test_journal import rollout


def test_two_ends_that_both_send_first_do_not_deadlock():
    """Each message is larger than what a pipe holds."""
    ours, theirs = map(Channel, multiprocessing.Pipe())
    content = bytes(1 << 22)
    sending = [
        threading.Thread(target=end.send, args=(content,), daemon=True) for end in (ours, theirs)
    ]
    for thread in sending:
        thread.start()
    for thread in sending:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert ours.receive() == theirs.receive() == (content, b"")
    ours.close()
    theirs.close()


@pytest.mark.parametrize("fault", ["a value that JSON lacks", "no descriptor is left"])
def test_a_group_that_cannot_be_sent_is_an_error_of_its_prompt(
    fault: str, monkeypatch: pytest.MonkeyPatch
):
    """A future only logs what its callbacks raise: the trainer would wait for ever."""
    sent, worker = list[Any](), object.__new__(WorkerProcess)
    worker.channel, worker.worker = Mock(send=lambda *given: sent.append(given)), Mock()
    worker.worker.counts = lambda: {"journal_rollouts": 1}
    found = rollout(1, 1)
    if fault == "a value that JSON lacks":
        found = dataclasses.replace(found, episode={"score": numpy.float32(1)})
    else:
        monkeypatch.setattr(os, "memfd_create", Mock(side_effect=OSError(24, "Too many open")))
    group: Future[Any] = Future()
    group.add_done_callback(functools.partial(worker._send_group, 3))
    group.set_result(Group(Prompt(3, (1,), ""), (found,)))
    (((kind, index, counts, error), payload),) = sent
    assert (kind, index, counts, payload) == (GROUP, 3, {"journal_rollouts": 1}, None)
    assert error[0] == ("TypeError" if fault.startswith("a value") else "OSError")


def test_kept_groups_hold_no_open_file():
    ours, theirs = map(Channel, multiprocessing.Pipe())
    before, kept = len(os.listdir("/proc/self/fd")), []
    for number in range(100):
        theirs.send(("group", number), memory_of([frame(rollout(number, number))] * 2))
        kept.append(tuple(found.record for found in whole_frames(ours.receive()[1])))
    assert all(found == (rollout(number, number),) * 2 for number, found in enumerate(kept))
    assert len(os.listdir("/proc/self/fd")) - before < 10
    ours.close()
    theirs.close()
