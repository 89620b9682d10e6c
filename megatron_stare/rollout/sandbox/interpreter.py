"""Starts, calls and ends one sandboxed interpreter from outside: the client of guard.py; and the
result of a call.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_stare.config import SandboxConfig, UserError
from megatron_stare.rollout.sandbox.call_monitor import empty_directory

log = logging.getLogger(__name__)

Isolation = Literal["bubblewrap", "limits"]
Reason = Literal["ok", "error", "timeout", "memory", "killed", "output limit"]

# The time that a guard may take beyond a call's wall time. It checks the time 20 times a second.
GRACE_SECONDS = 10.0
END_SECONDS = 10.0
NEWEST_LANDLOCK = 99
# Of /dev, what programs read. Not /dev/shm: other programs' memory lies there.
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# The least part of `disk_mib` that a file takes: empty files are bounded too.
_ENTRY_BYTES = 4096
# Readable by the code besides the interpreter's own directories; of /etc only the files that
# programs need to start.
_ETC = ("alternatives", "ld.so.cache", "localtime", "passwd", "group")
SYSTEM_PLACES = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/lib32",
    *(f"/etc/{name}" for name in _ETC),
)
_SOURCE = Path(__file__).resolve().parents[3]
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from megatron_stare.rollout.sandbox.guard import main; main()"
)
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
# User ids that no system assigns; each interpreter draws its own.
FIRST_USER, LAST_USER = 1_610_612_736, 4_200_000_000
_RESTARTED = "[variables and files of earlier calls are gone: too many sessions were open]"
PREFIX = "sandbox-"  # of the directories of isolation=limits


@dataclass(frozen=True)
class Execution:
    """The result of one call.

    `reason`: ok; error (an exception, or an exit status other than 0; stderr has it); timeout;
    memory; killed (by a signal, or the process ended before the code was done); output limit.
    """

    stdout: str
    stderr: str
    value: str | None  # the repr of a last expression that is not None, as a REPL shows it
    reason: Reason
    seconds: float  # wall time
    detail: str = ""  # an explanation, if `reason` is neither ok nor error
    alive: bool = False  # the session has kept its variables
    lost: bool = False  # the sandbox itself ended without an answer; `reason` is then killed
    # The session lost its variables before this call: too many were open (sandbox.max_sessions).
    restarted: bool = False

    @property
    def ok(self) -> bool:
        return self.reason == "ok"

    def message(self) -> str:
        """The text for the model: output, errors, value, and why the code ended early."""
        parts = [_RESTARTED] if self.restarted else []
        parts += [self.stdout, self.stderr, self.value or ""]
        if self.reason not in ("ok", "error"):
            parts.append(f"[{self.reason}: {self.detail}]")
        text = "\n".join(part.rstrip("\n") for part in parts if part)
        return text or "[no output]"


class SandboxError(RuntimeError):
    """An interpreter could not be started, or it ended without an answer."""


class CallLost(SandboxError):
    """A call got no answer although other code does, so its result is unknown."""


class InterpreterNotReady(SandboxError):
    """An interpreter cannot take a call: an earlier call's code is at fault, not this one's."""


class Interpreter:
    """One sandboxed interpreter. Not thread-safe: one call at a time.

    `held` names its protections, as sandbox.py lists them.
    """

    def __init__(
        self,
        config: SandboxConfig,
        isolation: Isolation,
        namespaces: bool = True,
        landlock: int = NEWEST_LANDLOCK,
    ) -> None:
        """`namespaces` False, `landlock`: as Sandbox has them. SandboxError: it did not start."""
        python = config.python or sys.executable
        places = interpreter_places(python)
        self.isolation: Isolation = isolation
        command = [python, "-I", "-c", _BOOT, str(_SOURCE)]
        try:
            if isolation == "bubblewrap":
                self.directory = _scratch(places)
                command = [*_bubblewrap(config, places, self.directory), *command]
            else:
                self.directory = tempfile.mkdtemp(prefix=PREFIX)
            settings = _settings(config, self.directory, places, isolation, namespaces, landlock)
            self._process = subprocess.Popen(
                [*command, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**_ENVIRONMENT, "HOME": self.directory, "TMPDIR": self.directory},
                cwd="/",
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:  # no memory, no processes, no disk
            if isolation == "limits" and hasattr(self, "directory"):
                os.rmdir(self.directory)
            raise SandboxError(f"no process can be started ({error})") from None
        self._unread = b""
        try:
            greeting = self._receive(config.start_timeout)
            if "error" in greeting:
                raise SandboxError(greeting["error"])
        except SandboxError as error:
            said = self._errors()
            self.stop()
            raise SandboxError(f"{error}{': ' if said else ''}{said}") from None
        self._ready = True
        self._patience = config.start_timeout
        self.held: frozenset[str] = frozenset(greeting["held"])
        if isolation == "bubblewrap":
            self.held |= {"processes", "network", "disk", "mounts", "files", "signals"}

    def prepare(self) -> None:
        """Wait until the processes of the previous call are gone.
        InterpreterNotReady: they are not, or the interpreter has ended.
        """
        assert self._process.stdout
        try:
            if not self._ready:
                said = self._receive(self._patience)
                if "ready" not in said:
                    raise InterpreterNotReady(
                        said.get("error", "it said something else than that it is ready")
                    )
                self._ready = True
        except SandboxError as error:
            raise InterpreterNotReady(str(error)) from None
        poll = select.poll()
        poll.register(self._process.stdout.fileno(), select.POLLIN)
        # No message is due, so readable means ended. If bubblewrap was killed, its children keep
        # its pipes open for a moment.
        if poll.poll(0) or self._process.poll() is not None:
            raise InterpreterNotReady("the sandbox has ended")

    def call(self, code: str, stdin: str, wall_seconds: float, keep: bool) -> Execution:
        """Run code. InterpreterNotReady: the call did not start.
        SandboxError: the guard is gone, and this code may have ended it.
        """
        request = {"code": code, "stdin": stdin, "wall_seconds": wall_seconds, "keep": keep}
        self._ask({"do": "run", **request})
        return Execution(**self._receive(wall_seconds + GRACE_SECONDS))

    def reset(self) -> None:
        """Forget a session: its processes end, its files go."""
        self._ask({"do": "reset"})

    def _ask(self, request: dict[str, Any]) -> None:
        self.prepare()
        self._ready = False
        try:
            self._send(request, GRACE_SECONDS)
        except SandboxError as error:
            raise InterpreterNotReady(str(error)) from None

    def stop(self) -> None:
        """End everything in the sandbox, and wait for it."""
        process = self._process
        assert process.stdin and process.stdout and process.stderr
        process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        process.stderr.close()
        if self.isolation == "limits":
            try:
                empty_directory(self.directory)
                os.rmdir(self.directory)
            except FileNotFoundError:  # mostly the guard has removed it
                pass
            except OSError as error:
                log.warning("sandbox: %s cannot be removed (%s)", self.directory, error)

    def _send(self, message: dict[str, Any], seconds: float) -> None:
        assert self._process.stdin
        descriptor = self._process.stdin.fileno()
        os.set_blocking(descriptor, False)
        data = memoryview(json.dumps(message).encode() + b"\n")
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        while data:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise SandboxError("the sandbox takes no request")
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise SandboxError("the sandbox has ended") from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        pieces = [self._unread]
        while b"\n" not in pieces[-1]:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self._process.kill()
                raise SandboxError(f"no answer within {seconds:g} s")
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise SandboxError("the sandbox has ended")
            pieces.append(chunk)
        line, _, self._unread = b"".join(pieces).partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _errors(self) -> str:
        """The last line that the interpreter, or bubblewrap, wrote to stderr."""
        assert self._process.stderr
        with contextlib.suppress(OSError, ValueError):
            os.set_blocking(self._process.stderr.fileno(), False)
            said = (
                (self._process.stderr.read() or b"").decode("utf-8", "replace").strip().splitlines()
            )
            return said[-1] if said else ""
        return ""


def _settings(
    config: SandboxConfig,
    directory: str,
    places: tuple[str, ...],
    isolation: Isolation,
    namespaces: bool,
    landlock: int,
) -> dict[str, Any]:
    """The guard's settings."""
    mib = 1 << 20
    confined = isolation == "bubblewrap"
    return {
        "source": str(_SOURCE),
        "directory": directory,
        "confined": confined,
        "namespaces": namespaces and not confined,
        "held": [],
        "user_id": random.SystemRandom().randint(FIRST_USER, LAST_USER),
        "landlock": landlock,
        "readable": ["/"] if confined else [*SYSTEM_PLACES, *_DEVICES, *places],
        "preload": list(config.preload),
        "cpu_seconds": config.cpu_seconds,
        "output_bytes": config.output_bytes,
        "disk_bytes": config.disk_mib * mib,
        "disk_entries": config.disk_mib * mib // _ENTRY_BYTES,
        "watch_disk": "entries" if confined else "walk",
        "limits": {
            "AS": config.memory_mib * mib,
            "NPROC": config.max_processes,
            "FSIZE": config.file_mib * mib,
            "NOFILE": config.open_files,
            "CORE": 0,
        },
    }


