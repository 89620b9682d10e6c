"""The filter of system calls, run on paper: a small interpreter of classic BPF asks both
processors' programs about every call. What the kernel makes of it is test_sandbox_escapes.py's.
"""

from __future__ import annotations

import platform
import re
import struct
from pathlib import Path

import pytest

from megatron_stare.rollout.sandbox import kernel

ALLOW, REFUSE, ABSENT, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
OWN = 4321
EVERYTHING = {"own_process": OWN, "attributes": True, "truncation": True, "group": True}
MACHINES = tuple(kernel.AUDIT)
# On aarch64 these were left out for newer ones: fchmodat, fchownat, openat, utimensat.
NOT_ON_AARCH64 = {"chmod", "chown", "futimesat", "lchown", "open", "utime", "utimes"}
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def lines_of(program):
    return [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]


def verdict(machine, name, *arguments, wanted=None, audit=None):
    """The kernel's answer to this call."""
    number = kernel.NUMBERS[name][MACHINES.index(machine)] if isinstance(name, str) else name
    values = [value & (1 << 64) - 1 for value in (*arguments, *[0] * (6 - len(arguments)))]
    data = struct.pack("<IIQ6Q", number, audit or kernel.AUDIT[machine], 0, *values)
    rules = kernel.call_rules(**EVERYTHING) if wanted is None else wanted
    lines, at, held = lines_of(kernel.call_filter(machine, rules)), 0, 0
    while True:
        code, if_true, if_false, constant = lines[at]
        at += 1
        if code == 0x20:
            held = struct.unpack_from("<I", data, constant)[0]
        elif code == 0x54:
            held &= constant
        elif code == 0x06:
            return constant
        else:
            found = {0x15: held == constant, 0x35: held >= constant, 0x45: held & constant}[code]
            at += if_true if found else if_false


def test_both_processors_know_every_name_or_have_none_by_design():
    columns = list(zip(*kernel.NUMBERS.values(), strict=True))
    for column in columns:
        known = [number for number in column if number is not None]
        assert len(set(known)) == len(known)
    assert None not in columns[0]
    absent = {name for name, numbers in kernel.NUMBERS.items() if numbers[1] is None}
    assert absent == NOT_ON_AARCH64
    assert set(kernel.NUMBERS) == set(kernel.call_rules(**EVERYTHING)), "none too many"


def test_both_programs_have_one_shape():
    shared = {
        name: lines
        for name, lines in kernel.call_rules(**EVERYTHING).items()
        if name not in NOT_ON_AARCH64
    }
    one, two = (lines_of(kernel.call_filter(machine, shared)) for machine in MACHINES)
    numbers = [{numbers[at] for numbers in kernel.NUMBERS.values()} for at in (0, 1)]
    assert len(one) == len(two)
    for here, there in zip(one, two, strict=True):
        assert here[:3] == there[:3]
        if here != there:
            assert here[3] in numbers[0] | {kernel.AUDIT["x86_64"]}
            assert there[3] in numbers[1] | {kernel.AUDIT["aarch64"]}
    whole = lines_of(kernel.call_filter("x86_64", kernel.call_rules(**EVERYTHING)))
    assert len(whole) < 4096, "the kernel takes no longer ones"


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_the_headers(machine):
    if not HEADERS[machine].is_file():
        pytest.skip(f"{HEADERS[machine]} is not installed (linux-libc-dev)")
    found = re.findall(
        r"#define\s+__NR(?:3264)?_(\w+)\s+(\d+)\s", HEADERS[machine].read_text() + "\n"
    )
    numbers = {name: int(number) for name, number in found}
    checked = 0
    for name, pair in kernel.NUMBERS.items():
        if name in numbers and pair[MACHINES.index(machine)] is not None:
            assert pair[MACHINES.index(machine)] == numbers[name], name
            checked += 1
    assert checked > 90


