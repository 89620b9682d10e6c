"""A server that this process started: its command, its process group, its log, its end."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from megatron_stare.config import EngineError, SGLangConfig, UserError
from megatron_stare.rollout.sglang.access import local_url, public_url
from megatron_stare.system import end_with_parent

CPU_SERVER = Path(__file__).parents[3] / "tools" / "sglang_cpu" / "serve"
_PATIENCE_SECONDS = 10.0
KILLED_SECONDS = 60.0  # within which a killed process has ended
_LAST_BYTES = 1 << 16  # of a log that may have gigabytes


def server_command(settings: SGLangConfig) -> list[str]:
    """The command that starts a server: the user's, or this machine's default. UserError: there is
    none.
    """
    if settings.command:
        return shlex.split(settings.command)
    python = server_python(settings)
    if torch.cuda.is_available():
        return [python, "-m", "sglang.launch_server"]
    return ["env", f"SGLANG_PYTHON={python}", str(CPU_SERVER)]


def server_python(settings: SGLangConfig) -> str:
    """The interpreter that the default command runs: sglang.python, or SGLANG_PYTHON; else without
    CUDA .venv-sglang's, and with it that of .venv-sglang-gpu, or the trainer's, if that has SGLang.
    UserError: there is none.

    SGLang pins another torch than the trainer, so that they seldom share an environment.
    """
    named = settings.python or os.environ.get("SGLANG_PYTHON", "")
    if named:
        if shutil.which(named) is None:
            raise UserError(
                f"{'sglang.python' if settings.python else 'SGLANG_PYTHON'}={named} is not a "
                "program; give the Python of an environment that has SGLang"
            )
        return named
    if torch.cuda.is_available():
        built = CPU_SERVER.parents[2] / ".venv-sglang-gpu" / "bin" / "python"
        if os.access(built, os.X_OK):
            return str(built)
        if importlib.util.find_spec("sglang") is None:
            raise UserError(
                f"the trainer's Python ({sys.executable}) has no SGLang to launch servers with; "
                "`make sglang-gpu` builds an environment that has, sglang.python names another, "
                "e.g. sglang.python=/opt/sglang/bin/python, and sglang.urls attaches to servers"
            )
        return sys.executable
    if not CPU_SERVER.is_file():
        raise UserError(
            "sglang.command is empty and this installation has no tools/sglang_cpu/serve; give the "
            "command that starts a server, e.g. sglang.command='/opt/sglang/bin/python -m "
            "sglang.launch_server'"
        )
    python = CPU_SERVER.parents[2] / ".venv-sglang" / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise UserError(
            f"{python} does not exist; run `make sglang` to build the CPU server, or give "
            "sglang.python or sglang.command"
        )
    return str(python)


# The library's own answer: torch names the version that it was compiled with, also after another
# one was installed.
_LOADED_NCCL = (
    "import ctypes; code = ctypes.c_int(); "
    "ctypes.CDLL('libnccl.so.2').ncclGetVersion(ctypes.byref(code)); "
    "version = (code.value // 10000, code.value // 100 % 100, code.value % 100)"
)


def own_nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that this process has loaded; without a library, the one that torch
    states.
    """
    found: dict[str, tuple[int, ...]] = {}
    with contextlib.suppress(OSError, AttributeError):
        exec(_LOADED_NCCL, {}, found)
    return found.get("version") or torch.cuda.nccl.version()


def nccl_version(command: list[str]) -> tuple[int, ...] | None:
    """The NCCL version of the Python that a server's command begins with; None if the command is
    not Python, or its torch has no CUDA. Takes the seconds of an import of torch.
    """
    if not Path(command[0]).name.startswith("python"):
        return None
    ask = f"import torch; {_LOADED_NCCL}; print(*version)"
    try:
        done = subprocess.run([command[0], "-c", ask], capture_output=True, text=True, timeout=120)
        return tuple(int(number) for number in done.stdout.split()) or None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def servers_nccl(settings: SGLangConfig) -> tuple[int, ...] | None:
    """The NCCL version of the servers' Python: the one that launches them, or for attached servers
    the one that sglang.python or sglang.command names. None if it is not known.
    """
    if settings.urls or settings.router_url:
        return nccl_version(shlex.split(settings.command) or [settings.python])
    return nccl_version(server_command(settings))


