"""The protections of a sandbox on this machine: what they stop, and which are missing, in words.

`sandbox.isolation=bubblewrap`: bwrap builds a root of the system's and the interpreter's
directories, read-only, an empty /tmp of bounded size, and namespaces of its own for processes,
network, IPC and host name. `sandbox.isolation=limits` needs no program and no rights. It takes what
the kernel grants. `Sandbox.held` says what that was:
    processes   a process namespace: nothing outside is signalled, nothing survives
    network     an empty network namespace
    mounts      a mount namespace (Linux 5.12): all but the call's directory is read-only, and
                /dev/shm is its own and empty
    disk        a file system of `disk_mib`, and of as many files as that holds at 4 KiB each;
                without it the directory is measured 20 times a second
    user        root only: the code runs as a user of its own, which owns nothing
    files       Landlock (Linux 5.13): only the system's and the interpreter's directories can be
                read (of /dev five devices, of /proc its own), only the call's directory written
    signals     a signal reaches only processes of the same call: Landlock (Linux 6.12), or the
                filter of system calls
    attributes  mode, owner, times and attributes of files outside cannot be changed: by user,
                mounts or the filter
    calls       seccomp (x86-64, aarch64): no sockets but pairs of streams, no ptrace, no System V
                IPC, no mounts, no namespaces, no io_uring; no limits, priorities or processor sets
                of other processes
`auto` is bubblewrap where it works, else, except for root, limits; root has to ask for limits by
name.

The filter has to refuse more where code runs as the trainer's own user and has neither "processes"
nor "mounts" (a container without user namespaces, and no root): chmod, chown, utime and extended
attributes altogether (so shutil.copy fails there, shutil.copyfile works), and before Linux 6.12
signals but to the first process and its group (so subprocess's time-out fails), and before Linux
6.2 truncate by name.

docs/security.md says what no isolation stops, docs/tools.md what limits does not. Besides, without
"disk" a file that is deleted while it is open is not measured; without "user", as root,
`max_processes` does not bind root. The code shares its process with what reports `value` and `ok`,
so that a verifier must not trust them (scoring/programs/ does not). What is missing is logged once
per process, as a warning.
"""

from __future__ import annotations

import functools
import logging

log = logging.getLogger(__name__)


@functools.cache
def warn(isolation: str, held: frozenset[str]) -> None:
    """Print once what this isolation cannot stop on this machine."""
    gaps = missing(held)
    if gaps:
        log.warning(
            "sandbox: isolation=%s here does not stop everything: %s", isolation, "; ".join(gaps)
        )


def missing(held: frozenset[str]) -> list[str]:
    """The acts that missing protections allow to code, in words; empty: none that another isolation
    would stop.
    """
    gaps = []
    if "files" not in held:
        reach = (
            "files that all users may read or write"
            if "user" in held
            else "every file that you can read"
            if "mounts" in held
            else "every file that you can read or write"
        )
        gaps.append(f"it reaches {reach} (Landlock, Linux 5.13, is missing)")
    if "attributes" not in held and "user" not in held:
        gaps.append("it can change mode, owner and times of your files (seccomp is missing)")
    if not held & {"user", "processes", "signals"}:
        gaps.append("it can send signals to your processes (Landlock of Linux 6.12 is missing)")
    if "calls" not in held:
        gaps.append("it meets the whole of the kernel, other processes' limits too (no seccomp)")
    if not held & {"network", "calls"}:
        gaps.append("it reaches the network (namespaces and seccomp are missing)")
    if "processes" not in held:
        gaps.append(
            "it has no process namespace: its processes are found by their user or group when a "
            "call ends"
        )
    if "disk" not in held:
        gaps.append("disk_mib is only measured 20 times a second")
    return gaps
