"""The calculator as an environment of verifiers 0.1: products of two digits, or with
kind="quickstart" the problems of the recipe tool_use_quickstart.
"""

from __future__ import annotations

import random

import verifiers as vf
from datasets import Dataset


def calculator(expression: str) -> str:
    """Evaluates an expression of integers, such as 6*7.

    Args:
        expression: the expression
    """
    if set(expression) - set("0123456789+-* ") or "**" in expression:
        return "Error: no expression"
    try:
        return str(eval(expression))
    except SyntaxError:
        return "Error: no expression"


def correct(completion, answer) -> float:
    """1 where the boxed answer is the value."""
    return float(f"\\boxed{{{answer}}}" in str(completion[-1]["content"]))


def problem(kind: str, dice: random.Random) -> str:
    """6*7, or 37*4+12 and the like."""
    if kind == "product":
        return f"{dice.randint(2, 9)}*{dice.randint(2, 9)}"
    first, second, third = dice.randrange(10, 100), dice.randrange(2, 10), dice.randrange(10, 100)
    return f"{first}{dice.choice('*+-')}{second}{dice.choice('+-')}{third}"


def load_environment(count: int = 100, kind: str = "product") -> vf.Environment:
    """Problems, a calculator, and whether the answer is right."""
    dice = random.Random(0)
    problems = [problem(kind, dice) for _ in range(count)]
    rows = [{"question": f"{each}=", "answer": str(eval(each))} for each in problems]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows),
        tools=[calculator],
        rubric=vf.Rubric(funcs=[correct]),
        max_turns=5,
    )