@pytest.mark.parametrize("machine", MACHINES)
def test_system_calls_are_refused_or_allowed_as_listed(machine):
    null, pointer, high = 0, 0x7FFF12340000, 1 << 32
    cases = [
        (("ptrace", 16, 1), REFUSE),
        (("socket", 2, 1, 0), REFUSE),
        *((("socketpair", 1, kind, 0), ALLOW) for kind in (1, 0x80001, 0x80801)),
        *((("socketpair", 1, kind, 0), REFUSE) for kind in (2, 3, 5, 0x80002, 0x80805)),
        (("unshare", 0x10000000), REFUSE),
        (("clone3", pointer), ABSENT),
        (("clone", 17), ALLOW),
        (("clone", 0x003D0F00), ALLOW),  # a thread
        *((("clone", 17 | 1 << bit), REFUSE) for bit in (17, 25, 26, 27, 28, 29, 30)),
        (("prlimit64", 0, 7, pointer), ALLOW),
        (("prlimit64", OWN, 7, null, pointer), ALLOW),
        (("prlimit64", 1, 7, pointer), REFUSE),
        (("prlimit64", 1, 7, high), REFUSE),
        (("prlimit64", OWN, 7, 0xFFFF0000), REFUSE),
        (("sched_setaffinity", 0), ALLOW),
        (("sched_setaffinity", 1), REFUSE),
        (("sched_setscheduler", 1), REFUSE),
        (("sched_setparam", 1), REFUSE),
        (("sched_setattr", 1), REFUSE),
        (("setpriority", 0, 0, 19), ALLOW),
        (("setpriority", 0, 1, 19), REFUSE),
        (("setpriority", 2, 0, 19), REFUSE),
        (("setpriority", 1, 0, 19), REFUSE),
        (("ioprio_set", 1, 1), REFUSE),
        (("kill", OWN, 9), ALLOW),
        (("kill", -OWN, 9), ALLOW),
        (("kill", 0, 9), ALLOW),
        (("kill", -1, 9), REFUSE),
        (("kill", 1, 9), REFUSE),
        (("tgkill", OWN, 5), ALLOW),
        (("tgkill", 1, 1), REFUSE),
        (("tkill", OWN), REFUSE),
        (("rt_sigqueueinfo", OWN), REFUSE),
        (("pidfd_send_signal", 3), REFUSE),
        *((("fcntl", 3, command), REFUSE) for command in (8, 10, 15)),
        *((("fcntl", 3, command), ALLOW) for command in (0, 1, 2, 3, 4, 6, 9, 1030)),
        *((("ioctl", 3, request), REFUSE) for request in (0x5412, 0x8901, 0x40086602, 0x401C5820)),
        (("ioctl", 3, 0x5401), ALLOW),
        (("fchmodat", -100, pointer, 0), REFUSE),
        (("fchownat", -100, pointer, 0), REFUSE),
        (("setxattr", pointer), REFUSE),
        (("utimensat", -100, pointer), REFUSE),
        (("truncate", pointer, 0), REFUSE),
        (("openat2", -100, pointer), ABSENT),
        (("openat", -100, pointer, 0), ALLOW),
        (("openat", -100, pointer, 0o1000), REFUSE),  # O_RDONLY | O_TRUNC
        (("openat", -100, pointer, 0o1003), REFUSE),
        (("openat", -100, pointer, 0o1101), ALLOW),
        (("openat", -100, pointer, 0o1102), ALLOW),
        (("setsid",), REFUSE),
        ((0x3FFFFFFF,), ALLOW),
        ((0x40000000,), KILL),
    ]
    for call, expected in cases:
        assert verdict(machine, *call) == expected, call
    assert verdict(machine, "kill", audit=0x40000003) == KILL, "32-bit calls"


@pytest.mark.parametrize("machine", MACHINES)
def test_code_that_reaches_nothing_outside_may_change_its_own_files_and_processes(machine):
    wanted = kernel.call_rules()
    for call in (
        ("fchmodat", -100),
        ("kill", 1, 9),
        ("truncate", 1),
        ("setsid",),
        ("fcntl", 3, 8),
        ("openat", -100, 1, 0o1000),
        ("utimensat", -100),
    ):
        assert verdict(machine, *call, wanted=wanted) == ALLOW, call
    assert verdict(machine, "ptrace", wanted=wanted) == REFUSE


@pytest.mark.parametrize(("machine", "bits"), [("riscv64", 8), ("x86_64", 4)])
def test_other_processors_have_no_filter(monkeypatch, machine, bits):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(kernel.struct, "calcsize", lambda _: bits)
    assert not kernel.filter_calls(kernel.call_rules())
