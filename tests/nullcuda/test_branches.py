"""Every line that CUDA decides has been entered by the tests that ran on the device before this one
(tests/conftest.py puts it last), in their own process or in one that they started.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.nullcuda.branches import places
from tools.nullcuda.lines import FOLDER, seen

pytestmark = pytest.mark.nullcuda
# What no test here can enter, by file and text, and why. It stays exact: a place that was entered
# after all, or is not there any more, has no business in it.
OUT_OF_REACH: dict[str, str] = {}


def test_every_place_that_cuda_decides_was_entered() -> None:
    """Of the whole suite (`make nullcuda`): a part of it enters a part."""
    wanted, entered = places(), seen(Path(os.environ[FOLDER]))
    assert wanted and entered
    missed = [str(place) for place in wanted if (str(place.file), place.line) not in entered]
    print(f"{len(wanted)} places, {len(wanted) - len(missed)} entered:", *wanted, sep="\n")
    unnumbered = {":".join(place.split(":")[::2]).strip() for place in missed}
    not_entered = unnumbered - OUT_OF_REACH.keys()
    assert not not_entered, "\n".join(["never entered:", *sorted(not_entered)])
    assert OUT_OF_REACH.keys() <= unnumbered, "entered, or gone, and said to be out of reach"
