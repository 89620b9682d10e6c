"""Movement of a rank."""

from __future__ import annotations

import time

from megatron_stare.reporting import heartbeat

PAUSE = 0.05


def test_a_waiting_loop_counts_as_stalled():
    motion = heartbeat.Motion()
    with heartbeat.waiting():
        motion.look()
        time.sleep(PAUSE)
        still, _ = motion.look()
        assert still >= PAUSE
        heartbeat.moved()
        assert motion.look()[0] < still
    motion.look()
    time.sleep(PAUSE)
    assert motion.look()[0] < PAUSE, "another line of the program"
