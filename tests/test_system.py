"""Files that appear whole, under a full disk and a kill; children that end with their parent."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_stare import system
from megatron_stare.recipes import smollm2_135m
from tests.paths import ROOT


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`program` in a Python process of its own, which may write files of 1 MiB."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("content", ["a line\n", b"\x00\xff", memoryview(b"view"), ""])
@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_by_the_content(content, durable, tmp_path):
    path = tmp_path / "file"
    for _ in range(2):
        system.atomic_write(path, content, durable=durable)
        expected = content.encode() if isinstance(content, str) else bytes(content)
        assert path.read_bytes() == expected
    assert list(tmp_path.iterdir()) == [path]


def test_text_is_utf_8_in_any_locale(tmp_path):
    program = "import sys; from megatron_stare.system import *; from pathlib import Path\n"
    program += "atomic_write(Path(sys.argv[1]), '\\u00e9')"
    command = [sys.executable, "-X", "utf8=0", "-c", program, str(tmp_path / "file")]
    subprocess.run(command, cwd=ROOT, env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}, check=True)
    assert (tmp_path / "file").read_bytes() == b"\xc3\xa9"


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "usual").write_text("")
    system.atomic_write(tmp_path / "file", "")
    usual, new = ((tmp_path / name).stat().st_mode for name in ("usual", "file"))
    assert stat.S_IMODE(new) == stat.S_IMODE(usual)


@pytest.mark.parametrize("durable", [False, True])
def test_a_full_disk_leaves_the_old_file_and_no_temporary_one(durable, tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    program = "import sys; from megatron_stare.system import *; from pathlib import Path\n"
    program += f"atomic_write(Path(sys.argv[1]), bytes(2 << 20), durable={durable})"
    ended = run(program, path)
    assert ended.returncode == 1
    assert "OSError: [Errno 27] File too large" in ended.stderr
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_exception_in_the_block_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write() -> None:
        with system.atomic_file(path) as file:
            file.write("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_directory_is_the_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        system.atomic_write(tmp_path / "missing" / "file", "")


def test_a_kill_between_write_and_rename_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    ended = run(
        "import os, signal, sys; from megatron_stare.system import *; from pathlib import Path\n"
        "with atomic_file(Path(sys.argv[1])) as file:\n"
        "    file.write('new')\n"
        "    file.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n",
        path,
    )
    assert ended.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    system.atomic_write(path, "newer")
    assert path.read_text() == "newer"


def test_readers_see_whole_files_while_two_processes_write(tmp_path):
    path = tmp_path / "file"
    path.write_text("a" * 100_000)
    program = (
        "import sys; from megatron_stare.system import *; from pathlib import Path\n"
        "for _ in range(300): atomic_write(Path(sys.argv[1]), sys.argv[2] * 100_000)\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, path, letter], cwd=ROOT) for letter in "bc"
    ]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        text = path.read_text()
        assert len(text) == 100_000
        seen.add(text[0])
        assert set(text) == {text[0]}
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen & {"b", "c"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_appears_whole(tmp_path):
    target = tmp_path / "target"
    with system.atomic_directory(target) as directory:
        (directory / "file").write_text("content")
        assert not target.exists()
    assert (target / "file").read_text() == "content"
    assert list(tmp_path.iterdir()) == [target]


def test_a_directory_that_is_not_empty_is_not_replaced(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").touch()
    with pytest.raises(OSError, match="not empty"), system.atomic_directory(target):
        pass
    assert list(tmp_path.rglob("*")) == [target, target / "kept"]


def test_a_killed_attempts_directory_is_no_part_of_the_next(tmp_path):
    target = tmp_path / "target"
    ended = run(
        "import os, signal, sys; from megatron_stare.system import *; from pathlib import Path\n"
        "with atomic_directory(Path(sys.argv[1])) as directory:\n"
        "    (directory / 'partial').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n",
        target,
    )
    assert ended.returncode == -signal.SIGKILL
    assert not target.exists()

    def fill() -> None:
        with system.atomic_directory(target) as directory:
            assert not list(directory.iterdir())
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fill()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [0, 1, (1 << 18) - 1, 1 << 18, (1 << 22) + 3])
def test_digests_are_sha256(size, tmp_path):
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    expected = hashlib.sha256(content).hexdigest()
    assert system.digest(content) == expected
    assert system.digest(memoryview(content), 12) == expected[:12]
    assert system.file_digest(tmp_path / "file") == expected


def test_a_texts_digest_is_that_of_its_utf_8():
    assert system.digest("\u00e9") == hashlib.sha256(b"\xc3\xa9").hexdigest()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_gets_the_signal_when_its_parent_is_killed(sent, tmp_path):
    note = tmp_path / "note"
    child = (
        "import signal, sys, time; from pathlib import Path\n"
        "def end(*_): Path(sys.argv[1]).write_text('terminated'); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end); print('ready', flush=True); time.sleep(60)\n"
    )
    parent = (
        "import functools, subprocess, sys, time\n"
        "from megatron_stare.system import end_with_parent\n"
        f"before = functools.partial(end_with_parent, {int(sent)})\n"
        "child = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], preexec_fn=before)\n"
        "print(child.pid, flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", parent, child, str(note)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        words = {started.stdout.readline().strip(), started.stdout.readline().strip()}
        (pid,) = words - {"ready"}
        started.kill()
        until(functools.partial(has_ended, int(pid)))
    assert note.exists() == (sent == signal.SIGTERM)


def until(true, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or dead and not yet reaped by its new parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_driver_that_torch_cannot_use_is_named_with_the_one_that_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (system.CPU_ON_PURPOSE, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(system, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert system.nvidia_driver() == "" == system.unseen_gpus("13.0")  # no GPU, no fault
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    program.chmod(0o755)
    assert system.nvidia_driver() == "unknown"
    assert "needs driver 580 or newer" in system.unseen_gpus("13.0")
    program.write_text("#!/bin/sh\necho 550.54.15; echo 550.54.15\n")
    assert system.nvidia_driver() == "550.54.15"
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n"
    )
    assert "(version 535.129.03); its CUDA 13.0 needs driver 580" in system.unseen_gpus("13.0")
    assert "driver 525 or newer" in system.unseen_gpus("12.6")
    assert "without CUDA" in system.unseen_gpus(None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES='' hides every GPU" in system.unseen_gpus("13.0")
    monkeypatch.setenv(system.CPU_ON_PURPOSE, "1")
    assert system.unseen_gpus("13.0") == ""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch answers for x86-64 alone")
def test_fast_products_of_bf16_are_those_that_torch_has() -> None:
    assert system.multiplies_bf16() == torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize(
    ("flags", "fast"),
    [
        ("flags\t: sse2 avx2 avx512f avx512bw\n", True),
        ("Features\t: asimd bf16\n", True),
        ("flags\t: sse2 avx2 avx512f_not\n", False),
        (None, False),  # no Linux
    ],
)
def test_the_language_model_trains_in_the_number_format_that_this_cpu_is_fast_at(
    flags: str | None, fast: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "cpuinfo"
    if flags is not None:
        place.write_text(f"processor\t: 0\n{flags}")
    monkeypatch.setattr(system, "Path", lambda _: place)
    assert system.multiplies_bf16() == fast
    assert smollm2_135m().policy.dtype == ("bf16" if fast else "fp32")
