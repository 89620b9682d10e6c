"""Which way is quicker, by what was measured."""

from __future__ import annotations

import pytest

from megatron_stare.sync.delta.link import Rates

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


def test_what_goes_on_at_once_is_not_added_up() -> None:
    rates = Rates(compare=1.0, encode=5.0, ratio=0.5, wire=4.0, whole=1.0, changed=2.0)
    assert rates.full_seconds == 5.0 and rates.delta_seconds == 5.0 and not rates.delta_pays
