"""The system calls that sandboxed code may not make: a seccomp filter in classic BPF, for x86-64
and aarch64.

Standard library only: this file is run inside the sandbox. Some calls are refused always, others
only where nothing better keeps the code from what is outside: where it runs as the trainer's own
user, that user's files and processes are within its reach, and only the filter can say no.

Sources: seccomp(2), man 2 of each call, linux/filter.h, linux/audit.h; the numbers are those of
asm/unistd_64.h and asm-generic/unistd.h.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Mapping, Sequence

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


def rules(
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
    found["prlimit64"] = [
        (_LOAD, 0, 0, _argument(0)),
        (_EQUAL, len(change) - 1, 0, 0),
        *change,
    ]
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


def program(machine: str, wanted: Rules) -> bytes:
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


def install(wanted: Rules) -> bool:
    """Hold this process and its children to the rules, for good; needs NO_NEW_PRIVS.
    False: another processor, or a filter is not allowed.
    """
    machine = platform.machine()
    if machine not in AUDIT or struct.calcsize("P") != 8:
        return False
    code = program(machine, wanted)
    held = ctypes.create_string_buffer(code)
    head = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held))
    return ctypes.CDLL(None).prctl(22, 2, head, 0, 0) == 0  # PR_SET_SECCOMP, a filter


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
