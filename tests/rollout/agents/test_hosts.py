"""Host processes: commands as agents, what an agent prints, and what is left at the end."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import PreTrainedTokenizerBase

from megatron_stare.compare.worlds.calculator import tool_tokenizer
from megatron_stare.config import AgentsConfig, UserError
from megatron_stare.rollout.agents import hosts as module
from megatron_stare.rollout.agents.agent_engine import AgentEngine
from megatron_stare.rollout.agents.hosts import HostLost, Hosts, check_agent
from tests.killed_at_start import MODULE, killed, write_module
from tests.rollout.agents.scripted import PARAMS, PROGRAMS, Scripted, request

PROGRAM = """
import json, os, sys, urllib.request
print("a line that is not a message")
base, key, other = sys.argv[1:]
assert other == '{"a": {}} {0}', "braces of other text stay"
assert (base, key) == (os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
row = json.load(open(os.environ["MEGATRON_STARE_ROW"]))
body = json.dumps({"messages": row["messages"]}).encode()
headers = {"Authorization": f"Bearer {key}"}
request = urllib.request.Request(base + "/chat/completions", body, headers)
answer = json.loads(urllib.request.urlopen(request).read())
text = answer["choices"][0]["message"]["content"]
END
"""
ENDS = {
    "number": ('print(float(text == row["label"]), file=open(os.environ[OUT], "w"))', 1.0),
    "object": ('json.dump({"reward": 0.5}, open(os.environ[OUT], "w"))', 0.5),
    "nothing": ("", None),
    "exit code": ("sys.exit(2)", "exit_code"),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tool_tokenizer()


@pytest.mark.parametrize("end", list(ENDS))
def test_a_command_is_an_agent(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, end: str):
    line, expected = ENDS[end]
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM.replace("END", line.replace("OUT", '"MEGATRON_STARE_OUTCOME"')))
    command = [sys.executable, str(program), "{base_url}", "{api_key}", '{"a": {}} {0}']
    before = set(psutil.Process().children(recursive=True))
    inner: Any = Scripted(tokenizer, lambda *_: "42<|end|>")
    engine = AgentEngine(inner, tokenizer, AgentsConfig(hosts=1, command=command), 256)
    try:
        (future,) = engine.submit([request(tokenizer)], PARAMS)
        rollout = future.result(timeout=60)
    finally:
        engine.close()
    if isinstance(expected, str):
        assert rollout.episode[f"failed/{expected}"] == 1 and rollout.outcome is None
    else:
        assert rollout.outcome == expected and rollout.loss_tokens == 3
    assert set(psutil.Process().children(recursive=True)) <= before, "no process is left"


def test_a_command_whose_program_is_missing_is_refused_before_the_first_step():
    with pytest.raises(UserError, match=r"agents\.command .* there is no program 'missing-agent'"):
        check_agent(AgentsConfig(command=["missing-agent", "{base_url}"]))


@pytest.mark.parametrize("kills", [2, 3])
def test_a_host_that_is_killed_before_it_is_ready_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
):
    write_module(tmp_path, kills, "def agent(row, endpoint):\n    return 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = AgentsConfig(function=f"{MODULE}.agent")
    if kills == 3:
        with pytest.raises(UserError, match=r"the host ended with exit code -9"):
            check_agent(settings)
    else:
        check_agent(settings)
    assert killed(tmp_path) == kills


def test_an_agent_that_is_being_stopped_is_not_stopped_again(tmp_path: Path):
    """An abort while a late agent cleans up would interrupt it by a second stop."""
    episode = {"row": {"metadata": {"folder": str(tmp_path)}}, "endpoint": {}, "attempt": 0}

    async def cancelled_while_late() -> None:
        hosts = Hosts(AgentsConfig(hosts=1, function=f"{PROGRAMS}.cleans", grace_seconds=10.0))
        await hosts.start()
        try:
            run = asyncio.create_task(hosts.run(episode, 0.1, lambda: None))
            while not (tmp_path / "stopped").exists():
                await asyncio.sleep(0.02)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            while hosts.hosts[0].running:
                await asyncio.sleep(0.02)
            assert (tmp_path / "ended").exists() and hosts.hosts[0].alive
        finally:
            await hosts.close()

    asyncio.run(asyncio.wait_for(cancelled_while_late(), 60))


EPISODE = {"row": {}, "endpoint": {"base_url": "", "api_key": "", "model": ""}, "attempt": 0}
ENOUGH = 20.0  # seconds for an episode that makes no calls


def episode(**row: Any) -> dict[str, Any]:
    return EPISODE | {"row": row}


@contextlib.asynccontextmanager
async def started(function: str, settings: AgentsConfig | None = None) -> AsyncIterator[Hosts]:
    """One host of the function, or those of the settings; closed at the end."""
    hosts = Hosts(settings or AgentsConfig(hosts=1, function=function))
    await hosts.start()
    try:
        yield hosts
    finally:
        await hosts.close()


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module of agents; returns the dotted path of its function `agent`."""

    def write(text: str) -> str:
        (tmp_path / "written_agents.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "written_agents.agent"

    return write


def test_a_host_whose_line_is_too_long_is_lost(
    written: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
):
    """Nothing more can be read from it: its episodes would wait for agents.max_seconds."""
    monkeypatch.setattr(module, "_LINE", 1 << 16)
    text = (
        "def agent(row, endpoint):\n    return {'reward': 1.0, row.name: {'x' * (1 << 20): 1.0}}\n"
    )

    async def play() -> None:
        async with started(written(text)) as hosts:
            trace = await hosts.run(episode(name="trace"), ENOUGH, lambda: None)
            assert trace == {"reward": 1.0}, "the trainer has no use for more"
            with pytest.raises(HostLost, match="cannot be read"):
                await hosts.run(episode(name="metrics"), ENOUGH, lambda: None)

    asyncio.run(play())


def test_a_host_that_is_killed_leaves_no_process(written: Callable[[str], str], tmp_path: Path):
    """Its pipe to the trainer is held open by what an agent forked, as multiprocessing does."""
    text = (
        "import os, signal, subprocess, time\n"
        "def agent(row, endpoint):\n"
        "    forked = os.fork()\n"
        "    if not forked:\n"
        "        time.sleep(3600)\n"
        "    command = ['sleep', '3600']\n"
        "    detached = subprocess.Popen(command, env={}, start_new_session=True).pid\n"
        f"    with open({str(tmp_path / 'left')!r}, 'w') as file:\n"
        "        print(forked, detached, file=file)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )

    async def play() -> None:
        async with started(written(text)) as hosts:
            with pytest.raises(HostLost, match="exit code -9"):
                await hosts.run(episode(), ENOUGH, lambda: pytest.fail("the pipe did not end"))

    asyncio.run(play())
    left = (tmp_path / "left").read_text().split()
    assert len(left) == 2 and not any(psutil.pid_exists(int(one)) for one in left)


def test_a_command_leaves_no_process(tmp_path: Path):
    """`timeout` leaves the process group of the shell that starts it."""
    program = (
        "import os, subprocess, time\n"
        "left = subprocess.Popen(['timeout', '3600', 'sleep', '3600']).pid\n"
        "while os.getpgid(left) != left: time.sleep(0.01)\n"
        f"print(left, file=open({str(tmp_path / 'left')!r}, 'w'))\n"
    )

    async def play() -> None:
        settings = AgentsConfig(hosts=1, command=[sys.executable, "-c", program])
        async with started("", settings) as hosts:
            found = await hosts.run(episode(), ENOUGH, lambda: None)
            assert found == {"reward": None}
            assert not psutil.pid_exists(int((tmp_path / "left").read_text()))

    asyncio.run(play())


def test_a_stopped_command_may_clean_up(tmp_path: Path):
    """A container that it has started would run on; what ignores the signal is killed."""
    program = (
        "import os, signal, subprocess, sys, time\n"
        f"folder = {str(tmp_path)!r}\n"
        "def clean(*_):\n"
        "    time.sleep(0.2)\n"
        "    open(folder + '/cleaned', 'w')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "deaf = subprocess.Popen(['sleep', '3600']).pid\n"
        "signal.signal(signal.SIGTERM, clean)\n"
        "print(deaf, file=open(folder + '/deaf', 'w'))\n"
        "os.rename(folder + '/deaf', folder + '/ready')\n"
        "time.sleep(3600)\n"
    )

    async def play() -> None:
        command = [sys.executable, "-c", program]
        settings = AgentsConfig(hosts=1, command=command, grace_seconds=3.0)
        async with started("", settings) as hosts:
            run = asyncio.create_task(hosts.run(episode(), 600.0, lambda: None))
            while not (tmp_path / "ready").exists():
                await asyncio.sleep(0.02)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            assert (tmp_path / "cleaned").exists() and hosts.hosts[0].alive
            assert not psutil.pid_exists(int((tmp_path / "ready").read_text()))

    asyncio.run(play())


def test_a_host_whose_threads_are_taken_by_stopped_agents_is_replaced(
    written: Callable[[str], str],
):
    """Nothing ends a thread: when all are taken no episode of the host could start."""
    text = (
        "import time\n"
        "def agent(row, endpoint):\n"
        "    time.sleep(3600 if row.hangs else 0)\n"
        "    return 1.0\n"
    )

    async def play() -> None:
        settings = AgentsConfig(hosts=1, function=written(text), episodes_per_host=256)
        async with started("", settings) as hosts:
            (first,) = hosts.hosts
            hung = [hosts.run(episode(hangs=True), 0.5, lambda: None) for _ in range(256)]
            await asyncio.gather(*hung, return_exceptions=True)
            await asyncio.wait({first.reader})  # type: ignore[type-var]
            found = await hosts.run(episode(hangs=False), ENOUGH, lambda: None)
            assert found == {"reward": 1.0} and hosts.restarts == 1

    asyncio.run(play())


def test_a_row_may_hold_what_json_has_no_form_for(written: Callable[[str], str]):
    text = "def agent(row, endpoint):\n    return float(row.metadata['day'] == '2026-01-31')\n"

    async def play() -> None:
        async with started(written(text)) as hosts:
            own = episode(metadata={"day": datetime.date(2026, 1, 31)})
            assert await hosts.run(own, ENOUGH, lambda: None) == {"reward": 1.0}

    asyncio.run(play())


def test_an_agent_imports_the_adapters_but_not_the_trainers_packages(
    written: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Both lie in one folder, and another Python may be unable to use the latter."""
    shutil.copytree(module.SCRIPT.parent, tmp_path / "site" / "megatron_stare_agents")
    (tmp_path / "site" / "neighbour.py").touch()
    monkeypatch.setattr(module, "SCRIPT", tmp_path / "site" / "megatron_stare_agents" / "host.py")
    text = (
        "import importlib.util, megatron_stare_agents.gym_tasks\n"
        "assert importlib.util.find_spec('neighbour') is None\n"
        "def agent(row, endpoint): ...\n"
    )
    check_agent(AgentsConfig(function=written(text)))


def test_hosts_that_started_end_where_another_cannot_start(
    written: Callable[[str], str], tmp_path: Path
):
    text = f"import os\nos.mkdir({str(tmp_path / 'only_one')!r})\ndef agent(row, endpoint): ...\n"

    async def play() -> None:
        before = set(psutil.Process().children())
        hosts = Hosts(AgentsConfig(hosts=2, function=written(text)))
        with pytest.raises(UserError, match="FileExistsError"):
            await hosts.start()
        await hosts.close()
        assert set(psutil.Process().children()) <= before

    asyncio.run(play())


def test_no_episode_goes_to_a_host_that_died_while_another_one_started(
    written: Callable[[str], str],
):
    async def play() -> None:
        text = "def agent(row, endpoint):\n    return 1.0\n"
        hosts = Hosts(AgentsConfig(hosts=2, function=written(text)))
        await hosts.start()
        first, second = hosts.hosts
        begun = hosts._begun

        async def killed(host: Any) -> None:
            if host.process.returncode is None:
                host.process.kill()
            await asyncio.wait({host.reader})

        async def meanwhile() -> Any:
            await killed(first)
            return await begun()

        hosts._begun = meanwhile  # type: ignore[method-assign]
        await killed(second)
        try:
            found = await hosts.run(EPISODE, ENOUGH, lambda: None)
            assert found == {"reward": 1.0} and hosts.restarts == 2
        finally:
            await hosts.close()

    asyncio.run(play())
