"""Verifiers that misbehave, for the pool: real hangs, real crashes, real floods of memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from megatron_stare.scoring.verdict import Verdict, in_worker, judged, provisionally


def longest(responses: list[str], label: str, metadata: dict[str, Any]) -> list[float]:
    """1 for the longest response of a group; does what the first response says."""
    if responses[0] == "exit":
        os._exit(3)
    if responses[0].startswith("sleep"):
        time.sleep(float(responses[0].split()[1]))
    most = max(map(len, responses))
    return [float(len(response) == most) for response in responses][: metadata.get("returned")]


@in_worker
def obedient(response: str, label: str, metadata: dict[str, Any]) -> Verdict:
    """Does what the response says. `once:` only the first time,
    which a file at metadata["mark"] remembers.
    """
    order = response
    if response.startswith("own fault:"):
        order = response.removeprefix("own fault:")
        provisionally(judged(False, "a bomb"))
    if response.startswith("once:"):
        mark = Path(metadata["mark"])
        order = "" if mark.exists() else response.removeprefix("once:")
        mark.touch()
    if order == "hang in C":
        re.match(
            r"(a|a)*b", "a" * 60
        )  # holds the interpreter's lock and looks at no signal handler
    elif order == "busy":
        while True:
            pass
    elif order == "busy until marked":
        while not Path(metadata["mark"]).exists():
            pass
    elif order == "hang":
        time.sleep(1000)
    elif order == "exit":
        os._exit(3)
    elif order == "allocate":
        held = []
        while True:
            held.append(bytearray(1 << 24))
    elif order == "raise":
        raise ZeroDivisionError("on purpose")
    elif order == "leave a child":
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(1000)"],
            env=os.environ | {"PATIENT": label},
        )
        time.sleep(1000)
    elif order == "print":
        print("a verifier that talks")
    return judged(response == label, response)


@in_worker
def even_or_exit(response: str, label: str, metadata: dict[str, Any]) -> float:
    """1 where the response's bytes add up to an even number;
    about every eighth response crashes the process.
    """
    total = sum(response.encode())
    if total % 8 == 0:
        os._exit(5)
    return float(total % 2 == 0)


@in_worker
def modules(response: str, label: str, metadata: dict[str, Any]) -> Verdict:
    """Which of the modules that the response names are imported in the worker."""
    return Verdict(
        1.0, "correct", " ".join(name for name in response.split() if name in sys.modules)
    )


@in_worker
def pid(response: str, label: str, metadata: dict[str, Any]) -> Verdict:
    """The worker's process id."""
    return Verdict(1.0, "correct", str(os.getpid()))


def process(response: str, label: str, metadata: dict[str, Any]) -> float:
    return float(os.getpid())


def half(response: str, label: str, metadata: dict[str, Any]) -> float:
    """A reward as users have always written it."""
    return 0.5


def endless(response: str, label: str, metadata: dict[str, Any]) -> float:
    """Half of them never ends."""
    while response == "x":
        pass
    return 1.0


def not_finite(response: str, label: str, metadata: dict[str, Any]) -> float:
    return float("nan")


def picky(response: str, label: str, metadata: dict[str, Any]) -> float:
    """Raises for some responses."""
    return float(response)


_ALONE = threading.Lock()


def alone(response: str, label: str, metadata: dict[str, Any]) -> float:
    """1 if no other call is inside this function."""
    if not _ALONE.acquire(blocking=False):
        return 0.0
    time.sleep(0.005)
    _ALONE.release()
    return 1.0


def verl_sums(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    """A function of verl's form: 1 for right answers of the data set `sums`, else 0."""
    assert extra_info["index"] == 1
    return float(data_source == "sums" and solution_str == ground_truth)
