"""Which way is quicker, by what was measured; and a message that is never taken."""

from __future__ import annotations

import threading

import pytest

from megatron_stare.sync.delta import transport as links
from megatron_stare.sync.delta.transport import Rates, RelayLink

SLOW, FAST = 1 / 10e6, 1 / 10e9  # seconds per byte
MEASURED = {"compare": 1 / 2e9, "encode": 1 / 200e6, "whole": 1 / 1e9, "changed": 1 / 0.5e9}


@pytest.mark.parametrize(
    ("wire", "ratio", "pays"),
    [
        (SLOW, 0.02, True),  # 50 times fewer bytes on a slow link
        (SLOW, 1.0, False),  # nothing is saved
        (FAST, 0.02, False),  # encoding takes longer than sending everything
        (1 / 100e6, 0.3, True),  # encoding is twice as quick as sending
    ],
)
def test_deltas_pay_where_they_save_more_than_they_cost(
    wire: float, ratio: float, pays: bool
) -> None:
    assert Rates(wire=wire, ratio=ratio, **MEASURED).delta_pays is pays


def test_concurrent_transfers_are_not_summed() -> None:
    rates = Rates(compare=1.0, encode=5.0, ratio=0.5, wire=4.0, whole=1.0, changed=2.0)
    assert rates.full_seconds == 5.0 and rates.delta_seconds == 5.0 and not rates.delta_pays


def test_a_message_that_is_never_taken_makes_the_relay_outdated(monkeypatch) -> None:
    """Its thread is left behind, and the next message has another one."""
    release, answers = threading.Event(), [b"", b'{"held": "b", "path": "/b"}']

    def request(*_: object) -> tuple[int, bytes]:
        if len(answers) == 2:
            answers.pop(0)
            release.wait()
            return 500, b'{"error": "late"}'
        return 200, answers[0]

    monkeypatch.setattr(links, "request", request)
    monkeypatch.setattr(links, "_GRACE_SECONDS", 0.05)
    link = RelayLink("http://relay", "", 0.05)
    try:
        link.start("full")
        link.send(b"weights")
        link.wait()
        assert link.mode == "outdated"
        assert link.fault == "http://relay: the relay did not take a message of weights in 0.1 s"
        link._timeout = 600.0
        link.start("full")
        link.send(b"weights")
        link.wait()
        assert (link.mode, link.fault, link.held) == ("full", "", "b")
    finally:
        release.set()
