"""An environment in one file: the model looks up facts, and reads an error if there are none.

    find_environment("examples.lookup_environment.LookupEnvironment")

A row's metadata has the facts, {"facts": {"Oslo": "Norway"}}, so every episode has other facts.
"""

from __future__ import annotations

import difflib
from typing import Any

from megatron_stare.records import Prompt
from megatron_stare.rollout.tools.environment import ToolError, function_tool


class LookupEnvironment:
    """An environment with one tool, `lookup(key)`. An instance serves one episode."""

    tools = (function_tool("lookup", "Look up a fact.", {"key": {"type": "string"}}, ["key"]),)

    def __init__(self, prompt: Prompt) -> None:
        self.facts: dict[str, str] = prompt.metadata["facts"]
        self.asked: list[str] = []

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The fact for a key. The model reads a ToolError as the tool's answer."""
        key = arguments["key"]
        self.asked.append(key)
        if key in self.facts:
            return self.facts[key]
        close = difflib.get_close_matches(key, self.facts, n=1)
        raise ToolError(
            f"nothing is known of {key!r}" + (f"; did you mean {close[0]!r}?" if close else "")
        )

    async def close(self) -> None:
        """Release resources; this environment has none."""
