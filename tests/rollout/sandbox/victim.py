"""A trainer without rights, and what a program in its sandbox tries to do to it.

    python victim.py ISOLATION NAMESPACES LANDLOCK

Prints one line of JSON: what protected it (`held`), what the program could read and change, and
what it could still do with its own (`own`). Run by test_sandbox_protections.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from megatron_stare.config import SandboxConfig, UserError
from megatron_stare.rollout.sandbox.sandbox import Sandbox, missing

# Each line is tried by itself; D, F, S, P: a directory, files in it, in shared memory and in a
# package; V: a process.
ATTACKS = """
os.chmod(D, 0)
os.chmod(D, 0o777)
os.chmod(F, 0o777)
os.chmod(S, 0o777)
os.chmod(P, 0o777)
fd = os.open(P, os.O_RDONLY); os.fchmod(fd, 0o777)
call(452, -100, F.encode(), 0o777, 0)
call(268, -100, F.encode(), 0o777, 0)
os.chown(F, -1, os.getgid())
os.lchown(F, os.getuid(), -1)
os.setxattr(F, 'user.note', b'x')
os.setxattr(P, 'user.note', b'x')
os.utime(F, (1, 1))
os.utime(P, (1, 1))
os.truncate(F, 0)
os.truncate(P, 0)
os.truncate(S, 0)
os.open(P, os.O_RDONLY | os.O_TRUNC)
os.open(P, 3 | os.O_TRUNC)
os.open(F, 3 | os.O_TRUNC)
fd = os.open(P, os.O_RDONLY); fcntl.ioctl(fd, 0x40086602, pack('q', 0x40))
open(F, 'w').write('mine')
open(P, 'w').write('mine')
open(S, 'w').write('mine')
open(D + '/new', 'w').write('mine')
os.rename(F, F + '.old')
os.link(F, 'mine')
os.unlink(S)
os.unlink(F)
resource.prlimit(V, resource.RLIMIT_NOFILE, (8, 8))
resource.prlimit(V, resource.RLIMIT_CPU, (1, 1))
os.sched_setaffinity(V, {min(os.sched_getaffinity(0))})
os.sched_setscheduler(V, os.SCHED_IDLE, os.sched_param(0))
os.sched_setparam(V, os.sched_param(0))
os.setpriority(os.PRIO_PROCESS, V, 19)
os.setpriority(os.PRIO_PGRP, os.getpgid(V), 19)
call(251, 1, V, 3 << 13)
call(129, V, 10, bytes(128))
call(200, V, 10)
call(234, V, V, 10)
r, w = os.pipe(); fcntl.fcntl(r, 8, V); arm(r); os.write(w, b'x')
r, w = os.pipe(); fcntl.fcntl(r, 15, pack('ii', 1, V)); arm(r); os.write(w, b'x')
a, b = socket.socketpair(); fcntl.ioctl(a, 0x8901, pack('i', V)); arm(a.fileno()); b.send(b'x')
os.kill(V, signal.SIGSTOP)
os.kill(V, signal.SIGUSR1)
os.killpg(os.getpgid(V), signal.SIGUSR1)
"""
PRELUDE = """
import ctypes, fcntl, os, resource, signal, socket
from struct import pack
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    if libc.syscall(*arguments) < 0: raise OSError
def arm(fd):
    fcntl.fcntl(fd, 10, 10)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