def _scratch(places: tuple[str, ...]) -> str:
    """The directory in which code in bubblewrap may write:
    /tmp, unless the interpreter itself, or this package, lies in there.
    """
    return (
        "/scratch"
        if any(place.startswith("/tmp/") for place in (*places, str(_SOURCE)))
        else "/tmp"
    )


def _bubblewrap(config: SandboxConfig, places: tuple[str, ...], scratch: str) -> list[str]:
    """The command that starts a program in an empty root with the interpreter's own directories,
    read-only.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("bwrap is not installed")
    command = [
        program,
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    command += ["--die-with-parent", "--as-pid-1", "--hostname", "sandbox"]
    command += ["--proc", "/proc", "--dev", "/dev"]
    # With root's rights bubblewrap makes no user namespace; the guard then becomes another user for
    # the code.
    if os.geteuid() == 0:
        for capability in ("SETUID", "SETGID", "KILL", "CHOWN", "FOWNER", "DAC_OVERRIDE"):
            command += ["--cap-add", f"CAP_{capability}"]
    else:
        command += ["--unshare-user"]
    command += ["--perms", "1777", "--size", str(config.disk_mib << 20), "--tmpfs", scratch]
    here = Path(__file__).resolve().parent
    own = [*here.glob("*.py"), here.parent / "__init__.py", here.parents[1] / "__init__.py"]
    for place in (*SYSTEM_PLACES, *places):
        if os.path.islink(place) and place in SYSTEM_PLACES:
            command += ["--symlink", os.readlink(place), place]
        else:
            command += [*_parents(place), "--ro-bind-try", place, place]
    for file in own:
        command += [*_parents(str(file)), "--ro-bind", str(file), str(file)]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", scratch, "--"]


def _parents(place: str) -> list[str]:
    """Options that make the directories above a place: bubblewrap's own would be closed."""
    above = [str(parent) for parent in reversed(Path(place).parents)][1:]
    return [word for parent in above for word in ("--perms", "0755", "--dir", parent)]


