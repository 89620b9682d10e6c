"""Results of a call, in every isolation: values, errors, limits, state, concurrency, refusals."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from megatron_stare.config import Config, SandboxConfig, UserError, override
from megatron_stare.rollout.sandbox.interpreter import interpreter_places
from megatron_stare.rollout.sandbox.sandbox import Sandbox, _warn, missing
from tests.paths import ROOT
from tests.rollout.sandbox.sandboxes import (
    KINDS,
    QUICK,
    Surroundings,
    bubblewrap_refusal,
    open_kind,
)


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request):
    # Long: on a busy machine 10 s do not fill the memory that a call may have.
    with open_kind(request.param, wall_seconds=60.0) as opened:
        yield opened


@pytest.mark.parametrize(
    ("code", "reason", "value", "stdout", "stderr"),
    [
        ("1 + 1", "ok", "2", "", ""),
        ("x = 3", "ok", None, "", ""),
        ("print('a'); None", "ok", None, "a\n", ""),
        ("x = 'q'\nx * 2", "ok", "'qq'", "", ""),
        ("import fractions, sqlite3\nfractions.Fraction(2, 4)", "ok", "Fraction(1, 2)", "", ""),
        ("import sys; print('e', file=sys.stderr); sys.exit(0)", "ok", None, "", "e\n"),
        ("raise SystemExit(3)", "error", None, "", "exit status 3\n"),
        ("raise SystemExit('words')", "error", None, "", "words\n"),
        (
            "print('before')\n1/0",
            "error",
            None,
            "before\n",
            "ZeroDivisionError: division by zero\n",
        ),
        ("def f(:\n  pass", "error", None, "", "SyntaxError: invalid syntax\n"),
        ("", "ok", None, "", ""),
        ("\0", "error", None, "", "SyntaxError: source code string cannot contain null bytes\n"),
        ("print(input() + input())", "ok", None, "12\n", ""),
        ("if __name__ == '__main__': print('main')", "ok", None, "main\n", ""),
        (
            "import threading\nthreading.Thread(target=print, args=('late',)).start()",
            "ok",
            None,
            "late\n",
            "",
        ),
        (
            "import os; sorted(k for k in os.environ if 'TOKEN' in k or 'KEY' in k)",
            "ok",
            "[]",
            "",
            "",
        ),
        ("print('\\ud800')", "ok", None, "\\ud800\n", ""),
    ],
)
def test_a_call_gives_output_value_and_reason(sandbox, code, reason, value, stdout, stderr):
    result = sandbox.run(code, stdin="1\n2\n")
    assert (result.reason, result.value, result.stdout) == (reason, value, stdout)
    assert result.stderr.endswith(stderr)
    assert bool(result.stderr) == bool(stderr)
    assert result.seconds > 0


def test_tracebacks_show_the_code_and_nothing_of_ours(sandbox):
    error = sandbox.run("def f():\n    return {}['missing']\nf()").stderr
    assert "return {}['missing']" in error
    assert "KeyError: 'missing'" in error
    assert "sandbox" not in error


def test_calls_share_nothing(sandbox):
    sandbox.run("leak = 1\nopen('leak', 'w').write('x')\nimport builtins; builtins.leak = 1")
    assert sandbox.run(
        "import os\n'leak' in globals(), hasattr(__builtins__, 'leak'), os.listdir('.')"
    ).value == ("(False, False, [])")


@pytest.mark.parametrize(
    ("code", "reason", "words"),
    [
        ("while True: pass", "timeout", "not done after 0.5 s"),
        ("import time\nwhile True: time.sleep(1)", "timeout", "not done after 0.5 s"),
        ("x = bytearray(1 << 31)", "memory", "out of memory"),
        ("x = []\nwhile True: x.append(' ' * 1000000)", "memory", "out of memory"),
        ("import ctypes; ctypes.string_at(0)", "killed", "SIGSEGV"),
        ("import os; os._exit(3)", "killed", "status 3"),
        ("while True: print('x' * 1000)", "output limit", "65536 bytes"),
        ("def f(): f()\nf()", "error", ""),
        ("x = (1).__class__\nx('1' * 100000)", "error", ""),
    ],
)
def test_limits_end_a_call_and_the_next_one_works(sandbox, code, reason, words):
    result = sandbox.run(
        "print('started', flush=True)\n" + code, wall_seconds=0.5 if "timeout" in reason else None
    )
    assert result.reason == reason
    assert words in result.detail
    assert result.stdout.startswith("started\n")
    assert words in result.message()
    assert sandbox.run("'next'").value == "'next'"


def test_processor_time_is_limited_apart_from_wall_time():
    with open_kind("limits", cpu_seconds=0.2) as sandbox:
        assert (
            sandbox.run("while True: pass").detail == "more than 0.2 s of processor time were used"
        )
        session = sandbox.session()
        assert (
            session.run("while True: pass").detail == "more than 0.2 s of processor time were used"
        )
        session.close()


def test_long_output_and_long_values_are_cut_with_a_mark(sandbox):
    printed = sandbox.run("print('x' * 70000)")
    assert printed.reason == "output limit"
    assert printed.stdout == "x" * 65536 + "\n[output cut after 65536 bytes]"
    shown = sandbox.run("'x' * 70000")
    assert shown.reason == "ok"
    assert shown.value == "'" + "x" * 65535 + "\n[output cut after 65536 bytes]"


def test_a_session_keeps_variables_and_files_and_survives_errors(sandbox):
    session = sandbox.session()
    session.run("import math\nx = 41\nopen('kept', 'w').write('1')")
    assert session.run("1/0").reason == "error"
    assert session.run("x += 1\nx, open('kept').read(), math.pi > 3").value == "(42, '1', True)"
    assert session.run("input()", stdin="second").value == "'second'"
    lost = session.run("import os; os._exit(1)")
    assert (lost.reason, lost.alive) == ("killed", False)
    assert "NameError" in session.run("x").stderr
    session.close()
    assert sandbox.run("import os; os.listdir('.')").value == "[]"


def test_a_session_runs_no_code_between_its_calls(sandbox):
    session = sandbox.session()
    session.run(
        "import threading, time\nlongest = 0.0\n"
        "def tick():\n  global longest\n  last = time.monotonic()\n  while True:\n    "
        "time.sleep(0.001)\n    now = time.monotonic()\n    longest, last = max(longest, now - "
        "last), now\nthreading.Thread(target=tick, daemon=True).start()\nwhile not longest: "
        "time.sleep(0.001)"
    )
    threading.Event().wait(0.5)
    assert (
        float(session.run("time.sleep(0.3)\nlongest").value) >= 0.45
    )  # a pause without a tick; a thread may run on for a moment after it was stopped
    session.close()


def test_sessions_do_not_see_one_another(sandbox):
    one, two = sandbox.session(), sandbox.session()
    one.run("x = 1\nopen('mine', 'w').write('1')")
    assert "NameError" in two.run("x").stderr
    assert two.run("import os; os.listdir('.')").value == "[]"
    one.close()
    two.close()


def test_many_callers_at_once_each_get_their_own_answer(sandbox):
    async def all_of_them():
        return await asyncio.gather(
            *(sandbox.run_async(f"print({number})") for number in range(20))
        )

    assert [result.stdout for result in asyncio.run(all_of_them())] == [
        f"{number}\n" for number in range(20)
    ]


def test_an_interpreter_that_dies_while_idle_is_replaced():
    with open_kind("limits") as sandbox:
        sandbox._idle[0]._process.kill()
        sandbox._idle[0]._process.wait()
        assert sandbox.run("1 + 1").value == "2"


def test_cold_calls_and_preloaded_modules():
    with open_kind("limits", warm_workers=0, preload=["decimal"]) as sandbox:
        assert sandbox.run("import sys; 'decimal' in sys.modules").value == "True"
        assert not sandbox._idle


def test_numpy_and_sympy_run_under_the_default_limits():
    settings = SandboxConfig(isolation="limits", warm_workers=1, preload=["numpy", "sympy"])
    with Sandbox(settings) as sandbox:
        assert (
            sandbox.run("import numpy\nint(numpy.linalg.det(numpy.diag([2.0, 3.0])).round())").value
            == "6"
        )
        assert (
            sandbox.run("from sympy import *\nx = symbols('x')\nsolve(x**2 - 4, x)").value
            == "[-2, 2]"
        )


def test_closing_leaves_no_process_and_no_file():
    before = Surroundings()
    for kind in KINDS:
        if kind != "bubblewrap" or not bubblewrap_refusal():
            with open_kind(kind) as sandbox:
                session = sandbox.session()
                session.run("import subprocess, sys; subprocess.Popen(['/bin/sleep', '1000'])")
                sandbox.run("1")
                session.close()
    assert not before.difference(Surroundings())


def test_a_session_that_is_never_closed_ends_with_the_sandbox():
    before = Surroundings()
    opened = open_kind("limits without namespaces")
    session = opened.session()
    session.run("import subprocess; subprocess.Popen(['/bin/sleep', '1000'])")
    opened.close()
    assert not before.difference(Surroundings())


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_trainer_leaves_nothing(kind):
    open_kind(kind).close()
    before = Surroundings()
    code = (
        "import os, sys\nfrom tests.rollout.sandbox.sandboxes import open_kind\n"
        f"sandbox = open_kind({kind!r})\nsession = sandbox.session()\n"
        'session.run(\'import subprocess; subprocess.Popen(["/bin/sleep", "1000"])\')\n'
        "print('ready', flush=True)\nsession.run('while True: pass')\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout.readline() == "ready\n"
    time.sleep(0.2)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    deadline = time.monotonic() + 10
    while before.difference(Surroundings()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not before.difference(Surroundings())


def test_bubblewrap_that_does_not_run_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError, match=r"sandbox\.isolation=bubblewrap does not work here: bwrap is not installed"
    ):
        Sandbox(SandboxConfig(isolation="bubblewrap"))
    (tmp_path / "bwrap").write_text(
        "#!/bin/sh\necho 'No permissions to create a new namespace' >&2\nexit 1\n"
    )
    (tmp_path / "bwrap").chmod(0o755)
    with pytest.raises(
        UserError,
        match=r"No permissions to create a new namespace; install it .* sandbox.isolation=limits",
    ):
        Sandbox(SandboxConfig(isolation="bubblewrap"))


def test_auto_is_bubblewrap_and_for_root_nothing_weaker_unless_asked_by_name(tmp_path, monkeypatch):
    if not bubblewrap_refusal():
        with Sandbox(SandboxConfig(**QUICK)) as sandbox:
            assert sandbox.isolation == "bubblewrap"
    interpreter_places(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    if os.geteuid() == 0:
        with pytest.raises(
            UserError, match=r"apt-get install bubblewrap.*isolation=limits by name.*another user"
        ):
            Sandbox(SandboxConfig(**QUICK))
    else:
        with Sandbox(SandboxConfig(**QUICK)) as sandbox:
            assert sandbox.isolation == "limits"
    with Sandbox(SandboxConfig(isolation="limits", **QUICK)) as sandbox:
        assert sandbox.isolation == "limits" and sandbox.run("1").value == "1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"preload": ["no_such_module"]},
            r"sandbox.preload=\['no_such_module'\]: cannot import 'no_such_module'",
        ),
        ({"python": "/no/such/python"}, "sandbox.python='/no/such/python' does not run"),
    ],
)
def test_wrong_settings_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        Sandbox(SandboxConfig(isolation="limits", **changes))


@pytest.mark.parametrize(
    "item",
    [
        "sandbox.isolation=jail",
        "sandbox.wall_seconds=0",
        "sandbox.url=host:80",
        "sandbox.memory_mib=1",
    ],
)
def test_values_out_of_range_are_refused(item):
    with pytest.raises(UserError, match=item.split("=")[0]):
        override(Config(), [item])


def test_state_on_a_remote_sandbox_is_refused():
    with pytest.raises(UserError, match=r"sandbox\.stateful=true"):
        override(Config(), ["sandbox.url=http://host:1", "sandbox.stateful=true"])


def test_a_missing_protection_is_reported_once(caplog):
    _warn.cache_clear()
    with (
        caplog.at_level(logging.WARNING),
        open_kind("limits without namespaces"),
        open_kind("limits without namespaces"),
    ):
        pass
    assert (
        len([record for record in caplog.records if "does not stop everything" in record.message])
        == 1
    )
    assert len(missing(frozenset())) == 7
    assert not missing(
        frozenset(
            {"processes", "network", "disk", "user", "files", "signals", "calls", "attributes"}
        )
    )
