"""A set of attacks on every isolation: files, processes, sockets, namespaces and limits outside of
the call, and what a call leaves to the next one. attacks.jsonl has a name and code for each; code
that gets what it wants prints GAIN.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import subprocess
from pathlib import Path

import pytest

from tests.rollout.sandbox.sandboxes import KINDS, open_kind

ATTACKS = [
    json.loads(line) for line in Path(__file__).with_name("attacks.jsonl").read_text().splitlines()
]
SECRET = "TOPSECRET"


class Outside:
    """Targets that a program must neither read, change, reach nor end."""

    def __init__(self, place: Path) -> None:
        place.chmod(0o777)
        self.place, self.secret = place, place / "secret"
        self.secret.write_text(SECRET)
        self.secret.chmod(0o644)
        self.stat = self.secret.stat()
        self.victim = subprocess.Popen(["sleep", "100000"])
        stream, abstract = (socket.socket(socket.AF_UNIX) for _ in range(2))
        self.datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        for one, name in ((stream, "stream"), (self.datagram, "datagram")):
            one.bind(str(place / name))
            (place / name).chmod(0o777)
        self.abstract = f"attacked-{os.getpid()}"
        abstract.bind(f"\0{self.abstract}")
        self.listening = [stream, abstract, socket.create_server(("127.0.0.1", 0))]
        for one in self.listening[:2]:
            one.listen()
        for one in (*self.listening, self.datagram):
            one.setblocking(False)

    def code(self, attack: str) -> str:
        """The attack on this."""
        for name, value in (
            ("PLACE", self.place),
            ("VICTIM", self.victim.pid),
            ("TRAINER", os.getpid()),
            ("PORT", self.listening[2].getsockname()[1]),
            ("ABSTRACT", self.abstract),
        ):
            attack = attack.replace(f"@{name}@", str(value))
        return attack

    def harm(self) -> list[str]:
        """The damage that the attack did, one line each."""
        found = [f"{path} was made" for path in self.place.glob("escaped*")]
        for directory in ("/dev/shm", "/var/tmp"):
            found += [f"{path} was made" for path in Path(directory).glob("escaped_attack*")]
        for one in self.listening:
            with contextlib.suppress(BlockingIOError):
                one.accept()
                found.append(f"{one} was reached")
        with contextlib.suppress(BlockingIOError):
            self.datagram.recv(10)
            found.append("a datagram came")
        if self.victim.poll() is not None:
            found.append("the process outside was ended")
        now = self.secret.stat()
        fields = ("st_mode", "st_uid", "st_mtime_ns", "st_size", "st_ino")
        if any(getattr(now, name) != getattr(self.stat, name) for name in fields):
            found.append("the file outside was changed")
        return found

    def close(self) -> None:
        """Nothing remains."""
        self.victim.kill()
        self.victim.wait()
        for one in (*self.listening, self.datagram):
            one.close()


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls of x86-64")
@pytest.mark.parametrize("kind", KINDS)
def test_no_attack_earns_a_reward(kind, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SECRET_OF_TEST", "SECRETOFRUN")
    gained = []
    with (
        contextlib.closing(Outside(tmp_path_factory.mktemp("outside"))) as outside,
        open_kind(kind, wall_seconds=4.0) as sandbox,
    ):
        for name, attack in ATTACKS:
            done = sandbox.run(outside.code(attack))
            harm = outside.harm() + ["GAIN"] * ("GAIN" in done.stdout) + ["lost"] * done.lost
            if sandbox.run("6 * 7").value != "42":
                harm.append("the next call does not work")
            gained += [(name, harm)] if harm else []
    assert not gained
