"""Messages between two processes: neither waits for the other, and none keeps a file open."""

from __future__ import annotations

import multiprocessing
import os
import threading

from megatron_stare.collect.journal import frame, whole_frames
from megatron_stare.collect.worker_main import Channel, memory_of
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
