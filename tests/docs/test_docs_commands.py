"""Every command of README.md and docs/*.md is executed: here, or where the table says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_stare.config import Config, override
from megatron_stare.recipes import RECIPES, find_recipe
from megatron_stare.reporting.logbook import read_metrics
from tests.docs.metric_keys import unexplained
from tests.docs.pages import PAGES, commands, commands_in
from tests.docs.table import (
    ASYNCHRONY,
    COMMANDS,
    GRADE_AS_SHOWN,
    RESAMPLING,
    TRAIN,
    TUTORIALS,
    WALKED,
)
from tests.docs.ways import Elsewhere, Run
from tests.docs.world import World, write_files
from tests.paths import ROOT

FOUND = commands()
RUN_HERE = {command: way for command, way in COMMANDS.items() if isinstance(way, Run)}
ELSEWHERE = {command: way for command, way in COMMANDS.items() if isinstance(way, Elsewhere)}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """One directory for all commands; each of them runs in it once."""
    return World(tmp_path_factory.mktemp("docs"))


def case(command: str, way: Run) -> object:
    marks = [getattr(pytest.mark, name) for name in way.markers]
    return pytest.param(command, marks=marks, id=command)


def test_every_command_has_an_entry_and_every_entry_a_command() -> None:
    assert not [
        f"{pages}: {command}" for command, pages in FOUND.items() if command not in COMMANDS
    ]
    assert not [command for command in COMMANDS if command not in FOUND]


@pytest.mark.parametrize("command", [case(*item) for item in RUN_HERE.items()])
def test_a_command_runs(world: World, command: str) -> None:
    world.expect(command)


@pytest.mark.slow
def test_the_tutorials_work_as_printed(tmp_path: Path) -> None:
    """Every command in its order, with the steps and batches of the page; cluster.md's four ranks
    share this machine. `make agents` makes an environment of its own, whose suite runs agent.md.
    """
    write_files(tmp_path)
    paths = {"PYTHONPATH": str(ROOT), "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"}
    elsewhere = re.compile(r"make agents|\.venv-agents")
    printed = [
        command
        for command, way in TUTORIALS.items()
        if way is not WALKED and not elsewhere.search(command)
    ]
    for command in printed:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=os.environ | paths | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(f"{command}: {done.returncode}", flush=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
    _check_the_tutorials_figures(tmp_path / "runs")


def _check_the_tutorials_figures(runs: Path) -> None:
    """The table of data.md, and the entropy that loss.md names."""
    page = (ROOT / "docs/tutorials/data.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `runs/(\w+)`.*\| ([\d.]+) \| ([\d.]+) \| ([\d.]*) ?\|$", page, re.M)
    assert len(shown) == 3
    for run, entropy, reward, weight in shown:
        last = json.loads((runs / run / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["step"] == 30
        assert last["entropy"] == pytest.approx(float(entropy), abs=0.02)
        assert last["reward"] == pytest.approx(float(reward), abs=0.02)
        assert not weight or last["weight_w"] == pytest.approx(float(weight), abs=0.2)
    named = re.search(
        r"entropy of ([\d.]+) nats", (ROOT / "docs/tutorials/loss.md").read_text(encoding="utf-8")
    )
    last = json.loads((runs / "bounded_stare/metrics.jsonl").read_text().splitlines()[-1])
    assert last["entropy"] == pytest.approx(float(named[1]), abs=0.02)


def test_a_grade_prints_what_the_page_shows(world: World) -> None:
    """Except the reason of an unverifiable answer: time or stack may be exhausted first."""
    shown = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    block = shown.split("$ cat graded.jsonl\n")[1].split("\n\n")[0]
    assert world.run(GRADE_AS_SHOWN).code == 0
    rows = (world.directory / "graded_as_shown.jsonl").read_text().splitlines()
    found, expected = ([json.loads(line) for line in part] for part in (rows, block.splitlines()))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        stated = ours.keys() - (
            {"reason", "extracted"} if ours["verdict"] == "unverifiable" else {}
        )
        assert {key: ours[key] for key in stated} == {key: theirs[key] for key in stated}


@pytest.mark.parametrize("test", sorted({way.test for way in ELSEWHERE.values()}))
def test_a_test_that_the_table_names_exists(test: str) -> None:
    """The file is read, not collected, because collecting imports the libraries of each test."""
    file, _, name = test.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"^def {name}\(" if name else r"^def test_", text, re.MULTILINE)


def test_ranks_that_a_page_starts_can_share_the_recipes_model() -> None:
    """The runs above take one process; here the page's number of ranks is checked to divide."""
    for command in FOUND:
        if " train " not in command or "--dry-run" in command:  # that one starts no ranks
            continue
        nodes = re.search(r"--nnodes (\d+)", command)
        ranks = re.search(r"--nproc-per-node (\d+)", command)
        words = shlex.split(command)
        named = [name for name in RECIPES if name in words]
        sizes = [word for word in words if re.match(r"policy\.\w+_parallel_size=", word)]
        for name in named:
            policy = override(find_recipe(name), sizes).policy
            needed = (
                policy.tensor_model_parallel_size
                * policy.pipeline_model_parallel_size
                * policy.context_parallel_size
            )
            world = int(nodes[1] if nodes else 1) * int(ranks[1] if ranks else 1)
            assert world % needed == 0, command


