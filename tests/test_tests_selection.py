"""Files that a run with `pytest -m` leaves out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import MARKS, pytest_collection_modifyitems, pytest_ignore_collect

SERVERS = "@pytest.mark.sglang\ndef test_server() -> None: ...\n"
BOTH = f"{SERVERS}\n@pytest.mark.slow\n{SERVERS}"
BY_A_TABLE = "marks = [getattr(pytest.mark, name) for name in names]\n"
UNMARKED = "def test_sum() -> None: ...\n"


@pytest.mark.parametrize(
    ("text", "selection", "left_out"),
    [
        (SERVERS, "sglang", False),
        (SERVERS, "agents", True),
        (SERVERS, "slow and sglang", True),
        (SERVERS, "not sglang", False),  # a test without the mark may be in the file
        (BOTH, "slow and sglang", False),
        (BOTH, "sglang and not slow", False),
        (BOTH, "(gpu or nullcuda) and not slow", True),
        (BY_A_TABLE, "agents and slow", False),
        (UNMARKED, "sglang", True),
        (UNMARKED, "not slow and not gpu", False),
        (UNMARKED, "", False),
        (UNMARKED, "sglang and (", False),  # pytest reports the fault
    ],
)
def test_a_file_is_left_out_if_no_test_can_be_selected(
    tmp_path: Path, text: str, selection: str, left_out: bool
) -> None:
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=selection))
    file = tmp_path / "test_it.py"
    file.write_text(text)
    assert bool(pytest_ignore_collect(file, config)) is left_out
    assert pytest_ignore_collect(tmp_path, config) is None


def test_a_mark_that_its_file_does_not_name_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(SERVERS)
    own = [pytest.mark.agents.mark]
    item: Any = SimpleNamespace(path=file, name="test_server", iter_markers=lambda: own)
    with pytest.raises(pytest.UsageError, match=r"not name mark\.agents of test_server"):
        pytest_collection_modifyitems([item])


def test_the_marks_are_those_of_the_project(pytestconfig: pytest.Config) -> None:
    own = [line.partition(":")[0] for line in pytestconfig.getini("markers")]
    assert set(MARKS) <= set(own)
