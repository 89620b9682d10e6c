"""Reward functions by name or dotted path. A reward is f(response, label, metadata) -> float."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

from megatron_stare.config import UserError, nearest
from megatron_stare.scoring.mirror_grid import mirror_grid_reward

Reward = Callable[[str, str, dict[str, Any]], float]


def math_reward(response: str, label: str, metadata: dict[str, Any]) -> float:
    """1 where the response's last answer equals the label mathematically (math-verify), else 0.

    Without an expression that math-verify can read on both sides, the texts are compared instead, so a label such as
    "34" or "\\boxed{34}" or a word is never unanswerable. math-verify's own time limits hold (5 s to parse and verify).
    """
    gold = _parsed_label(label)
    answer = _math_verify().parse(response)
    if gold and answer:
        return float(_math_verify().verify(gold, answer))
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", response)
    return float(bool(boxed) and boxed[-1].strip() == _unboxed(label))


def find_reward(name: str) -> Reward:
    """The reward function of scoring.reward; UserError for an unknown name or an unimportable dotted path."""
    if name in REWARDS:
        return REWARDS[name]
    if "." not in name:
        raise UserError(f"scoring.reward={name!r} is unknown{nearest(name, REWARDS)}, or give package.module.function")
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"scoring.reward={name!r} cannot be imported ({error}); check the path and PYTHONPATH"
        ) from None
    if not callable(found):
        raise UserError(f"scoring.reward={name!r} is not callable; name a function f(response, label, metadata)")
    return found


REWARDS: dict[str, Reward] = {"math": math_reward, "mirror_grid": mirror_grid_reward}


@functools.cache
def _math_verify() -> Any:
    import math_verify

    return math_verify


@functools.lru_cache(maxsize=4096)
def _parsed_label(label: str) -> Any:
    return _math_verify().parse(label if "\\boxed" in label else f"\\boxed{{{label}}}")


def _unboxed(label: str) -> str:
    found = re.fullmatch(r"\s*\\boxed\{(.*)\}\s*", label, flags=re.DOTALL)
    return (found.group(1) if found else label).strip()