@functools.cache
def interpreter_places(python: str) -> tuple[str, ...]:
    """The directories that an interpreter needs:
    its prefixes and its sys.path. UserError where it does not run.
    """
    ask = (
        "import json, sys; print(json.dumps([list(sys.version_info[:2]), sys.prefix, "
        "sys.base_prefix, *sys.path]))"
    )
    try:
        done = subprocess.run(
            [python, "-I", "-c", ask], capture_output=True, text=True, timeout=60, check=True
        )
        version, *places = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(
            f"sandbox.python={python!r} does not run ({error}); name a Python interpreter"
        ) from None
    if tuple(version) < (3, 12):
        raise UserError(
            f"sandbox.python={python!r} is Python {version[0]}.{version[1]}; name one of 3.12 or "
            "newer"
        )
    found = {place for place in places if os.path.isdir(place)} - {"/", "/usr"}
    # sys.executable may be a chain of links, each of which must be there.
    link = python if os.path.isabs(python) else shutil.which(python) or python
    while os.path.islink(link):
        found.add(os.path.dirname(os.path.abspath(link)))
        link = os.path.join(os.path.dirname(link), os.readlink(link))
    found.add(os.path.dirname(os.path.abspath(link)))
    ordered = sorted(found)
    return tuple(
        place
        for place in ordered
        if not any(
            place != other and place.startswith(other + os.sep) for other in (*ordered, "/usr")
        )
    )
