"""Means of Linux by which a process confines itself, through ctypes: namespaces, Landlock, limits,
another user, and a filter of system calls (seccomp in classic BPF, for x86-64 and aarch64).

Standard library only: this file is run inside the sandbox, by an interpreter that may have nothing
else. Every step says whether it took; none raises because a container forbids it.

Some system calls are refused always, others only where nothing better keeps the code from what is
outside: where it runs as the trainer's own user, that user's files and processes are within its
reach, and only the filter can say no.

Sources: man 2 unshare and of each call, mount_setattr(2), landlock(7), seccomp(2), prctl(2),
capabilities(7); linux/landlock.h (ABI 1 to 6), linux/filter.h, linux/audit.h; the numbers are those
of asm/unistd_64.h and asm-generic/unistd.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterable, Mapping, Sequence

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
_SET_SECCOMP, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVILEGES = 22, 36, 38
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


Line = tuple[int, int, int, int]  # code, lines to skip if true, if false, constant
Rules = Mapping[str, Sequence[Line]]  # what is done about a system call, by its name

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Of system calls: the number on x86-64 and on aarch64; None: it does not exist there.
NUMBERS: dict[str, tuple[int, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chmod": (90, None),
    "chown": (92, None),
    "chroot": (161, 51),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "fcntl": (72, 25),
    "file_setattr": (469, 469),
    "finit_module": (313, 273),
    "fremovexattr": (199, 16),
    "fsconfig": (431, 431),
    "fsetxattr": (190, 7),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "futimesat": (261, None),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioctl": (16, 29),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "kill": (62, 129),
    "lchown": (94, None),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "msgctl": (71, 187),
    "msgget": (68, 186),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "open": (2, None),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "openat": (257, 56),
    "openat2": (437, 437),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "removexattr": (197, 14),
    "removexattrat": (466, 466),
    "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semctl": (66, 191),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "setns": (308, 268),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "setsid": (112, 157),
    "settimeofday": (164, 170),
    "setxattr": (188, 5),
    "setxattrat": (463, 463),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmget": (29, 194),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "truncate": (76, 45),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
}
# Code under test never needs these. With them it could reach into other processes, make things that
# outlive it, or meet rarely trodden parts of the kernel.
_NEVER = """
    acct add_key bpf chroot clock_settime delete_module fanotify_init finit_module fsconfig fsmount
    fsopen fspick init_module io_uring_enter io_uring_register io_uring_setup ioprio_set kcmp
    kexec_file_load kexec_load keyctl migrate_pages mount mount_setattr move_mount move_pages
    mq_open mq_unlink msgctl msgget msgrcv msgsnd open_by_handle_at open_tree perf_event_open
    pidfd_getfd pidfd_open pidfd_send_signal pivot_root process_madvise process_mrelease
    process_vm_readv process_vm_writev ptrace quotactl quotactl_fd reboot request_key semctl semget
    semop semtimedop setns settimeofday shmat shmctl shmget socket swapoff swapon syslog umount2
    unshare userfaultfd
""".split()  # noqa: SIM905
# Mode, owner, times and attributes of files: no Landlock asks about them.
_ATTRIBUTES = """
    chmod chown fchmod fchmodat fchmodat2 fchown fchownat file_setattr fremovexattr fsetxattr
    futimesat lchown lremovexattr lsetxattr removexattr removexattrat setxattr setxattrat utime
    utimensat utimes