def test_settings_in_blocks_are_settings() -> None:
    """The configuration accepts every line that consists of section.field=value."""
    found = 0
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            if re.match(r"    [a-z_]+\.[a-z_]+=", line) and "\\" not in line:
                words = shlex.split(line, comments=True)
                if all("=" in word for word in words):
                    override(Config(), words)
                    found += 1
    assert found >= 5


def test_the_extra_that_a_page_installs_is_there() -> None:
    """No test installs anything; the name in brackets must be an extra of setup.py."""
    commands = [command for command in FOUND if command.startswith("pip install")]
    extras = {re.search(r"\[(\w+)\]", command)[1] for command in commands}
    assert extras == {"gguf", "quantize", "tracking"}
    for extra in extras:
        assert re.search(rf'^ +"{extra}": \[', (ROOT / "setup.py").read_text(), re.MULTILINE)


def test_the_build_knows_the_older_server() -> None:
    """Building downloads 3 GB; here only its arguments and its versions are checked."""
    build = ROOT / "tools/sglang_cpu/build"
    done = subprocess.run([build, "oldest"], capture_output=True, text=True)
    assert done.returncode == 2 and "[older]" in done.stderr
    assert subprocess.run(["bash", "-n", build]).returncode == 0
    assert "sglang" in (build.parent / "older.txt").read_text()


def test_pytest_finds_the_tests_that_a_page_names() -> None:
    """The suites run by themselves; here only their paths are checked."""
    places = [word for command in FOUND if " pytest " in command for word in command.split()]
    places = [word for word in places if word.startswith("tests/")]
    assert places and all((ROOT / place).exists() for place in places)


def test_every_key_that_a_run_writes_is_on_the_page_of_metrics(world: World) -> None:
    """On-policy, one step off and fully asynchronous runs, and a run with resampling."""
    world.expect(TRAIN)
    for command in (*ASYNCHRONY, *RESAMPLING):
        world.expect(command)
    keys = {
        key
        for file in world.directory.glob("runs/**/metrics.jsonl")
        for row in read_metrics(file)
        for key in row
    }
    assert {"entropy", "staleness_max", "accuracy", "entropy_change/predicted"} <= keys
    assert "resampling_temperature" in keys
    assert not unexplained(keys)


def test_pytest_finds_the_tests_with_a_server(pytestconfig: pytest.Config) -> None:
    """It needs the environment of `tools/sglang_cpu/build older`; here its words are checked."""
    (command,) = [command for command in FOUND if "pytest" in command and "sglang" in command]
    assert command.endswith(" .venv/bin/python -m pytest -m sglang")
    assert any(line.startswith("sglang:") for line in pytestconfig.getini("markers"))
    variable = command.split("=")[0]
    assert f'"{variable}"' in (ROOT / "tests/conftest.py").read_text()


def test_commands_of_a_page_are_found() -> None:
    page = """text `make no` and

    make one     # a comment
    $ unknown-command --this \\
          two 'a # b'
    {"json": 1}
    python
    scoring.reward=math

- a list
    make not-a-block

```
OMP_NUM_THREADS=1 .venv/bin/python benchmarks/x.py
tools/               a tree
```
"""
    assert list(commands_in(page)) == [
        "make one",
        "unknown-command --this two 'a # b'",
        "python",
        "OMP_NUM_THREADS=1 .venv/bin/python benchmarks/x.py",
    ]
