"""An environment in one file: the model looks facts up, and may be told that there are none.

    find_environment("examples.lookup_environment.LookupEnvironment")

A row's metadata brings the facts, {"facts": {"Oslo": "Norway"}}, so every episode has its own.
"""

from __future__ import annotations

import difflib
from typing import Any

from megatron_stare.records import Prompt
from megatron_stare.rollout.tools.environment import ToolError, function_tool


class LookupEnvironment:
    """One tool, `lookup(key)`. Made from a Prompt, used for one episode."""

    tools = (function_tool("lookup", "Look up a fact.", {"key": {"type": "string"}}, ["key"]),)

    def __init__(self, prompt: Prompt) -> None:
        self.facts: dict[str, str] = prompt.metadata["facts"]
        self.asked: list[str] = []

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The fact; a ToolError is shown to the model."""
        key = arguments["key"]
        self.asked.append(key)
        if key in self.facts:
            return self.facts[key]
        close = difflib.get_close_matches(key, self.facts, n=1)
        raise ToolError(
            f"nothing is known of {key!r}" + (f"; did you mean {close[0]!r}?" if close else "")
        )

    async def close(self) -> None:
        """Nothing is held; a database connection would be closed here."""
