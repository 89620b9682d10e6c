"""Whole files and answers, work that may fail, content hashes, children that end with their parent,
the driver, the date of prompts.

No torch and no other module of this package is imported here: verifier processes use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import fcntl
import gc
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Buffer, Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
DRIVER_FILE = Path("/proc/driver/nvidia/version")
LEAST_DRIVER = {"12": 525, "13": 580}  # by the major version of CUDA; NVIDIA's compatibility table
CPU_ON_PURPOSE = "MEGATRON_STARE_CPU"


def prompt_date(form: str) -> str:
    """The date that chat templates call strftime_now for (Llama 3.2, SmolLM3): always the one that
    Llama's write where there is no clock, so that a run has the same prompts on every day.
    """
    return datetime.date(2024, 7, 26).strftime(form)


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "w", *, durable: bool = False) -> Iterator[IO[Any]]:
    """Open a new file that replaces `path` when the block ends.

    After an exception the old file is untouched and the temporary one, which lies in the same
    directory, is removed; a killed process leaves the temporary one. `durable`: the new file
    survives a power cut.
    """
    path = Path(path)
    # The thread's id, unique on this machine: two writers of one path never share a file.
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}")
    try:
        with temporary.open(mode, encoding=None if "b" in mode else "utf-8") as stream:
            yield stream
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        sync_directory(path.parent)


def atomic_write(path: Path, content: str | Buffer, *, durable: bool = False) -> None:
    """Write a whole file as `atomic_file` does; text is encoded in UTF-8."""
    with atomic_file(path, "w" if isinstance(content, str) else "wb", durable=durable) as stream:
        stream.write(content)


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Fill a new directory that is renamed to `path` when the block ends, and removed if it fails.

    `path` must then be missing or an empty directory. What a killed process left of an earlier
    attempt is removed first, so that one process at a time may write a `path`.
    """
    path = Path(path).absolute()
    temporary = path.with_name(f".{path.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class BestEffort:
    """Runs work that a run can do without. A failure is a warning, printed once until the work
    succeeds again. `consequence` completes the warning.
    """

    def __init__(self, consequence: str, *faults: type[Exception]) -> None:
        self.consequence, self.faults = consequence, faults or (OSError,)
        self.warned = False

    def __call__(self, work: Callable[[], object]) -> bool:
        """Whether `work` succeeded. Exceptions other than `faults` are raised."""
        try:
            work()
        except self.faults as error:
            if not self.warned:
                first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                print(f"warning: {first}; {self.consequence}", file=sys.stderr, flush=True)
            self.warned = True
            return False
        self.warned = False
        return True


def json_line(row: Mapping[str, Any]) -> str:
    """A row of a .jsonl file. Text stays readable, except for half a surrogate pair, which only an
    escape can carry.
    """
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = json.dumps(row)
    return text + "\n"


def sync_directory(directory: Path) -> None:
    """Make renames and new names in a directory survive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(content: str | Buffer, digits: int = 64) -> str:
    """The first hexadecimal digits of the SHA-256 of bytes, or of a text in UTF-8."""
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:digits]


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one: connections to servers need many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def end_with_parent(sent: int = signal.SIGKILL) -> None:
    """Linux: this process gets the signal when the thread that started it ends. Elsewhere: nothing.

    For a child's first lines, or as `preexec_fn`.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(sent))


def multiplies_bf16() -> bool:
    """Whether this CPU multiplies matrices of bf16 fast: as oneDNN does it, with AVX-512 or Arm's
    bf16. Without them a product of bf16 takes torch many times as long as one of fp32.
    """
    with contextlib.suppress(OSError):
        return not {"avx512bw", "bf16"}.isdisjoint(Path("/proc/cpuinfo").read_text().split())
    return False


def nvidia_driver() -> str:
    """The version of this machine's NVIDIA driver. It is "unknown" where only nvidia-smi is present
    and gives no answer, and "" where there is neither.
    """
    with contextlib.suppress(OSError):
        version = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", DRIVER_FILE.read_text())
        return version[0] if version else "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown" if shutil.which("nvidia-smi") else ""
    version = re.match(r"\d{3}\.\d+(\.\d+)?$", said.stdout.strip().partition("\n")[0])
    return version[0] if version else "unknown"


def unseen_gpus(cuda: str | None) -> str:
    """The reason why a torch that is built for this version of CUDA sees no GPU here, with the
    remedy. The caller knows that it sees none. "" where there is no driver, or the CPU is meant.
    """
    driver = nvidia_driver()
    if not driver or os.environ.get(CPU_ON_PURPOSE) == "1":
        return ""
    cpu = f"{CPU_ON_PURPOSE}=1 runs on the CPU on purpose"
    if not cuda:
        return (
            f"torch is built without CUDA, but an NVIDIA driver is present; `make setup`, or {cpu}"
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        return (
            f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU; ask for GPUs or unset it, or {cpu}"
        )
    least = LEAST_DRIVER.get(cuda.partition(".")[0], max(LEAST_DRIVER.values()))
    return (
        f"torch sees no GPU although a driver is present (version {driver}); its CUDA {cuda} needs "
        f"driver {least} or newer and a working nvidia-smi; update the driver, or {cpu}"
    )


def try_lock(file: IO[Any]) -> bool:
    """Lock an open file until it is closed; False if another process holds it. A file system
    without flock (Lustre mounted so) cannot say: the lock counts as taken, with a warning.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        print(
            f"{file.name}: the file system has no locks ({error.strerror}), so a second process "
            "that works there is not noticed; mount it with flock",
            file=sys.stderr,
        )
    return True


def return_memory() -> None:
    """Give unused memory of this process back to the system: of objects in cycles, and, with
    glibc, of freed blocks that it keeps for later.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
