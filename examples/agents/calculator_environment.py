"""The calculator as an environment of verifiers 0.1."""

from __future__ import annotations

import random

import verifiers as vf
from datasets import Dataset


def calculator(expression: str) -> str:
    """Evaluates an expression of integers, such as 6*7.

    Args:
        expression: the expression
    """
    if set(expression) - set("0123456789+-* "):
        return "Error: no expression"
    return str(eval(expression))


def correct(completion, answer) -> float:
    """1 where the boxed answer is the value."""
    return float(f"\\boxed{{{answer}}}" in str(completion[-1]["content"]))


def load_environment(count: int = 100) -> vf.Environment:
    """Products, a calculator, and whether the answer is right."""
    dice = random.Random(0)
    pairs = [(dice.randint(2, 9), dice.randint(2, 9)) for _ in range(count)]
    rows = [{"question": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows),
        tools=[calculator],
        rubric=vf.Rubric(funcs=[correct]),
        max_turns=5,
    )
