"""reporting/diagnostics.py: what is written is read again; what is torn is refused by its name."""

import dataclasses
import gzip
import json

import pytest

from megatron_stare.config import UserError
from megatron_stare.reporting.diagnostics import (
    Density,
    Diagnostics,
    PositionBins,
    Quadrant,
    SampledRollout,
    SurprisalBins,
    Tally,
    TokenRow,
    path_of,
    read,
    steps,
    write,
)

TALLY = Tally([2, 0], [0.25, 0.0], [0.5, 0.0])
ROLLOUT = SampledRollout(
    *(7, 1, 1.0, "correct", "completed", [3, 3], "1 + 1 =", "2", 0.5),
    text=["tw", "o\n"],
    loss_mask=[1, 0],
    surprisal=[0.1, None],
    entropy=[0.2, None],
    sensitivity=[-0.1, None],
    weight=[1.1, None],
    change=[-0.05, None],
    chosen=[1, 0],
)
WHOLE = Diagnostics(
    step=12,
    entropy=0.3,
    target_entropy=None,
    gate=None,
    weight_w=1.1,
    weight_m=0.9,
    loss_tokens=2,
    predicts="objective",
    change=0.25,
    plain_change=0.5,
    quadrants={"positive_rising": Quadrant(2, 0.25, 0.5)},
    surprisal_bins=SurprisalBins([0.0, 1.0, 2.0], TALLY, TALLY),
    position_bins=PositionBins([0, 8, 16], [2, 0], [0.25, 0.0], [0.3, None], [0.2, None]),
    density=Density([0.0, 1.0], [-1.0, 0.0, 1.0], [[0, 2]]),
    tokens={"chosen_positive": [TokenRow(5, "\u00e9", 2, 0.25, 0.1)], "chosen_negative": []},
    rollouts=[ROLLOUT],
)


def test_a_number_that_is_not_finite_is_null(tmp_path):
    odd = dataclasses.replace(ROLLOUT, change=[float("nan"), None])
    write(tmp_path, dataclasses.replace(WHOLE, change=float("inf"), rollouts=[odd]))
    found = read(tmp_path, 12)
    assert found.change is None and found.rollouts[0].change == [None, None]
    assert found.plain_change == 0.5


def test_written_diagnostics_are_read_back(tmp_path):
    write(tmp_path, WHOLE)
    write(tmp_path, dataclasses.replace(WHOLE, step=3))
    assert read(tmp_path, 12) == WHOLE
    assert steps(tmp_path) == [3, 12]
    assert steps(tmp_path / "none") == []


def test_a_field_of_a_later_version_is_left_out(tmp_path):
    path = write(tmp_path, WHOLE)
    tree = json.loads(gzip.decompress(path.read_bytes()))
    tree["rollouts"][0]["mood"] = tree["mood"] = "fine"
    path.write_bytes(gzip.compress(json.dumps(tree).encode()))
    assert read(tmp_path, 12) == WHOLE


@pytest.mark.parametrize("fault", ["cut", "flipped", "plain", "later", "unequal", "missing"])
def test_unreadable_files_are_named(tmp_path, fault):
    path = write(tmp_path, WHOLE)
    content = path.read_bytes()
    tree = json.loads(gzip.decompress(content))
    if fault == "later":
        tree["version"] = 2
    if fault == "unequal":
        tree["rollouts"][0]["chosen"] = [1]
    changed = {
        "cut": content[:-9],
        "flipped": content[:40] + bytes([content[40] ^ 255]) + content[41:],
        "plain": b"{}",
        "later": gzip.compress(json.dumps(tree).encode()),
        "unequal": gzip.compress(json.dumps(tree).encode()),
    }
    if fault == "missing":
        path.unlink()
    else:
        path.write_bytes(changed[fault])
    with pytest.raises(UserError, match=path_of(tmp_path, 12).name):
        read(tmp_path, 12)
