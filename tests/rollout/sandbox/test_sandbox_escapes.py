"""Attempts to get out of a sandbox, or to harm what is outside, in every isolation. Each is
contained, and no process, file, socket or descriptor remains."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megatron_stare.rollout.sandbox.kernel import AUDIT, NUMBERS
from tests.paths import ROOT
from tests.rollout.sandbox.sandboxes import KINDS, Surroundings, open_kind


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request):
    with open_kind(request.param) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_left(sandbox):
    """After every attempt: as before, and the next call works."""
    before = Surroundings()
    yield
    assert sandbox.run("6 * 7").value == "42"
    leftover = [
        thing for thing in before.difference(Surroundings()) if not replaced(thing, sandbox)
    ]
    assert not leftover


def replaced(thing, sandbox):
    """A new process that is the pool's own: an idle interpreter, or what it has ready."""
    if thing in [worker.directory for worker in sandbox._idle]:
        return True
    own = {worker._process.pid for worker in sandbox._idle}
    kind, _, pid = thing.partition(" ")
    while kind == "process" and int(pid) > 1:
        if int(pid) in own:
            return True
        try:
            pid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            return True  # it has ended meanwhile
    return False


def needs(sandbox, *protections):
    """Skip where the kernel lacks what stops this; the sandbox has said so in a warning."""
    if not sandbox.held & set(protections):
        pytest.skip(f"nothing of {protections} here: a gap that is documented")


def test_a_fork_bomb_is_contained(sandbox):
    result = sandbox.run("import os\nn = 0\nwhile True:\n  if os.fork(): n += 1", wall_seconds=2)
    assert result.reason == "error"
    assert "BlockingIOError" in result.stderr
    sandbox.run("import os; os.system('f() { f | f & }; f; sleep 1')", wall_seconds=2)
    assert sandbox.run("1 + 1").value == "2"


def test_a_thread_bomb_is_contained(sandbox):
    code = (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), "
        "daemon=True).start()"
    )
    assert "can't start new thread" in sandbox.run(code).stderr


@pytest.mark.parametrize(
    "code",
    [
        "x = [bytearray(1 << 20) for _ in range(1 << 20)]",
        "import mmap; mmap.mmap(-1, 1 << 34)",
        "' ' * (1 << 40)",
        "import os\nfor _ in range(3): os.fork()\nx = bytearray(1 << 29)",
    ],
)
def test_a_memory_bomb_is_contained(sandbox, code):
    assert sandbox.run(code).reason in ("memory", "error")


@pytest.mark.parametrize(
    "place", ["/tmp", "/var/tmp", "/dev/shm", "/", "/etc", "/root", os.getcwd()]
)
def test_writing_outside_of_the_sandbox_fails(sandbox, place):
    needs(sandbox, "files")
    path = os.path.join(place, "escaped")
    sandbox.run(f"open({path!r}, 'w').write('x')")
    assert not os.path.exists(path)


def test_reading_secret_files_fails(sandbox, tmp_path):
    needs(sandbox, "files")
    secret = tmp_path / "secret"
    secret.write_text("words")
    secret.chmod(0o644)
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    for path in (secret, Path("/etc/shadow"), Path(__file__), ROOT / "pyproject.toml"):
        assert sandbox.run(f"open({str(path)!r}).read()").reason == "error"


def test_the_network_is_unreachable(sandbox):
    needs(sandbox, "network", "calls")
    hits = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            hits.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        port = server.server_address[1]
        for code in (
            f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/', timeout=1)",
            f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)",
            "import socket; socket.create_connection(('1.1.1.1', 53), timeout=1)",
            "import socket; socket.socket(socket.AF_UNIX).bind('\\0abstract')",
            "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', "
            "('127.0.0.1', 9))",
            "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
        ):
            assert sandbox.run(code).reason == "error"
        assert not hits
    finally:
        server.shutdown()
        server.server_close()


def test_signals_to_processes_outside_fail(sandbox):
    needs(sandbox, "user", "processes", "signals")
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        sandbox.run(
            "import os, signal\n"
            f"for pid in (os.getppid(), 1, {os.getpid()}, {victim.pid}, -{os.getpgid(0)}, -1):\n"
            "  for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):\n"
            "    try: os.kill(pid, number)\n"
            "    except OSError: pass\n",
            wall_seconds=1,
        )
        time.sleep(0.1)
        assert victim.poll() is None
        assert Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"
    finally:
        victim.kill()
        victim.wait()


