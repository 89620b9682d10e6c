"""The calculator as an OpenEnv server: evaluate with `expression`, then give the `answer`.

.venv-agents/openenv/bin/python examples/agents/calculator_server.py 8000
"""

from __future__ import annotations

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


def value(expression):
    """The text that the model reads: a fault of its call is not a fault of the server."""
    if set(expression) - set("0123456789+-* ") or "**" in expression:
        return "Error: only integers and + - *"
    try:
        return str(eval(expression))
    except SyntaxError:
        return "Error: no expression"


class CalculatorAction(Action):
    """One of the two."""

    expression: str = ""
    answer: str = ""


class CalculatorObservation(Observation):
    """The problem, or a value."""

    text: str = ""


class Calculator(Environment):
    """A product; the reward is 1 for its value as the answer."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        """A product of the seed."""
        dice = random.Random(seed)
        self.a, self.b = dice.randint(2, 9), dice.randint(2, 9)
        return CalculatorObservation(text=f"{self.a}*{self.b}=")

    def step(self, action, timeout_s=None, **kwargs):
        """A value of an expression, or the end."""
        if action.answer:
            right = action.answer == str(self.a * self.b)
            return CalculatorObservation(text="the end", reward=float(right), done=True)
        return CalculatorObservation(text=value(action.expression), reward=0.0)

    @property
    def state(self):
        """There is no more than the problem."""
        return State()


app = create_app(
    Calculator,
    CalculatorAction,
    CalculatorObservation,
    env_name="calculator",
    max_concurrent_envs=64,
)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
