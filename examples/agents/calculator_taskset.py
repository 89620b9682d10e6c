"""The calculator as a taskset of verifiers 0.4: its tool is an MCP server that verifiers starts.

PYTHON=.venv-agents/verifiers/bin/python
$PYTHON -m megatron_stare_agents.rows verifiers_v1 "$(cat examples/agents/verifiers_v1.json)"
"""

from __future__ import annotations

import random

import verifiers.v1 as vf

__all__ = ["CalculatorTaskset"]


class Data(vf.TaskData):
    """A product and its value."""

    answer: str = ""


class Tools(vf.Toolset[vf.ToolsetConfig]):
    """A calculator."""

    TOOL_PREFIX = None  # the model reads `calculator`, not `tools_calculator`

    @vf.tool
    async def calculator(self, expression: str) -> str:
        """Evaluates an expression of integers, such as 6*7."""
        if set(expression) - set("0123456789+-* ") or "**" in expression:
            return "Error: no expression"
        return str(eval(expression))


class Calculation(vf.Task[Data]):
    """Right if the value is in the last answer."""

    @classmethod
    def toolsets(cls, config):
        """The tools of the task."""
        return [Tools(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def correct(self, trace) -> float:
        """1 where the boxed answer is the value."""
        last = trace.nodes[-1].message
        return float(f"\\boxed{{{self.data.answer}}}" in str(last.content))


class CalculatorTaskset(vf.Taskset[Calculation]):
    """A hundred products."""

    def load(self):
        """The tasks."""
        dice = random.Random(0)
        for _ in range(100):
            a, b = dice.randint(2, 9), dice.randint(2, 9)
            data = Data(prompt=f"{a}*{b}=", answer=str(a * b))
            yield Calculation(data, self.config.task)


if __name__ == "__main__":
    Tools.run()
