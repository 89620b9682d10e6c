"""The newcomer's path: each page leads to the next, and its commands work as printed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tools import newcomer

SHORT = ("train.num_rollout=2", "rollout.rollout_batch_size=4", "evaluation.eval_interval=0")


def test_every_page_of_the_route_is_linked_by_one_before_it(tmp_path: Path) -> None:
    assert [name for name, _ in newcomer.pages(ROOT / "docs")] == list(newcomer.ROUTE)
    install = dict(newcomer.pages(ROOT / "docs"))["install.md"]
    assert "make demo" in install and "completion bash" in install
    assert not re.search("^    (?:make gpu|docker build|pip install)", install, re.MULTILINE)
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    page = docs / "tutorials/data.md"
    page.write_text(page.read_text().replace("](reward.md)", "]()"))
    with pytest.raises(newcomer.Stuck, match=r"no page before tutorials/reward\.md"):
        list(newcomer.pages(docs))


@pytest.fixture
def shell(tmp_path: Path):
    its = newcomer.Shell(tmp_path)
    yield its
    its.close()


def test_one_shell_runs_what_a_page_prints(shell: newcomer.Shell, tmp_path: Path) -> None:
    page = """
    mkdir there && cd there

```python title="said.py"
import os
print("so", os.environ["SAID"])
```

    export SAID=said
    python3 said.py \\
        more

prints

    so said
"""
    steps = list(newcomer._read(shell, "a.md", page, []))
    assert [step.command for step in steps][1:] == ["export SAID=said", "python3 said.py more"]
    assert steps[-1].sees == "so said" and (tmp_path / "there/said.py").exists()


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("    cat nowhere\n", r"a\.md: cat nowhere: exit code 1\n.*No such file"),
        ("    bash -c 'echo this'\n\nprints\n\n    that\n", "'that' is shown, and not in\nthis"),
        ("    export A=1; exit 3\n", "the shell ended"),
    ],
)
def test_the_reader_stops_at_a_command_that_fails(
    shell: newcomer.Shell, page: str, why: str
) -> None:
    with pytest.raises(newcomer.Stuck, match=why):
        list(newcomer._read(shell, "a.md", page, []))


def test_the_last_line_has_every_run_also_those_of_a_comparison(tmp_path: Path) -> None:
    for run in ("clone/runs/agent/seed0/stare", "tutorials/runs/digits"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "metrics.jsonl").write_text('{"reward": 0.0}\n{"reward": 0.5}\n')
    said = newcomer._learnt(tmp_path).sees.split("; ")
    ends = "reward 0.00 to 0.50 in 2 steps"
    assert said == [f"agent/seed0/stare: {ends}", f"digits: {ends}"]


@pytest.mark.slow
def test_the_path_leads_to_an_own_reward_and_agent() -> None:
    """The walk uses the last commit, this environment, and less training than the pages say."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout to clone")
    command = [sys.executable, ROOT / "tools/newcomer.py", "--environment", sys.prefix]
    command += ["--language-model"]
    for each in (*SHORT, "cold_start.steps=2", "rollout.dynamic_sampling=false"):
        command += ["--more", each]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ran = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    for command in ("`make demo", "`open report", "`make agents", "`make demo-llm"):
        assert any(command in line for line in ran), command
    for run in ("agent", "digits"):
        assert re.search(rf" {run}[/\w]*: reward \S+ to \S+ in 2 steps", ran[-1]), run
    for goal in newcomer.GOALS.values():
        assert f"{goal}: " in done.stdout
