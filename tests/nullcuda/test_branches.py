"""Every line that CUDA decides has been entered by the tests that ran on the device before this one
(tests/conftest.py puts it last), in their own process or in one that they started. Where there is
no TransformerEngine, its own lines are left out.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.nullcuda.branches import places
from tools.nullcuda.lines import FOLDER, seen

pytestmark = pytest.mark.nullcuda
# Places that only TransformerEngine enters.
OF_ENGINE = {
    "megatron_stare/policy/build.py: if not _has_transformer_engine()",
    "megatron_stare/policy/build.py: return block",
    'megatron_stare/policy/layout.py: held *= FP8_ROWS.get(policy.tuning.fp8_recipe or "", 16)',
}


def test_every_branch_on_cuda_was_entered() -> None:
    """This holds after the whole suite (`make nullcuda`); a part of it enters only some places."""
    wanted, entered = places(), seen(Path(os.environ[FOLDER]))
    assert wanted and entered
    missed = [str(place) for place in wanted if (str(place.file), place.line) not in entered]
    print(f"{len(wanted)} places, {len(wanted) - len(missed)} entered:", *wanted, sep="\n")
    unnumbered = {":".join(place.split(":")[::2]).strip().rstrip(":") for place in missed}
    absent = importlib.util.find_spec("transformer_engine") is None
    assert unnumbered == (OF_ENGINE if absent else set()), "\n".join(["never entered:", *missed])