def test_environment_and_memory_of_processes_outside_are_unreadable(sandbox, monkeypatch):
    needs(sandbox, "user", "processes", "files")
    victim = subprocess.Popen(["/bin/sleep", "60"], env={"SECRET_OF_THE_TRAINER": "hunter2"})
    try:
        result = sandbox.run(
            "import os, glob\n"
            f"pids = [os.getppid(), 1, {os.getpid()}, {victim.pid}, 'self', *range(1, 400)]\n"
            "for pid in pids:\n"
            "  for name in ('environ', 'mem', 'maps', 'cmdline', 'root/etc/shadow', "
            "'cwd/pyproject.toml'):\n    try: print(open(f'/proc/{pid}/{name}', 'rb').read(4096))\n"
            "    except OSError: pass\n"
            f"for pid in pids[:4]:\n"
            "  try: print(os.listdir(f'/proc/{pid}/fd'))\n"
            "  except OSError: pass\n"
        )
        assert "hunter2" not in result.stdout
        assert "root:" not in result.stdout
        assert "megatron" not in result.stdout.replace("megatron_stare.rollout.sandbox.guard", "")
        secrets = [
            value
            for name, value in os.environ.items()
            if len(value) > 20 and name not in ("PATH", "LS_COLORS")
        ]
        assert not [value for value in secrets if value in result.stdout]
    finally:
        victim.kill()
        victim.wait()


def test_tracing_other_processes_fails(sandbox):
    needs(sandbox, "calls")
    column = list(AUDIT).index(platform.machine())
    names = "ptrace process_vm_readv process_vm_writev pidfd_open pidfd_getfd unshare mount shmat"
    numbers = [NUMBERS[name][column] for name in [*names.split(), "io_uring_setup", "prlimit64"]]
    clone, clone3 = (NUMBERS[name][column] for name in ("clone", "clone3"))
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def refused(*arguments): return libc.syscall(*arguments) == -1\n"
        f"print(all(refused(number, 16, {os.getpid()}, bytes(16), 0) for number in {numbers}))\n"
        f"print(refused({clone}, 0x10000000 | 17, 0, 0, 0, 0), refused({clone3}, 0, 0))"
    )
    assert sandbox.run(code).stdout == "True\nTrue True\n"
    assert sandbox.run("import os; os.unshare(os.CLONE_NEWUSER)").reason == "error"


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize(
    "command",
    ["yes", "cat /dev/zero", "while :; do echo $$ >&2; done", "sleep 0.1; yes | head -c 1000000"],
)
def test_infinite_output_of_a_child_is_cut(sandbox, command):
    result = sandbox.run(
        f"import subprocess; subprocess.run(['/bin/sh', '-c', {command!r}])", wall_seconds=3
    )
    assert result.reason == "output limit"
    assert len(result.stdout) + len(result.stderr) < 3 * 65536 + 200


def test_orphans_are_killed(sandbox):
    code = (
        "import os, time, signal\n"
        "if os.fork() == 0:\n"
        "  try: os.setsid()\n"
        "  except OSError: pass\n"
        "  if os.fork() == 0:\n"
        "    for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)\n"
        "    os.closerange(0, 64)\n"
        "    time.sleep(1000)\n"
        "  os._exit(0)\n"
        "os.wait()\n"
    )
    assert sandbox.run(code).reason == "ok"
    assert sandbox.run(code + "time.sleep(1000)", wall_seconds=0.3).reason == "timeout"
    assert sandbox.run(code + "os._exit(1)").reason == "killed"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nfor fd in range(3, 64):\n"
        '  try: os.write(fd, b\'{"reason": "ok", "value": "fake"}\\n\')\n'
        "  except OSError: pass",
        "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'no json\\n')\n  except OSError: "
        "pass",
        "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'[' * 30000 + b'\\n')\n  except "
        "OSError: pass",
        "import os\nfor fd in range(3, 64):\n  try:\n    while 1: os.write(fd, b'x' * 60000)\n  "
        "except OSError: pass",
        "import os; os.closerange(0, 64)",
        "import os; os.dup2(1, 4); os.dup2(1, 5); os.dup2(1, 6)",
        "import os\nfor fd in range(3, 64):\n  try:\n    while os.read(fd, 1): pass\n  except "
        "OSError: pass",
    ],
)
def test_the_result_channel_cannot_be_forged(sandbox, code):
    result = sandbox.run(code, wall_seconds=1)
    assert result.reason in ("ok", "error", "killed", "timeout")
    assert sandbox.run("'own'").value == "'own'"
    session = sandbox.session()
    assert session.run(code, wall_seconds=1).reason in ("ok", "error", "killed", "timeout")
    session.close()


