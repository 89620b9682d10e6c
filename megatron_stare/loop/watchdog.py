"""Ends a run that hangs, within run.hang_timeout, and says where every rank was.

A thread of each rank writes the rank's beat (heartbeat.py) into run.dir/ranks, watches the next
rank's, and declares a hang

    when no rank has moved for 0.8 run.hang_timeout, or
    when the next rank has been silent for as long: stopped, killed, its host gone, or held in a
    call that does not give up Python's interpreter lock.

The first rank writes the report (who is to blame, and every rank's place, collective and Python
stack); every rank then leaves with exit code `HUNG`, so that the run's
last checkpoint stands and a launcher knows that the same command continues it. A rank whose own
thread cannot run any more is ended by a timer in C (faulthandler), its stack on stderr.

What is compared are changes that this rank has seen on its own clock: neither clocks that differ
between hosts nor a machine that slept make a rank silent.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_stare.config import RunConfig
from megatron_stare.reporting import heartbeat
from megatron_stare.reporting.heartbeat import Beat, Motion, read_beat
from megatron_stare.system import digest

HUNG = 75  # EX_TEMPFAIL: try again
RANKS = "ranks"  # below run.dir
_BEATS, _SHORTEST, _LONGEST = 20, 0.05, 15.0  # in run.hang_timeout; seconds
_PATIENCE = 0.8  # of run.hang_timeout, for what a rank may take without moving
_DUMP_SECONDS = 0.5


class Watchdog:
    """While entered, this process is watched. run.hang_timeout=0: it is not."""

    def __init__(self, config: RunConfig) -> None:
        self.timeout = config.hang_timeout
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.directory = Path(config.dir) / RANKS
        self.interval = min(max(self.timeout / _BEATS, _SHORTEST), _LONGEST)
        self.attempt = _attempt() if self.world_size > 1 else uuid.uuid4().hex[:8]
        self.report_file = self.directory / f"hang_{self.attempt}.txt"
        self._next = _Neighbour(self._file((self.rank + 1) % self.world_size), self.attempt)
        self._motion = Motion()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._ended = "ended"

    def __enter__(self) -> Watchdog:
        if self.timeout and self._prepare():
            self._beat()
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread.is_alive():
            self._left.set()
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()
            self._beat(self._ended)

    @contextmanager
    def naming_failures(self) -> Iterator[None]:
        """A context in which the rank that fails first says so at once, before it leaves the others
        alone, whose own failures follow from that.
        """
        try:
            yield
        except Exception as error:
            self._ended = f"failed: {type(error).__name__}"
            if self.world_size > 1:
                where = f"rank {self.rank} on {socket.gethostname()} ({heartbeat.place()})"
                said = str(error).strip().splitlines() or [""]
                line = f"failed: {where} at {time.time():.3f}: {type(error).__name__}: {said[0]}"
                print(line, file=sys.stderr, flush=True)
            raise

    def _prepare(self) -> bool:
        """False where run.dir cannot be written: the claim of the directory reports that."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            # of an earlier start: torchrun gives every start of a command the same names
            with suppress(FileNotFoundError):
                self.report_file.replace(self.report_file.with_suffix(".old"))
            # open for good: the handler writes to its number
            stacks = os.open(self._stacks(self.rank), os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
        except OSError:
            return False
        # in C, inside of whatever call the rank is in
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        return True

    def _file(self, rank: int) -> Path:
        return self.directory / f"rank_{rank:05d}.json"

    def _stacks(self, rank: int) -> Path:
        return self._file(rank).with_suffix(".stacks")

    def _watch(self) -> None:
        patience = _PATIENCE * self.timeout
        while not self._left.wait(self.interval):
            beat = self._beat()
            silent = self._next.silent() if self.world_size > 1 else 0.0
            if os.path.exists(self.report_file):  # no error where the disk does not answer
                self._leave()
            elif silent > patience:
                self._declare(silent)
            elif beat.still > patience and self._all_stand_still(patience):
                self._declare(0.0)

    def _beat(self, ended: str = "") -> Beat:
        if not ended:
            faulthandler.dump_traceback_later(self.timeout, exit=True, file=2)
        still, stacks = self._motion.look()
        place, host, pid = heartbeat.place(), socket.gethostname(), os.getpid()
        beat = Beat(self.attempt, self.rank, host, pid, place, still, stacks, ended)
        beat.write(self._file(self.rank))
        return beat

    def _beats(self) -> list[Beat | None]:
        return [read_beat(self._file(rank), self.attempt) for rank in range(self.world_size)]

    def _all_stand_still(self, patience: float) -> bool:
        """Read in rank order up to the first that moves: mostly rank 0, for which all wait."""
        for rank in range(self.world_size):
            beat = read_beat(self._file(rank), self.attempt)
            if beat is not None and not beat.ended and beat.still <= patience - self.interval:
                return False
        return True

    def _declare(self, silent: float) -> None:
        """Write the report, unless another rank has begun to, and leave."""
        try:
            handle = os.open(self.report_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            self._leave()
        except OSError:
            handle = 2
        beats = self._beats()
        suspect = Silent(self._next.rank, silent) if silent else None
        if suspect is not None:
            suspect = suspect.examined(
                beats[suspect.rank], self._stacks(suspect.rank), _DUMP_SECONDS
            )
        text = report(beats, self.timeout, suspect)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        if handle != 2:
            print(f"{text}written: {self.report_file}", file=sys.stderr, flush=True)
        os._exit(HUNG)

    def _leave(self) -> None:
        deadline = time.monotonic() + self.timeout - _PATIENCE * self.timeout
        while time.monotonic() < deadline:
            with suppress(OSError):
                if self.report_file.stat().st_size:
                    break
            time.sleep(self.interval / 4)
        print(f"the run hangs: see {self.report_file}", file=sys.stderr, flush=True)
        os._exit(HUNG)


class _Neighbour:
    """The rank that this one watches, by the times of its file."""

    def __init__(self, file: Path, attempt: str) -> None:
        self.file, self.attempt = file, attempt
        self.rank = int(file.stem.removeprefix("rank_"))
        self._seen, self._since = 0, time.monotonic()
        self._over = False

    def silent(self) -> float:
        """Seconds since its last change; 0 when it has ended."""
        try:
            seen = self.file.stat().st_mtime_ns
        except FileNotFoundError:
            seen = 0
        except OSError:  # the disk does not answer: nothing is known of the rank
            seen = self._seen + 1
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
            beat = read_beat(self.file, self.attempt)
            self._over = beat is not None and bool(beat.ended)
        return 0.0 if self._over else time.monotonic() - self._since


def _attempt() -> str:
    """The name of this start of the run, the same on all ranks."""
    names = (
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        *("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
    )
    return digest(repr([os.environ.get(name) for name in names]), 8)


_STATES = {"T": "stopped (SIGSTOP)", "D": "waiting for a disk", "Z": "dead", "t": "traced"}


@dataclasses.dataclass(frozen=True)
class Silent:
    """A rank that has not been heard of for `seconds`, and what was found out about it."""

    rank: int
    seconds: float
    state: str = ""
    dump: str = ""  # of faulthandler

    def examined(self, beat: Beat | None, stacks: Path, patience: float) -> Silent:
        """Look at its process, where it is one of this machine, and have it dump its stacks: it can
        while it holds the interpreter lock, but not while it is stopped. `stacks`: where it writes.
        """
        if beat is None:
            return dataclasses.replace(self, state="it has not started, or does not share run.dir")
        if beat.host != socket.gethostname():
            return dataclasses.replace(self, state=f"it, or its host {beat.host}, is gone or stuck")
        process = Path(f"/proc/{beat.pid}")
        try:
            status = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if (process / "exe").readlink() != Path("/proc/self/exe").readlink():
                raise ProcessLookupError  # the number is another's now
        except OSError:
            return dataclasses.replace(self, state="its process is gone")
        state = f"its process is {_STATES.get(status, 'alive, held in a call of C')}"
        return dataclasses.replace(self, state=state, dump=_dumped(beat.pid, stacks, patience))


def report(beats: Sequence[Beat | None], timeout: float, silent: Silent | None = None) -> str:
    """The whole text. It begins with "hang: ", which launchers look for."""
    blame = _blame(beats, silent)
    lines = [f"hang: {blame} (run.hang_timeout={timeout:g}); every rank, innermost frame first:"]
    for rank, beat in enumerate(beats):
        if silent is not None and rank == silent.rank:
            lines += _silent_rank(rank, beat, silent)
        elif beat is None:
            lines += [f"rank {rank}: has not started"]
        elif beat.ended:
            lines += [f"rank {rank} on {beat.host}, pid {beat.pid}: {beat.ended}"]
        else:
            what = f"has stood still for {beat.still:.1f} s in {_call(beat)}"
            lines += [f"rank {rank} on {beat.host}, pid {beat.pid}: {beat.place}: {what}"]
            lines += _stacks(beat)
    return "\n".join(lines) + "\n"


def _blame(beats: Sequence[Beat | None], silent: Silent | None) -> str:
    """A sentence about the ranks for which the others wait: those that are silent; else those that
    have ended; else those in no collective, or in another one than most ranks.
    """
    if silent is not None:
        beat = beats[silent.rank]
        where = f", last in {beat.place}" if beat else ""
        return (
            f"rank {silent.rank} has been silent for {silent.seconds:.1f} s{where}: {silent.state}"
        )
    here = {rank: beat for rank, beat in enumerate(beats) if beat is not None and not beat.ended}
    missing = [rank for rank in range(len(beats)) if rank not in here]
    still = min((beat.still for beat in here.values()), default=0.0)
    common = Counter(_call(beat) for beat in here.values()).most_common(1)[0][0]
    idle = [rank for rank, beat in here.items() if not beat.collective]
    other = [rank for rank, beat in here.items() if _call(beat) != common]
    if missing:
        return f"no rank has moved for {still:.1f} s, and {_ranks(missing)} left or never came"
    blamed = idle if 0 < len(idle) < len(here) else other
    if blamed:
        places = "; ".join(sorted({f"{here[r].place}: {_call(here[r])}" for r in blamed}))
        return (
            f"no rank has moved for {still:.1f} s; the others wait for {_ranks(blamed)} ({places})"
        )
    place = next(iter(here.values())).place
    return f"no rank has moved for {still:.1f} s; all are in {common} ({place})"


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _call(beat: Beat) -> str:
    """The collective, or else the innermost function."""
    main = beat.stacks.get("MainThread") or ["? in an unknown call"]
    return beat.collective or f"{main[0].rsplit(' in ', 1)[1]}, no collective"


def _silent_rank(rank: int, beat: Beat | None, silent: Silent) -> list[str]:
    if beat is None:
        return [f"rank {rank}: {silent.state}"]
    lines = [
        f"rank {rank} on {beat.host}, pid {beat.pid}: {beat.place}: silent for "
        f"{silent.seconds:.1f} s, then in {_call(beat)}: {silent.state}"
    ]
    if silent.dump:
        return [*lines, *(f"    {line}" for line in silent.dump.splitlines())]
    return [*lines, "    where it was when it was last heard of:", *_stacks(beat)]


def _stacks(beat: Beat) -> list[str]:
    return [
        line
        for name, frames in beat.stacks.items()
        for line in (f"    {name}:", *(f"        {frame}" for frame in frames))
    ]


def _dumped(pid: int, stacks: Path, patience: float) -> str:
    """The stacks that faulthandler writes on a signal; "" where it cannot."""
    deadline = time.monotonic() + patience
    with suppress(OSError):
        before = stacks.stat().st_size
        os.kill(pid, signal.SIGUSR2)
        while stacks.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)  # it writes line by line
        return stacks.read_text()[before:]
    return ""