"""
READS = "print(open(F).read(), end=' ')\nprint(open(S).read(), end=' ')"
# What a program may always do with its own.
OWN = """
import os, resource, shutil, signal, subprocess, threading
open('a', 'w').write('12')
os.rename('a', 'b'); shutil.copyfile('b', 'c'); os.truncate(os.open('c', os.O_RDWR), 1)
assert open('c').read() == '1'
assert subprocess.run(['/bin/echo', 'hello'], capture_output=True, text=True).stdout == 'hello\\n'
assert os.waitpid(os.spawnv(os.P_NOWAIT, '/bin/true', ['true']), 0)[1] == 0
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
os.setpriority(os.PRIO_PROCESS, 0, 19); os.nice(1)
os.sched_setaffinity(0, os.sched_getaffinity(0))
seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
os.kill(os.getpid(), signal.SIGALRM); signal.raise_signal(signal.SIGALRM)
thread = threading.Thread(target=seen.append, args=(1,)); thread.start(); thread.join()
len(seen)
"""


class Victim:
    """Files, shared memory and a process, as any trainer has them."""

    def __init__(self, home: Path, shared: Path) -> None:
        self.directory, self.shared = home / "run", shared
        self.file = self.directory / "checkpoint"
        self.package = home / "venv/lib/python3.12/site-packages/package.py"
        self.directory.mkdir()
        self.package.parent.mkdir(parents=True, exist_ok=True)
        for path, text in ((self.file, "of-run"), (shared, "of-memory"), (self.package, "# own")):
            path.write_text(text)
            path.chmod(0o600)
        code = (
            "import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: print('hit', flush=True))"
            "\nprint('up', flush=True)\nwhile True: signal.pause()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        assert self.process.stdout and self.process.stdout.readline() == b"up\n"
        os.set_blocking(self.process.stdout.fileno(), False)

    def state(self) -> dict[str, Any]:
        """Everything that an attack may change."""
        found: dict[str, Any] = {}
        for name in ("directory", "file", "shared", "package"):
            try:
                status = os.stat(getattr(self, name))
                found[name] = [status.st_mode, status.st_size, status.st_ctime_ns]
            except OSError:
                found[name] = None
        pid = self.process.pid
        assert self.process.stdout
        found["signals"] = (self.process.stdout.read() or b"").decode()
        text = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found["stopped"], found["nice"], found["policy"] = text[0] == "T", text[16], text[38]
        found["io priority"] = __import__("ctypes").CDLL(None).syscall(252, 1, pid)
        found["processors"] = sorted(os.sched_getaffinity(pid))
        found["limits"] = [
            resource.prlimit(pid, kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)
        ]
        return found


def tell(sandbox: Sandbox, victim: Victim) -> dict[str, Any]:
    """Try everything."""
    names = (
        f"D, F, S, P, V = {str(victim.directory)!r}, {str(victim.file)!r}, {str(victim.shared)!r}, "
        f"{str(victim.package)!r}, {victim.process.pid}\n"
    )
    reads = [sandbox.run(names + line).stdout.strip() for line in READS.splitlines()]
    changed, before = [], victim.state()
    for attack in ATTACKS.strip().splitlines():
        sandbox.run(PRELUDE + names + f"print({attack!r})\n{attack}", wall_seconds=2)
        after = victim.state()
        changed += [f"{what}: {attack}" for what in before if before[what] != after[what]]
        before = after
    own = sandbox.run(OWN)
    kept = sandbox.run("import os\nopen('a', 'w')\nos.chmod('a', 0o600)\nos.utime('a')")
    return {
        "held": sorted(sandbox.held),
        "missing": missing(sandbox.held),
        "changed": changed,
        "read": [read for read in reads if read],
        "own": own.value if own.reason == "ok" else own.message(),
        "attributes of its own": kept.reason,
        "next": sandbox.run("import os; os.listdir('.')").value,
    }


def main(isolation: str, namespaces: str, landlock: str) -> None:
    """Prints what was found; `refused` where the isolation does not run here."""
    home = Path(tempfile.mkdtemp(prefix="unprivileged-"))
    memory = Path("/dev/shm" if os.path.isdir("/dev/shm") else home)
    shared = memory / f"unprivileged-{os.getpid()}"
    victim = None
    try:
        venv.create(home / "venv", symlinks=True)
        victim = Victim(home, shared)
        config = SandboxConfig(
            isolation=isolation,
            python=str(home / "venv/bin/python"),
            max_concurrency=1,
            warm_workers=1,
            memory_mib=256,
            disk_mib=4,
            max_processes=8,
        )
        with Sandbox(config, namespaces == "True", int(landlock)) as sandbox:
            print(json.dumps(tell(sandbox, victim)))
    except UserError as error:
        print(json.dumps({"refused": str(error)}))
    finally:
        if victim is not None:
            victim.process.kill()
            victim.process.wait()
        with contextlib.suppress(OSError):
            shared.unlink()
        with contextlib.suppress(OSError):
            (home / "run").chmod(0o700)
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
