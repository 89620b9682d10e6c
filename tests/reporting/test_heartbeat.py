"""Movement of a rank."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest

from megatron_stare.reporting import heartbeat

PAUSE = 0.05


def test_a_waiting_loop_counts_as_stalled():
    motion, still, deadline = heartbeat.Motion(), 0.0, time.monotonic() + 20
    with heartbeat.waiting():
        while still < PAUSE:  # threads that other tests have left may still move
            assert time.monotonic() < deadline
            motion.look()
            time.sleep(PAUSE)
            still, _ = motion.look()
        heartbeat.moved()
        assert motion.look()[0] < still
    motion.look()
    time.sleep(PAUSE)
    assert motion.look()[0] < PAUSE, "another line of the program"


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="only Linux counts bytes")
def test_a_thread_in_a_loop_of_long_writes_moves_and_one_in_a_write_without_end_does_not():
    """Every look at the writer of a checkpoint on a slow disk finds it in the same call."""
    arrives, leaves = os.pipe()
    size = 1 << 20  # more than a pipe holds

    def write() -> None:
        with contextlib.suppress(BrokenPipeError):
            while True:
                os.write(leaves, bytes(size))

    threading.Thread(target=write, name="checkpoint", daemon=True).start()
    motion, deadline = heartbeat.Motion(), time.monotonic() + 20

    def wait_until(still: bool) -> None:
        while (motion.look()[0] >= 5 * PAUSE) != still:
            assert time.monotonic() < deadline
            time.sleep(PAUSE)

    with heartbeat.waiting():
        for _ in range(3):
            wait_until(still=True)  # no process reads
            left = size
            while left:
                left -= len(os.read(arrives, left))
            wait_until(still=False)  # its write has returned, and the next one has begun
    os.close(arrives)
