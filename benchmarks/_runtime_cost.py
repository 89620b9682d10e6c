"""The cost of policy/runtime.py in a step: calls counted, cost per call measured."""

from __future__ import annotations

import cProfile
import pstats
import sys
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._measuring import timed
from benchmarks._phases import CONSOLE
from megatron_stare.policy import runtime


def replaced() -> dict[str, tuple[Any, str, Callable[..., Any] | None, tuple[Any, ...]]]:
    """name -> owner, attribute, the original where a CPU has one, arguments of a cheap call,
    of what prepare() set.
    """
    small, names = torch.zeros(1), runtime._FACTORIES
    arguments: dict[str, tuple[Any, ...]] = {"tensor": (1.0,), "full": ((1,), 0.0), "arange": (1,)}
    arguments |= {name: (small,) for name in names if name.endswith("_like")}
    found: dict[str, Any] = {
        f"torch.{name}": (torch, name, getattr(torch, name).__wrapped__, arguments.get(name, (1,)))
        for name in names
    }
    found["Tensor.type"] = (torch.Tensor, "type", torch._C.TensorBase.type, (small,))
    found["Tensor.cuda"] = (torch.Tensor, "cuda", None, (small,))
    for name in (
        "current_device",
        "synchronize",
        "empty_cache",
        "current_stream",
        "default_stream",
        "get_rng_state",
    ):
        found[f"torch.cuda.{name}"] = (torch.cuda, name, None, ())
    found["torch.cuda.stream"] = (torch.cuda, "stream", None, ())
    return found


@contextmanager
def counting(calls: Counter[str]) -> Iterator[None]:
    """Counts calls of everything replaced while entered."""

    def counted(name: str, installed: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return installed(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name, (owner, attribute, *_) in replaced().items():
            watched = counted(name, getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, watched))
        yield


def runtime_cost(step: Callable[[], Any], label: str) -> dict[str, Any]:
    """Table 3 for one step."""
    calls: Counter[str] = Counter()
    with counting(calls):
        _, seconds = timed(step, torch.device("cpu"))
    table = Table(
        title=f"policy/runtime.py in {label}, {seconds * 1e3:.0f} ms of processor time",
        title_justify="left",
    )
    for name in ("replaced function", "calls", "us per call", "us per step"):
        table.add_column(name, justify="left" if name == "replaced function" else "right")
    total, rows = 0.0, []
    for name, (owner, attribute, original, arguments) in replaced().items():
        if not calls[name]:
            continue
        each = _per_call(getattr(owner, attribute), arguments)
        each = max(0.0, each - _per_call(original, arguments)) if original else each
        total += calls[name] * each
        rows.append({"name": name, "calls": calls[name], "seconds_per_call": each})
        table.add_row(
            name, str(calls[name]), f"{each * 1e6:.2f}", f"{each * calls[name] * 1e6:.1f}"
        )
    profile = cProfile.Profile()
    profile.runcall(step)
    stats: Any = pstats.Stats(profile)
    inside = sum(
        entry[2] for where, entry in stats.stats.items() if where[0].endswith("policy/runtime.py")
    )
    CONSOLE.print(table)
    print(
        f"{total * 1e3:.3f} ms, {total / seconds:.3%} of the step; under cProfile "
        f"{inside / stats.total_tt:.3%}\n"
    )
    return {
        "step": label,
        "share": total / seconds,
        "cprofile_share": inside / stats.total_tt,
        "calls": rows,
    }


def _per_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    return min(timeit.repeat(lambda: function(*arguments), number=2000, repeat=9)) / 2000
