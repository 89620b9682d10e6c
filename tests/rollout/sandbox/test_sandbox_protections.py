"""The protections of each isolation for a trainer without rights: the claims of sandbox.py and
of docs/tools.md, tried out on files, shared memory and a process of the same user.
"""

from __future__ import annotations

import functools
import json

import pytest

from tests.rollout.sandbox import unprivileged

# isolation, whether namespaces are used, the newest ABI of Landlock
BUBBLEWRAP = ("bubblewrap", True, 99)
LIMITS = ("limits", True, 99)
WITHOUT_LANDLOCK = ("limits", True, 0)
CONTAINER = ("limits", False, 99)  # that forbids user namespaces
BEFORE_6_12 = ("limits", False, 5)
BEFORE_6_2 = ("limits", False, 2)
NOTHING = ("limits", False, 0)
KINDS = (
    *(BUBBLEWRAP, LIMITS, WITHOUT_LANDLOCK, CONTAINER),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in (BEFORE_6_12, BEFORE_6_2)),
    NOTHING,
)
PROCESS = {"signals", "stopped", "nice", "policy", "io priority", "processors", "limits"}


@functools.cache
def found(isolation, namespaces, landlock):
    if unprivileged.refusal():
        pytest.skip(unprivileged.refusal())
    done = unprivileged.run(unprivileged.SCRIPT, isolation, str(namespaces), str(landlock))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    if "refused" in report:
        pytest.skip(report["refused"])
    return report


def needs(report, *protections):
    """Skip where this kernel lacks what stops it."""
    lacking = set(protections) - set(report["held"])
    if lacking:
        pytest.skip(f"no {', '.join(sorted(lacking))} here: a gap that is documented")


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_process_of_the_trainers_user_is_reached(kind):
    report = found(*kind)
    needs(report, "calls")
    assert not [change for change in report["changed"] if change.partition(":")[0] in PROCESS]


@pytest.mark.parametrize("kind", KINDS[:-1], ids=str)
def test_no_file_of_the_trainers_user_is_changed(kind):
    report = found(*kind)
    needs(report, "attributes", "mounts" if kind == WITHOUT_LANDLOCK else "files")
    assert not report["changed"]


@pytest.mark.parametrize("kind", KINDS[:-1], ids=str)
def test_no_secret_is_read(kind):
    report = found(*kind)
    if kind == WITHOUT_LANDLOCK:
        needs(report, "mounts")
        assert report["read"] == ["of-run"], "the shared memory is its own"
        assert "every file that you can read (Landlock" in " ".join(report["missing"])
    else:
        needs(report, "files")
        assert not report["read"]


END_THE_GUARD = """
import json, sys
from megatron_stare.config import SandboxConfig
from megatron_stare.rollout.sandbox.sandbox import Sandbox
config = SandboxConfig(isolation=sys.argv[1], warm_workers=1, max_concurrency=1)
with Sandbox(config, landlock=5) as sandbox:
    code = "import os, time\\nos.kill(1, {})\\ntime.sleep(0.5)\\nprint('here')"
    results = [sandbox.run(code.format(number)) for number in (2, 15, 1, 10)]
    code = "import os\\ntry: os.kill(os.getpid(), 2)\\nexcept KeyboardInterrupt: print('own')"
    own = sandbox.run(code)
    print(json.dumps([one.lost for one in results] + [own.stdout]), "processes" in sandbox.held)
"""


@pytest.mark.parametrize("isolation", ["bubblewrap", "limits"])
def test_no_signal_ends_the_guard_before_linux_6_12(isolation):
    """It is process 1, of the code's own user; Landlock without its scope of signals lets them."""
    if unprivileged.refusal():
        pytest.skip(unprivileged.refusal())
    done = unprivileged.run("-c", END_THE_GUARD, isolation)
    if not done.stdout or "False" in done.stdout:
        pytest.skip(f"isolation={isolation} has no process namespace here: {done.stderr[-200:]}")
    assert json.loads(done.stdout.removesuffix("True\n")) == [False] * 4 + ["own\n"]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_program_may_change_its_own_files_and_processes(kind):
    report = found(*kind)
    assert report["own"] == "3"
    assert report["next"] == "[]"
    own_view = {"mounts", "user"} & set(report["held"])
    assert report["attributes of its own"] == ("ok" if own_view else "error")


def test_without_isolation_files_are_reachable_and_the_message_says_so():
    report = found(*NOTHING)
    assert not {"files", "mounts", "user"} & set(report["held"])
    assert report["read"] == ["of-run", "of-memory"]
    assert "every file that you can read or write" in " ".join(report["missing"])
    if "calls" in report["held"]:
        attributes = ("chmod", "chown", "utime", "xattr", "call(")
        assert not [change for change in report["changed"] if any(a in change for a in attributes)]