""".split()  # noqa: SIM905
_SIGNALS_WITH_DATA = ("rt_sigqueueinfo", "rt_tgsigqueueinfo", "tkill")
_LEAVE_GROUP = ("setpgid", "setsid")
_OF_ITSELF_ONLY = ("sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler")
# clone's flags for new namespaces: mount, cgroup, host name, IPC, user, process, network
_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000
_NEW_NAMESPACES |= 0x20000000 | 0x40000000
_TERMINAL_INPUT = (0x5412, 0x541C)  # ioctl TIOCSTI, TIOCLINUX
_FILE_FLAGS = (0x40086602, 0x401C5820)  # ioctl FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR
_SOCKET_OWNER = (0x8901, 0x8902)  # ioctl FIOSETOWN, SIOCSPGRP: who gets SIGIO
_SIGNAL_OWNER = (8, 10, 15)  # fcntl F_SETOWN, F_SETSIG, F_SETOWN_EX: who gets which signal
_ACCESS, _TRUNCATE = 3, 0o1000  # of open's flags
_SOCKET_TYPE, _STREAM = 0xF, 1  # of a socket's type

_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _ANSWER = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_X32_CALL = 0, 4, 0x40000000
_ALLOWED: Line = (_ANSWER, 0, 0, 0x7FFF0000)
_REFUSED: Line = (_ANSWER, 0, 0, 0x00050000 | 1)  # EPERM
_ABSENT: Line = (_ANSWER, 0, 0, 0x00050000 | 38)  # ENOSYS: the C library tries an older call
_KILLED: Line = (_ANSWER, 0, 0, 0x80000000)


def call_rules(
    own_process: int = 0, attributes: bool = False, truncation: bool = False, group: bool = False
) -> dict[str, list[Line]]:
    """The system calls that are refused.

    `own_process`: signals but to that process and to the own group (0: any may be sent).
    `attributes`: changes of mode, owner, times and attributes of files. `truncation`: what Landlock
    before ABI 3 lets through. `group`: leaving the process group.
    """
    found: dict[str, list[Line]] = {name: [_REFUSED] for name in _NEVER}
    found |= {name: _only_zero(_argument(0)) for name in _OF_ITSELF_ONLY}
    found["setpriority"] = _only_zero(_argument(0), _argument(1))
    change = _only_zero(_argument(2), _argument(2) + 4)  # a null pointer only asks
    found["prlimit64"] = [(_LOAD, 0, 0, _argument(0)), (_EQUAL, len(change) - 1, 0, 0), *change]
    found["clone"] = [
        (_LOAD, 0, 0, _argument(0)),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        _REFUSED,
        _ALLOWED,
    ]
    # A pair of datagram sockets can send to any other socket whose path can be reached.
    found["socketpair"] = [
        (_LOAD, 0, 0, _argument(1)),
        (_AND, 0, 0, _SOCKET_TYPE),
        (_EQUAL, 0, 1, _STREAM),
        _ALLOWED,
        _REFUSED,
    ]
    found["clone3"] = [_ABSENT]  # its flags lie in memory, where no filter looks; clone's do not
    ioctls: tuple[int, ...] = _TERMINAL_INPUT
    if attributes:
        found |= {name: [_REFUSED] for name in _ATTRIBUTES}
        ioctls += _FILE_FLAGS
    if truncation:
        found |= {"truncate": [_REFUSED], "openat2": [_ABSENT]}
        found |= {"open": _no_truncation(1), "openat": _no_truncation(2)}
    if own_process:
        found |= {name: [_REFUSED] for name in _SIGNALS_WITH_DATA}
        own = (0, own_process, -own_process & 0xFFFFFFFF)
        found["kill"] = _where(0, own, _ALLOWED, _REFUSED)
        found["tgkill"] = _where(0, (own_process,), _ALLOWED, _REFUSED)
        found["fcntl"] = _where(1, _SIGNAL_OWNER, _REFUSED, _ALLOWED)
        ioctls += _SOCKET_OWNER
    found["ioctl"] = _where(1, ioctls, _REFUSED, _ALLOWED)
    if group:
        found |= {name: [_REFUSED] for name in _LEAVE_GROUP}
    return found


def call_filter(machine: str, wanted: Rules) -> bytes:
    """The filter for a processor. Names that it does not know are left out; other calling
    conventions than its own (32 bits, x32) end the process.
    """
    column = list(AUDIT).index(machine)
    lines: list[Line] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, AUDIT[machine]),
        _KILLED,
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _FIRST_X32_CALL),
        _KILLED,
    ]
    for name in sorted(wanted):
        number = NUMBERS[name][column]
        if number is not None:
            lines += [(_EQUAL, 0, len(wanted[name]), number), *wanted[name]]
    return b"".join(struct.pack("HBBI", *line) for line in [*lines, _ALLOWED])


def filter_calls(wanted: Rules) -> bool:
    """Hold this process and its children to the rules, for good; needs NO_NEW_PRIVS.
    False: another processor, or a filter is not allowed.
    """
    machine = platform.machine()
    if machine not in AUDIT or struct.calcsize("P") != 8:
        return False
    code = call_filter(machine, wanted)
    held = ctypes.create_string_buffer(code)
    head = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held))
    return _libc.prctl(_SET_SECCOMP, 2, head, 0, 0) == 0  # 2: a filter


def _argument(number: int) -> int:
    """The offset of an argument's lower half; both processors are little-endian."""
    return 16 + 8 * number


def _where(argument: int, values: Sequence[int], then: Line, otherwise: Line) -> list[Line]:
    """One answer where the argument has one of these values, another elsewhere."""
    count = len(values)
    tests = [(_EQUAL, count - place, 0, value) for place, value in enumerate(values)]
    return [(_LOAD, 0, 0, _argument(argument)), *tests, otherwise, then]


def _only_zero(*places: int) -> list[Line]:
    """Allowed where all these halves of arguments are 0."""
    lines: list[Line] = []
    for left, place in reversed(list(enumerate(reversed(places)))):
        lines += [(_LOAD, 0, 0, place), (_EQUAL, 0 if left else 1, 2 * left, 0)]
    return [*lines, _REFUSED, _ALLOWED]


def _no_truncation(argument: int) -> list[Line]:
    """Opening to truncate is refused without the right to write, which is what Landlock asks for:
    Linux truncates what was opened to read, and what was opened for nothing (access mode 3), too.
    """
    return [
        (_LOAD, 0, 0, _argument(argument)),
        (_AND, 0, 0, _TRUNCATE | _ACCESS),
        (_EQUAL, 2, 0, _TRUNCATE),
        (_EQUAL, 1, 0, _TRUNCATE | _ACCESS),
        _ALLOWED,
        _REFUSED,
    ]
