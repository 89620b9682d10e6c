"""What Linux offers a process to lock itself in, by ctypes:
namespaces, Landlock, seccomp, limits, another user.

Standard library only: this file is run inside the sandbox, by an interpreter that may have nothing
else. Every step says whether it took; none raises because a container forbids it.

Sources: man 2 unshare, landlock(7), seccomp(2), prctl(2), capabilities(7); kernel headers
linux/landlock.h (ABI 1 to 6) and linux/filter.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
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
(
    _SET_PARENT_DEATH_SIGNAL,
    _SET_DUMPABLE,
    _SET_CHILD_SUBREAPER,
    _SET_NO_NEW_PRIVILEGES,
    _SET_SECCOMP,
) = 1, 4, 36, 38, 22
# unshare
_NEW_MOUNT, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NETWORK = (
    0x20000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
# mount
_NO_SETUID, _NO_DEVICES, _RECURSIVE, _PRIVATE = 2, 4, 0x4000, 0x40000

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _READ_FILE, _READ_DIRECTORY = 1 << 0, 1 << 2, 1 << 3
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
# A rule about a single file may name no right that only a directory has.
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_RIGHTS_OF_ABI = {
    1: (1 << 13) - 1,
    2: (1 << 14) - 1,
    3: (1 << 15) - 1,
    4: (1 << 15) - 1,
    5: (1 << 16) - 1,
}
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2

# System calls of x86-64 that code under test never needs. Refused: with them it could reach into
# other processes, make things that outlive it, or meet rarely trodden parts of the kernel.
_REFUSED = {
    "shmget": 29,
    "semget": 64,
    "msgget": 68,
    "ptrace": 101,
    "pivot_root": 155,
    "chroot": 161,
    "acct": 163,
    "settimeofday": 164,
    "mount": 165,
    "umount2": 166,
    "swapon": 167,
    "swapoff": 168,
    "reboot": 169,
    "init_module": 175,
    "delete_module": 176,
    "clock_settime": 227,
    "mq_open": 240,
    "kexec_load": 246,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "unshare": 272,
    "perf_event_open": 298,
    "open_by_handle_at": 304,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "finit_module": 313,
    "kexec_file_load": 320,
    "bpf": 321,
    "userfaultfd": 323,
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_open": 434,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
    "socket": 41,
}
_LEAVE_GROUP = {"setpgid": 109, "setsid": 112}
_CLONE, _CLONE3 = 56, 435
_X86_64, _FIRST_X32_CALL = 0xC000003E, 0x40000000
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NOT_PERMITTED, _NO_SUCH_CALL = 1, 38

NOBODY = 65534


def die_with_parent(sent: int = signal.SIGKILL) -> None:
    """This process gets `sent` when the thread that started it ends."""
    _libc.prctl(_SET_PARENT_DEATH_SIGNAL, int(sent), 0, 0, 0)


def adopt_orphans() -> bool:
    """Descendants whose parent ends become children of this process,
    so that it can find and end them.
    """
    return _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def set_readable(readable: bool) -> None:
    """Whether processes of the same user may read this one's
    memory and environment through /proc.
    """
    _libc.prctl(_SET_DUMPABLE, int(readable), 0, 0, 0)


def unshare() -> set[str]:
    """New namespaces for what this process does next, as many as are allowed: of processes (for its
    children), network, IPC and mounts. Without root a user namespace comes with them."""
    user = 0 if os.geteuid() == 0 else _NEW_USER
    user_id, group_id = os.geteuid(), os.getegid()
    if _libc.unshare(user | _NEW_PID | _NEW_NETWORK | _NEW_IPC | _NEW_MOUNT) != 0:
        return set()
    if user:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user_id} {user_id} 1"),
            ("gid_map", f"{group_id} {group_id} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    return {"processes", "network", "mounts"}


def mount_scratch(place: str, size_bytes: int) -> bool:
    """An empty file system of bounded size over the directory `place`,
    in this mount namespace only.
    """
    if _libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None) != 0:
        return False
    flags = _NO_SETUID | _NO_DEVICES
    return (
        _libc.mount(
            b"tmpfs", os.fsencode(place), b"tmpfs", flags, b"size=%d,mode=0700" % size_bytes
        )
        == 0
    )


def unmount(place: str) -> None:
    """Undo `mount_scratch`, where it was done."""
    _libc.umount2(os.fsencode(place), 2)


def usable_user(user_id: int) -> int:
    """`user_id` where root may become it, else NOBODY, which others may share, else 0.
    Tried in a child.
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


def file_rules(readable: Iterable[str], writable: Iterable[str]) -> int:
    """Rules by which only these trees can be read (and run), only those written;
    a descriptor, or -1: no Landlock.

    To be made by a user that reaches the places; `enforce` may come after it has become another.
    """
    version = landlock_version()
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


def enforce(ruleset: int) -> set[str]:
    """Hold this process and its children to the rules, for good;
    needs NO_NEW_PRIVILEGES. What then holds.

    "files"; from ABI 6 "signals" too: they, and abstract sockets, reach only processes under the
    same rules. ptrace, and what /proc tells of memory and environment, never reach further.
    """
    if ruleset < 0:
        return set()
    refused = _libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0) != 0
    os.close(ruleset)
    if refused:
        return set()
    return {"files", "signals"} if landlock_version() >= 6 else {"files"}


def _allow(ruleset: int, place: str, allowed: int) -> None:
    """Add a rule for a tree or a file; a place that is not there needs none."""
    with contextlib.suppress(OSError):
        descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
        try:
            if not os.path.isdir(place):
                allowed &= _FILE_RIGHTS
            _libc.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
        finally:
            os.close(descriptor)


def filter_calls(keep_group: bool) -> bool:
    """Refuse the system calls in `_REFUSED`, new user namespaces,
    and other calling conventions than x86-64's.

    `keep_group` also refuses to leave the process group, so that one signal to the group ends
    everything. False on other processors than x86-64, and where a filter is not allowed.
    """
    if platform.machine() != "x86_64" or struct.calcsize("P") != 8:
        return False
    refused = [*_REFUSED.values(), *(_LEAVE_GROUP.values() if keep_group else ())]
    program = _program(sorted(refused))
    code = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    return _libc.prctl(_SET_SECCOMP, 2, head, 0, 0) == 0


def _program(refused: list[int]) -> bytes:
    """The filter in classic BPF: instructions of (code, jump if true, jump if false, constant)."""
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    number, architecture, first_argument = 0, 4, 16
    lines = [
        (load, 0, 0, architecture),
        (equal, 1, 0, _X86_64),
        (answer, 0, 0, _KILL),
        (load, 0, 0, number),
        (at_least, 0, 1, _FIRST_X32_CALL),
        (answer, 0, 0, _KILL),
        # The C library falls back to clone, whose flags can be looked at.
        (equal, 0, 1, _CLONE3),
        (answer, 0, 0, _ERRNO | _NO_SUCH_CALL),
    ]
    for call in refused:
        lines += [(equal, 0, 1, call), (answer, 0, 0, _ERRNO | _NOT_PERMITTED)]
    lines += [
        (equal, 0, 3, _CLONE),
        (load, 0, 0, first_argument),
        (any_bit, 0, 1, _NEW_USER),
        (answer, 0, 0, _ERRNO | _NOT_PERMITTED),
        (answer, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
