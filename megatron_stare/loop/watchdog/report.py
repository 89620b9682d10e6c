"""The report of a hang: who is to blame, and every rank's place, collective and Python stack."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatron_stare.reporting.heartbeat import Beat

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
            return dataclasses.replace(self, state="it has not started")
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
    """Who is silent; else who has ended; else who is in no collective, or in another one than most
    ranks, for the others wait for them.
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
    """What faulthandler writes when it is asked; "" where it cannot."""
    deadline = time.monotonic() + patience
    with suppress(OSError):
        before = stacks.stat().st_size
        os.kill(pid, signal.SIGUSR2)
        while stacks.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)  # it writes line by line
        return stacks.read_text()[before:]
    return ""
