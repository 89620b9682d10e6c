"""The start of servers: Python, command, and version of NCCL."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
import torch

from megatron_stare.config import EngineError, SGLangConfig, UserError
from megatron_stare.debug.doctor import nccl_finding
from megatron_stare.rollout.sglang import process
from megatron_stare.rollout.sglang.process import (
    ServerProcess,
    free_port,
    nccl_version,
    own_nccl_version,
    server_command,
    server_python,
)
from megatron_stare.sync.broadcast import other_nccl


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PYTHON", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def program(directory: Path, prints: str) -> str:
    """A `python` that answers whatever it is asked with this line."""
    place = directory / "python"
    place.write_text(f"#!/bin/sh\necho '{prints}'\n")
    place.chmod(0o755)
    return str(place)


@pytest.mark.usefixtures("on_gpu")
def test_the_trainers_python_starts_servers_only_where_it_has_sglang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # a checkout without .venv-sglang-gpu, and later with it
    monkeypatch.setattr(process, "CPU_SERVER", tmp_path / "tools" / "sglang_cpu" / "serve")
    with pytest.raises(UserError, match=r"has no SGLang .* `make sglang-gpu` builds"):
        server_command(SGLangConfig())
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert server_command(SGLangConfig())[0] == sys.executable
    built = tmp_path / ".venv-sglang-gpu" / "bin"
    built.mkdir(parents=True)
    python = program(built, "")
    assert server_command(SGLangConfig())[0] == python


@pytest.mark.usefixtures("on_gpu")
def test_another_environments_python_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = program(tmp_path, "")
    named = SGLangConfig(python=other)
    assert server_command(named) == [other, "-m", "sglang.launch_server"]
    assert server_command(SGLangConfig(python=other, command="srun serve"))[0] == "srun"
    with pytest.raises(UserError, match=r"sglang\.python=/no/python is not a program"):
        server_command(SGLangConfig(python="/no/python"))
    monkeypatch.setenv("SGLANG_PYTHON", other)
    assert server_python(SGLangConfig()) == other


def test_another_version_of_nccl_is_reported(tmp_path: Path) -> None:
    """NCCL refuses to join processes of two versions, which is known before it is tried."""
    ours = torch.cuda.nccl.version()
    (tmp_path / "same").mkdir()
    same = program(tmp_path / "same", " ".join(map(str, own_nccl_version())))
    other, silent = program(tmp_path, "2 0 1"), SGLangConfig(command="/bin/false")
    assert nccl_version([other]) == (2, 0, 1)
    written, own = (".".join(map(str, version)) for version in ((2, 0, 1), ours))
    said = other_nccl(SGLangConfig(command=f"{other} -m sglang.launch_server"))
    assert said == f"the trainer has NCCL {own}, the servers' Python has {written}"
    assert other_nccl(SGLangConfig(command=f"{same} -m sglang.launch_server")) == ""
    assert other_nccl(silent) == "", "what cannot be asked is tried"
    found = nccl_finding(ours, (2, 0, 1))
    assert found.level == "WARN" and "gloo" in found.found and "nvidia-nccl" in found.remedy
    assert nccl_finding(ours, ours).level == "OK"


def test_a_server_does_not_inherit_the_trainers_ranks_and_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A colocated server's memory saver refuses expandable segments."""
    for name in ("RANK", "MASTER_ADDR", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTORCH_OTHER", "1")
    found = process._environment()
    assert "PYTORCH_OTHER" in found
    assert not {"RANK", "MASTER_ADDR", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(found)


def test_of_a_large_log_the_end_alone_is_read(tmp_path: Path) -> None:
    """A log of weeks has gigabytes; this one is a hole of a terabyte."""
    server = ServerProcess(["true"], "model", [], tmp_path / "log.txt", "127.0.0.1")
    server.process.wait()
    assert server.last_words() == "it printed nothing"
    with server.log.open("r+b") as log:
        log.truncate(1 << 40)
        log.seek(0, 2)
        log.write(b"\nloading\r  out of memory \n\n")
    assert server.last_words() == "out of memory"


def test_a_killed_server_that_does_not_end_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that a driver holds: nothing waits for it without an end."""
    monkeypatch.setattr(process, "KILLED_SECONDS", 0.01)
    server = ServerProcess(["sh", "-c", "sleep 1000"], "", [], tmp_path / "log.txt", "127.0.0.1")
    with monkeypatch.context() as unkillable:
        unkillable.setattr(process.os, "killpg", lambda *_: None)
        with pytest.raises(EngineError, match=rf"process {server.process.pid} .* dmesg"):
            server.stop(at_once=True)
    monkeypatch.undo()
    server.stop(at_once=True)
    assert not server.alive()


def test_a_free_port_leaves_room_for_the_grpc_port_that_a_server_derives_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = [65535, 55536, 55535]

    class Probe(contextlib.ExitStack):
        def bind(self, address: tuple[str, int]) -> None:
            assert address == ("127.0.0.1", 0)

        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", free.pop(0)

    monkeypatch.setattr(process.socket, "socket", Probe)
    assert free_port() == 55535