def test_a_fake_result_of_a_session_is_not_taken_for_the_next_calls(sandbox):
    session = sandbox.session()
    session.run(
        "import os\nfor fd in range(3, 64):\n"
        '  try: os.write(fd, b\'{"reason": "ok", "value": "fake"}\\n\' * 2)\n  except OSError: pass'
    )
    assert session.run("'true one'").value != "fake"
    session.close()


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
        "import sys; sys.setrecursionlimit(10**6)\nx = []\nfor _ in range(10**5): x = [x]\nrepr(x)",
        "eval('(' * 100000 + ')' * 100000)",
        "class A:\n  def __repr__(self): raise KeyboardInterrupt\nA()",
        "class E(Exception):\n  def __str__(self): raise SystemExit\nraise E",
        "import sys; sys.stdout = None; sys.stderr = None; 1/0",
        "import builtins, traceback\nbuiltins.print = traceback.print_exception = None\n1/0",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os.abort()",
        "import sys, os; sys.exit = os._exit; sys.exit(1)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    ],
)
def test_unusual_exits_are_reported(sandbox, code):
    assert sandbox.run(code, wall_seconds=1).reason in ("error", "killed", "memory", "timeout")


def test_a_call_that_ignores_signals_is_killed(sandbox):
    assert (
        sandbox.run(
            "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", wall_seconds=0.3
        ).reason
        == "timeout"
    )
    ignoring = (
        "import signal\nfor n in (1, 2, 13, 14, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile "
        "True: pass"
    )
    assert sandbox.run(ignoring, wall_seconds=0.3).reason == "timeout"


def test_pairs_of_sockets_are_streams(sandbox):
    """A pair of datagram sockets could send to any socket outside whose path is open."""
    streams = "import socket, asyncio\na, b = socket.socketpair()\na.send(b'x')\n"
    streams += "asyncio.run(asyncio.sleep(0))\nb.recv(1)"
    assert sandbox.run(streams).value == "b'x'"
    for kind in ("SOCK_DGRAM", "SOCK_SEQPACKET"):
        result = sandbox.run(f"import socket\nsocket.socketpair(socket.AF_UNIX, socket.{kind})")
        assert "PermissionError" in result.stderr


def test_a_call_that_fills_the_disk_is_ended(sandbox):
    one = sandbox.run("f = open('one', 'wb')\nwhile True: f.write(b'x' * 65536)", wall_seconds=5)
    assert one.reason in ("error", "killed")
    many = "n = 0\nwhile True:\n  n += 1\n  open(str(n), 'wb').write(b'x' * 1000000)"
    result = sandbox.run(many, wall_seconds=5)
    assert result.reason in ("error", "killed")
    assert "No space left" in result.stderr or "were written" in result.detail
    empty = sandbox.run("n = 0\nwhile True:\n  n += 1\n  open(str(n), 'wb')", wall_seconds=1)
    assert empty.reason in ("error", "killed", "timeout")


def test_directories_that_are_hard_to_remove_are_removed(sandbox):
    deep = "import os\nfor _ in range(1500):\n  os.mkdir('d'); os.chdir('d')"
    assert sandbox.run(deep, wall_seconds=5).reason in ("ok", "error", "killed")
    closed = (
        "import os\nos.makedirs('a/b'); open('a/b/c', 'w'); os.chmod('a/b', 0); os.chmod('a', 0)"
    )
    assert sandbox.run(closed).reason == "ok"
    assert sandbox.run("import os; os.symlink('/', 'link'); os.mkfifo('fifo')").reason == "ok"
    assert sandbox.run("import os; os.listdir('.')").value == "[]"
    assert os.path.isdir("/usr")


@pytest.mark.slow
def test_a_thousand_calls_leave_nothing(sandbox):
    before = Surroundings()
    for number in range(1000):
        assert sandbox.run(f"open('f', 'w').write('x')\n{number} + 1").value == str(number + 1)
    assert not [
        thing for thing in before.difference(Surroundings()) if not replaced(thing, sandbox)
    ]
