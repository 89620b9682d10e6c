"""The wheel holds what its pages' commands need, and works without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

PROBE = """
import megatron_stare, sys
from pathlib import Path
place = Path(megatron_stare.__file__).parent
print(place)
print(*(name for name in ("py.typed", "__init__.pyi") if (place / name).is_file()))
"""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which the wheel of the tracked files is installed."""
    directory = tmp_path_factory.mktemp("wheel")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.split(
        b"\0"
    ):
        file = Path(name.decode())
        if name and (ROOT / file).is_file():
            (directory / "tree" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, directory / "tree" / file)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "wheel", *offline, "--no-build-isolation", "-w", directory, directory / "tree"],
        check=True,
    )
    (wheel,) = directory.glob("*.whl")
    subprocess.run(
        [*pip, "install", *offline, "--ignore-installed", "--prefix", directory / "prefix", wheel],
        check=True,
    )
    return directory / "prefix"


def python(prefix: Path, *words: str | Path) -> str:
    """The output of Python in another directory, with only the wheel's package on its path."""
    (packages,) = prefix.glob("lib*/python3.*/site-packages")
    done = subprocess.run(
        [sys.executable, *words],
        cwd=prefix,
        env=os.environ | {"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_is_typed_and_not_that_of_the_repository(prefix: Path) -> None:
    place, files = python(prefix, "-c", PROBE).splitlines()
    assert Path(place).is_relative_to(prefix) and files == "py.typed __init__.pyi"


def test_the_scripts_of_the_pages_are_there_and_run(prefix: Path) -> None:
    scripts = prefix / "share/megatron-stare"
    assert "usage" in python(prefix, scripts / "tools/prepare_math_data.py", "--help")
    assert "usage" in python(prefix, scripts / "examples/stare_in_one_file.py", "--help")
    for folder in ("slurm", "examples"):
        ours = {file.name for file in (ROOT / folder).glob("*.*")}
        assert ours == {file.name for file in (scripts / folder).glob("*.*")}


def test_the_command_line_works_without_the_repository(prefix: Path) -> None:
    assert "quickstart" in python(prefix, "-m", "megatron_stare", "recipes")
    (command,) = (prefix / "bin").iterdir()
    assert command.name == "megatron-stare"


def test_the_report_has_its_assets(prefix: Path) -> None:
    (packages,) = prefix.glob("lib*/python3.*/site-packages")
    assets = "megatron_stare/reporting/page/assets"
    ours = {file.name for file in (ROOT / assets).iterdir() if file.is_file()}
    assert ours == {file.name for file in (packages / assets).iterdir() if file.is_file()}
