"""Remains of a program harm only itself: the next call, of any caller, gets a working sandbox. Only
a machine on which no interpreter starts is an error, and that one is raised.
"""

from __future__ import annotations

import os
import resource
import subprocess

import pytest

from megatron_stare.rollout.sandbox import interpreter
from megatron_stare.rollout.sandbox.call_monitor import empty_directory
from megatron_stare.rollout.sandbox.interpreter import SandboxError
from tests.rollout.sandbox import unprivileged
from tests.rollout.sandbox.sandboxes import KINDS, Surroundings, open_kind

CLOSED = "import os\nos.makedirs('a/b'); open('a/b/c', 'w')\n"
POISON = [
    "import os; os.chmod('.', 0)",
    CLOSED + "os.chmod('a/b', 0); os.chmod('a', 0); os.chmod('.', 0)",
    "import os; os.mkdir('a', 0o300); open('a/hidden', 'w')",
    "import os, signal; os.kill(os.getppid(), signal.SIGTERM)",
    "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "import os; os.kill(os.getpid(), 40)",
]


@pytest.mark.parametrize("kind", KINDS)
def test_remains_of_a_program_are_not_faults_of_the_next_call(kind):
    with open_kind(kind, warm_workers=2) as sandbox:
        for code in POISON:
            for _ in range(2):
                sandbox.run(code)
            assert sandbox.run("6 * 7").value == "42", code
            session = sandbox.session()
            session.run(code)
            session.close()
            fresh = sandbox.session()
            assert fresh.run("6 * 7").value == "42", code
            fresh.close()


@pytest.mark.parametrize("kind", KINDS)
def test_interpreters_that_died_while_idle_are_not_faults_of_a_call(kind):
    with open_kind(kind, warm_workers=2) as sandbox:
        sandbox.run("1")
        for worker in list(sandbox._idle):  # others may still come
            worker._process.kill()
            worker._process.wait()
        session = sandbox.session()
        assert session.run("6 * 7").value == "42"
        session.close()


def test_a_guard_that_gives_up_costs_only_its_interpreter(tmp_path):
    """A guard that gives up says so after its answer, when no request waits."""
    with open_kind("limits without namespaces", warm_workers=1) as sandbox:
        first = sandbox._idle[0]
        sandbox.run("import os; 1")
        first.prepare()
        first._ready = False
        first._unread = b'{"error": "the runner did not start: disk full"}\n'
        assert sandbox.run("6 * 7").value == "42"
        assert first not in sandbox._idle


def test_a_signal_without_a_name_is_reported_by_number():
    with open_kind("limits") as sandbox:
        assert sandbox.run("import os; os.kill(os.getpid(), 40)").detail.endswith("by signal 40")


def test_no_interpreter_at_all_is_an_error_of_the_machine(monkeypatch):
    with open_kind("limits", warm_workers=0, max_attempts=3) as sandbox:
        started, before = [], Surroundings()

        def refuse(*arguments, **keywords):
            started.append(arguments)
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(interpreter.subprocess, "Popen", refuse)
        with pytest.raises(SandboxError, match=r"could be started, 3 times: .*Resource"):
            sandbox.run("1")
        assert len(started) == 3
        assert not before.difference(Surroundings())
        monkeypatch.undo()
        assert sandbox.run("1").value == "1"


@pytest.mark.parametrize("kind", KINDS)
def test_files_without_bytes_are_bounded_in_number(kind):
    code = (
        "n = 0\ntry:\n  while True: open(str(n), 'w').close(); n += 1\n"
        "except OSError as error: print(error)\nimport time; time.sleep(0.5); n"
    )
    with open_kind(kind, disk_mib=1, memory_mib=256, file_mib=1) as sandbox:
        result = sandbox.run(code, wall_seconds=5)
        if result.reason == "ok":
            assert int(result.value) <= 256 and "No space left" in result.stdout
        else:
            assert (result.reason, result.detail) == ("killed", "more than 256 files were made")
        assert sandbox.run("import os; os.listdir('.')").value == "[]"


def test_unmeasurable_disk_use_counts_as_too_much():
    """As a user without rights: root sees into every directory."""
    if unprivileged.refusal():
        pytest.skip(unprivileged.refusal())
    code = (
        "import os, tempfile\nfrom megatron_stare.rollout.sandbox.call_monitor import disk_excess, "
        "empty_directory\ntop = tempfile.mkdtemp()\nos.mkdir(top + '/hidden', 0o300)\n"
        "open(top + '/hidden/file', 'w').close()\nprint(disk_excess(top, 'walk', 1 << 20, 100))\n"
        "empty_directory(top)\nprint(os.listdir(top))\nos.rmdir(top)"
    )
    done = unprivileged.run("-c", code)
    assert "a directory was made that cannot be measured" in done.stdout, done.stderr
    assert done.stdout.endswith("[]\n")


def test_emptying_follows_no_link_and_opens_what_is_closed(tmp_path):
    outside, top = tmp_path / "outside", tmp_path / "top"
    outside.mkdir(0o755)
    (outside / "kept").write_text("x")
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "link").symlink_to(outside)
    (top / "link").symlink_to(outside)
    (top / "a" / "b" / "c").write_text("x")
    for place in (top / "a" / "b", top / "a", top):
        place.chmod(0)
    descriptors = len(os.listdir("/proc/self/fd"))
    empty_directory(str(top))
    assert not os.listdir(top) and (outside / "kept").exists()
    assert outside.stat().st_mode & 0o777 == 0o755
    assert len(os.listdir("/proc/self/fd")) == descriptors
    (tmp_path / "alias").symlink_to(outside)
    with pytest.raises(NotADirectoryError):
        empty_directory(str(tmp_path / "alias"))
    assert (outside / "kept").exists()


def test_a_tree_deeper_than_there_are_descriptors_is_removed(tmp_path):
    here, limits = os.getcwd(), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.chdir(tmp_path)
    try:
        for _ in range(3000):
            os.mkdir("d")
            os.chdir("d")
        few = max(map(int, os.listdir("/proc/self/fd"))) + 64  # beyond what this process holds
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
        empty_directory(str(tmp_path))
        assert not os.listdir(tmp_path)
    finally:
        os.chdir(here)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        # nothing that shutil can remove: left behind, it would stop pytest's own cleaning
        subprocess.run(["rm", "-rf", str(tmp_path)], check=True)


@pytest.mark.parametrize("value", ["'\\ud800'", "'\\udfff' * 3"])
def test_a_value_with_invalid_unicode_becomes_text(value):
    code = f"class Odd:\n  def __repr__(self): return {value}\nOdd()"
    with open_kind("limits") as sandbox:
        result = sandbox.run(code)
        assert result.reason == "ok"
        result.message().encode("utf-8")
        assert sandbox.run("len(input())", stdin="\ud800").reason == "ok"