# SGLang 0.5.15 derives a port for gRPC, 10,000 higher, and does not start if there is none.
_HIGHEST_PORT = 65535 - 10000


def free_port() -> int:
    """A port of the loopback interface that nothing listens on and a server can start with."""
    with contextlib.ExitStack() as refused:  # they stay open, so that the next probe has another
        while True:
            probe = refused.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            if port <= _HIGHEST_PORT:
                return port


class ServerProcess:
    """A server in a process group of its own, ended as a group. It ends with the thread that
    started it.

    `log` collects the output, restarts included. With a `key` only this user may read it, because a
    server prints its key. The key is passed by a file next to the log (`--config`), which only this
    user may read: `ps` shows command lines to everyone. `url` is for this machine, `public_url` for
    others.
    """

    def __init__(
        self,
        command: list[str],
        model_path: str,
        arguments: list[str],
        log: Path,
        host: str,
        port: int = 0,
        key: str = "",
    ) -> None:
        self.port, self.log, self._key = port or free_port(), log, key
        self._key_file = log.with_suffix(".key.yaml").absolute()
        self.url, self.public_url = local_url(host, self.port), public_url(host, self.port)
        whole = [
            *command,
            "--model-path",
            model_path,
            "--host",
            host,
            "--port",
            str(self.port),
            *arguments,
            *(["--config", str(self._key_file)] if key else []),
        ]
        log.parent.mkdir(parents=True, exist_ok=True)
        if key:
            with open(self._key_file, "w", opener=_for_this_user) as file:
                file.write(f"api-key: {json.dumps(key)}\n")
        with open(log, "ab", opener=_for_this_user if key else None) as output:
            output.write(f"$ {self._without_key(shlex.join(whole))}\n".encode())
            output.flush()
            try:
                self.process = subprocess.Popen(
                    whole,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=_environment(),
                    preexec_fn=end_with_parent,
                )
            except OSError as error:
                raise UserError(
                    f"sglang.command: {whole[0]} cannot be started ({error.strerror}); correct it"
                ) from None

    def alive(self) -> bool:
        """Whether the server's first process runs; its other processes end with it."""
        return self.process.poll() is None

    def last_words(self) -> str:
        """The last line of the log that the server itself wrote."""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        last = next(filter(None, reversed(lines)), "$ ")
        last = "it printed nothing" if last.startswith("$ ") else last
        return self._without_key(last)[-300:]

    def stop(self, *, at_once: bool = False) -> None:
        """End the whole group: politely first, unless `at_once`. EngineError: it does not end."""
        if not at_once and self.alive():
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while self.alive() and time.monotonic() < deadline:
                time.sleep(0.05)
        self._signal(signal.SIGKILL)
        try:
            self.process.wait(KILLED_SECONDS)
        except subprocess.TimeoutExpired:
            raise EngineError(
                f"process {self.process.pid} of an SGLang server has not ended "
                f"{KILLED_SECONDS:g} s after it was killed: the system holds it, as a GPU driver "
                "that hangs does; see dmesg, and restart the machine"
            ) from None
        self._key_file.unlink(missing_ok=True)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def _for_this_user(path: str, flags: int) -> int:
    """Open a file that only this user may read, also if it existed before."""
    handle = os.open(path, flags, 0o600)
    os.fchmod(handle, 0o600)
    return handle


def _environment() -> dict[str, str]:
    """This process's environment without torchrun's variables, because a server has its own ranks,
    and without the trainer's allocator settings: a memory saver refuses expandable segments.
    """
    of_rank = re.compile(
        r"TORCHELASTIC_.*|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|CUDA_DEVICE_MAX_.*"
        r"|PYTORCH_((CUDA|HIP)_)?ALLOC_CONF"
    )
    return {name: value for name, value in os.environ.items() if not of_rank.fullmatch(name)}
