"""The metrics of a package of a few lines, counted by hand; those of ours that must be zero."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT
from tools import code_metrics
from tools.code_metrics import metrics_of

FILES = {
    "__init__.py": '"""A package."""\n',
    "a.py": '''"""Two lines
of docstring."""

# a comment
import megatron_stare.b.tool


class Twice:
    size = 1  # is code


def long():
'''
    + "    pass\n" * 61,
    "b/__init__.py": '"""A folder."""\n',
    "b/tool.py": "def inner():\n    from megatron_stare import c\n\n\nclass Twice:\n    pass\n",
    "c.py": "anew = 1\n",
    "d/tool.py": "from megatron_stare.c import anew\n",
    "e/tool.py": "",
    "config/run.py": "class RunConfig:\n    dir: str\n    seed: int = 0\n    _own: int = 0\n",
    "losses/settings.py": "class Loss(BaseModel):\n    eta: float = 0.1\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "megatron_stare" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def test_metrics_of_a_small_package(checkout: Path) -> None:
    found = {metric.title.strip(): metric for metric in metrics_of(checkout)}
    values = {title: metric.value for title, metric in found.items()}
    assert values == {
        "files": "9",
        "lines": f"{sum(len(text.splitlines()) for text in FILES.values())}",
        "code": "77",
        "docstring": "4",
        "comment": "1",
        "blank": "7",
        "median file, lines": "1",
        "largest file, lines": "73",
        "functions over 60 lines": "1",
        "folders over 16 modules": "0",
        "modules with one importer": "1",
        "of them under 80 lines": "1",
        "modules in an import cycle": "0",
        "class names that occur twice": "1",
        "file names in over 2 folders": "1",
        "retired words": "2",
        "config fields": "3",
    }
    assert list(found["functions over 60 lines"].names) == ["megatron_stare/a.py:long (62)"]
    assert list(found["of them under 80 lines"].names) == ["megatron_stare/b/tool.py (6)"]
    assert list(found["file names in over 2 folders"].names) == ["tool.py (3)"]


def test_a_cycle_through_a_function_is_found(checkout: Path) -> None:
    (checkout / "megatron_stare/c.py").write_text("def f():\n    import megatron_stare.a\n")
    found = {metric.title: metric for metric in metrics_of(checkout)}
    assert {"megatron_stare.a", "megatron_stare.b.tool", "megatron_stare.c"} == {
        *found["modules in an import cycle"].names
    }


def test_this_package_has_no_cycle_no_long_function_and_no_ambiguous_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """test_vocabulary.py looks for retired words, which takes seconds, in all files."""
    monkeypatch.setattr(code_metrics, "retired_words", lambda text: [])
    found = {metric.title: metric for metric in metrics_of(ROOT)}
    for title in (
        "modules in an import cycle",
        "functions over 60 lines",
        "class names that occur twice",
        "file names in over 2 folders",
    ):
        assert found[title].value == "0" and not list(found[title].names), title


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    with pytest.raises(SystemExit, match="no Python file"):
        metrics_of(tmp_path)
