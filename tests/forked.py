"""`python WORDS` in a process forked from one that has imported its libraries, because imports take
most of the time of a tiny command.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_stare.compare import compare
from megatron_stare.config import Config, dump
from megatron_stare.loop import run_directory
from tests.distributed import fork_server
from tests.paths import ROOT


class Command:
    """A running command in its own process; the file `log` receives both of its streams."""

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        *,
        directory: Path = ROOT,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        arguments = (list(words), dict(variables or {}), str(directory), str(log))
        self._process = fork_server().Process(target=_as_python, args=arguments)
        self._process.start()

    @property
    def code(self) -> int | None:
        """Its exit code, below 0 for a signal; None while it runs."""
        return self._process.exitcode

    @property
    def output(self) -> str:
        """Everything that it has printed."""
        return self.log.read_text() if self.log.exists() else ""

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it at once."""
        self._process.kill()
        self._process.join()

    def wait(self, seconds: float) -> int | None:
        """Its exit code; it is killed if it has not ended in time."""
        self._process.join(seconds)
        if self.code is None:
            self.kill()
        return self.code


def train(config: Config) -> Command:
    """`train` on a config of its own, written next to its run.dir."""
    file = Path(config.run.dir).with_suffix(".yaml")
    dump(config, file)
    return Command(["-m", "megatron_stare", "train", str(file)], file.with_suffix(".log"))


class Arm(Command):
    """A run of a comparison, with the methods of subprocess.Popen that the comparison calls."""

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                self.signal(number)


def start_arm(config: Config, threads: int, force: bool) -> Arm:
    """The forked process that stands for that of `compare._start`, which imports all libraries."""
    directory = Path(config.run.dir)
    words = ["-m", "megatron_stare", "train", str(directory / run_directory.CONFIG_NAME)]
    words += ["--force"] * force
    return Arm(words, directory / compare.LOG_NAME, directory=Path.cwd())


def _as_python(words: list[str], variables: dict[str, str], directory: str, log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(variables | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    os.chdir(directory)
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, directory)  # as `python -m` does
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")
