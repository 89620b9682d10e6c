"""Means of Linux by which a process confines itself, through ctypes:
namespaces, Landlock, limits, another user (seccomp.py has the filter of system calls).

Standard library only: this file is run inside the sandbox, by an interpreter that may have nothing
else. Every step says whether it took; none raises because a container forbids it.

Sources: man 2 unshare, mount_setattr(2), landlock(7), prctl(2), capabilities(7); kernel header
linux/landlock.h (ABI 1 to 6).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
from collections.abc import Iterable, Mapping

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
]

# prctl
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE = 1, 4
_SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVILEGES = 36, 38
# unshare
_NEW_MOUNT, _NEW_IPC = 0x20000, 0x8000000
_NEW_USER, _NEW_PID, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
# mount
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _RECURSIVE, _PRIVATE = 1, 2, 4, 0x4000, 0x40000
_MOUNT_SETATTR, _HERE, _AT_RECURSIVE = 442, -100, 0x8000

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _READ_FILE, _READ_DIRECTORY = 1 << 0, 1 << 2, 1 << 3
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
# A rule about a single file may name no right that only a directory has.
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_RIGHTS_OF_ABI = {abi: (1 << count) - 1 for abi, count in enumerate([13, 14, 15, 15, 16], start=1)}
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2

NOBODY = 65534


def die_with_parent(sent: int = signal.SIGKILL) -> None:
    """This process gets `sent` when the thread that started it ends."""
    _libc.prctl(_SET_PARENT_DEATH_SIGNAL, int(sent), 0, 0, 0)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process,
    so that it can find and end them.
    """
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_readable(readable: bool) -> None:
    """Whether processes of the same user may read this one's
    memory and environment through /proc.
    """
    _libc.prctl(_SET_DUMPABLE, int(readable), 0, 0, 0)


def unshare() -> set[str]:
    """Move this process into new namespaces, if they are allowed: of processes (for its children),
    network and IPC. Without root a user namespace comes with them."""
    user = 0 if os.geteuid() == 0 else _NEW_USER
    user_id, group_id = os.geteuid(), os.getegid()
    if _libc.unshare(user | _NEW_PID | _NEW_NETWORK | _NEW_IPC) != 0:
        return set()
    if user:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user_id} {user_id} 1"),
            ("gid_map", f"{group_id} {group_id} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    return {"processes", "network"}


def private_view(place: str, size_bytes: int, entries: int) -> set[str]:
    """A mount namespace of this process's own; what it gives.

    "mounts": everything is read-only and /dev/shm an empty file system, as seen from here (Linux
    5.12). "disk": an empty file system of bounded size and number of entries over `place`.
    """
    if _libc.unshare(_NEW_MOUNT) != 0 or _mount(b"none", "/", _RECURSIVE | _PRIVATE) != 0:
        return set()
    held = set()
    attributes = struct.pack("QQQQ", _READ_ONLY, 0, 0, 0)
    shared = not os.path.isdir("/dev/shm") or not _mount(b"tmpfs", "/dev/shm", 0, "size=4k")
    if shared and not _libc.syscall(
        _MOUNT_SETATTR, _HERE, b"/", _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes))
    ):
        held.add("mounts")
    options = f"size={size_bytes},nr_inodes={entries},mode=0700"
    if not _mount(b"tmpfs", place, _NO_SETUID | _NO_DEVICES, options):
        held.add("disk")
    return held


def _mount(kind: bytes, place: str, flags: int, options: str = "") -> int:
    return int(_libc.mount(kind, os.fsencode(place), kind, flags, options.encode() or None))


def usable_user(user_id: int) -> int:
    """`user_id` if root may become it, else NOBODY, which others may share, else 0.
    A child process tries.
    """
    for candidate in (user_id, NOBODY):
        child = os.fork()
        if child == 0:
            try:
                become(candidate)
                os._exit(0)
            except BaseException:
                os._exit(1)
        if os.waitpid(child, 0)[1] == 0:
            return candidate
    return 0


def become(user_id: int) -> None:
    """Give up root for good. OSError where that is not allowed,
    or the container does not map the user.
    """
    os.setgroups([])
    os.setresgid(user_id, user_id, user_id)
    os.setresuid(user_id, user_id, user_id)


def drop_capabilities() -> None:
    """No capabilities, and none to be had from set-user-id programs."""
    _libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    header = struct.pack("Ii", 0x20080522, 0)
    _libc.capset(header, struct.pack("6I", *[0] * 6))


def set_limits(limits: Mapping[str, int]) -> None:
    """Soft and hard limits by the names of resource.RLIMIT_* without prefix;
    lower ones that hold already stay.
    """
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def landlock_version() -> int:
    """The ABI of Landlock here; 0: none."""
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1)))


def file_rules(readable: Iterable[str], writable: Iterable[str], version: int) -> int:
    """Rules by which only these trees can be read (and run), only those written;
    a descriptor, or -1: no Landlock.

    To be made by a user that reaches the places; `enforce` may come after it has become another.
    `version`: the ABI to use, at most `landlock_version()`.
    """
    if not version:
        return -1
    rights = _RIGHTS_OF_ABI[min(version, 5)]
    scopes = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= 6 else 0
    attributes = struct.pack("QQQ", rights, 0, scopes)
    ruleset = int(
        _libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(24 if version >= 6 else 8), 0)
    )
    if ruleset >= 0:
        reading = _EXECUTE | _READ_FILE | _READ_DIRECTORY
        for places, allowed in ((readable, reading), (writable, rights)):
            for place in places:
                _allow(ruleset, place, allowed)
    return ruleset


def enforce(ruleset: int, version: int) -> set[str]:
    """Hold this process and its children to the rules, for good; needs NO_NEW_PRIVS. The names of
    the protections that hold then: "files"; from ABI 6 "signals" too: signals, and abstract
    sockets, reach only processes under the same rules. ptrace, and what /proc shows of memory and
    environment, never reach further.
    """
    if ruleset < 0:
        return set()
    refused = _libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0) != 0
    os.close(ruleset)
    if refused:
        return set()
    return {"files", "signals"} if version >= 6 else {"files"}


def _allow(ruleset: int, place: str, allowed: int) -> None:
    """Add a rule for a tree or a file; a path that does not exist needs none."""
    with contextlib.suppress(OSError):
        descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
        try:
            if not os.path.isdir(place):
                allowed &= _FILE_RIGHTS
            _libc.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
        finally:
            os.close(descriptor)
