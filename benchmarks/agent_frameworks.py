"""Unmodified agents of well-known libraries: their requests, sequences and trained tokens.

    make agents
    python benchmarks/agent_frameworks.py

One episode each on a scripted model, which thinks, calls a calculator and answers (smolagents: two
turns of its own kind). `trained` is the share of all sampled tokens that are loss tokens, `logged`
that of the sequences whose token ids are those that the engine was asked with and gave.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._phases import CONSOLE
from megatron_stare.compare.worlds.calculator import tool_tokenizer
from megatron_stare.records import Rollout
from tests.paths import ROOT
from tests.rollout.agents import test_agent_engine_frameworks as frameworks
from tests.rollout.agents.environments import multiplies, play, python_of, rows_of
from tests.rollout.agents.scripted import Scripted

AGENTS = (
    *("openai_agents", "openai_agents_streamed", "openai_agents_responses"),
    *("pydantic_ai", "langgraph", "anthropic_client", "responses_client"),
)
EXAMPLES = ROOT / "examples" / "agents"
V1 = json.loads((EXAMPLES / "verifiers_v1.json").read_text()) | {"path": str(EXAMPLES)}
V0 = {"id": "calculator_environment", "path": str(EXAMPLES)}
ENVIRONMENTS = {
    "verifiers 0.4": ("verifiers", "verifiers_v1", V1),
    "verifiers 0.1": ("verifiers-v0", "verifiers_v0", V0),
}


def episodes() -> Iterator[tuple[str, Rollout, Scripted]]:
    """Each agent's episode, and the engine that it was played on."""
    tokenizer = tool_tokenizer()
    for name in AGENTS:
        yield name, *frameworks.played(tokenizer, frameworks.thinks, name)
    yield "smolagents", *frameworks.played(tokenizer, frameworks.acts, "smolagents")
    yield "smolagents_code", *frameworks.played(tokenizer, frameworks.codes, "smolagents_code")
    for name, (environment, module, settings) in ENVIRONMENTS.items():
        python, inner = python_of(environment), Scripted(tokenizer, multiplies())
        rows = rows_of(python, module, settings, 1)
        (rollout,) = play(inner, tokenizer, python, module, rows)
        yield name, rollout, inner


def row_of(rollout: Rollout, inner: Scripted) -> list[str]:
    """The cells of an episode."""
    sampled = sum(len(given) for _, given in inner.log)
    logged = [prompt + given for prompt, given in inner.log]
    parts = [rollout.response_ids[begin:end].tolist() for begin, end in rollout.stretches]
    equal = sum(part in logged for part in parts) / len(parts)
    kinds = {
        name.removeprefix("tolerated/"): count
        for name, count in rollout.episode.items()
        if name.startswith("tolerated/")
    }
    shown = ", ".join(f"{name} {count:g}" for name, count in sorted(kinds.items()))
    cells: list[Any] = [len(inner.log), len(parts), shown]
    return [str(cell) for cell in (*cells, f"{rollout.loss_tokens / sampled:.0%}", f"{equal:.0%}")]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    table = Table()
    for name in ("agent", "requests", "sequences", "tolerated", "trained", "logged"):
        table.add_column(name, justify="left" if name in ("agent", "tolerated") else "right")
    for name, rollout, inner in episodes():
        table.add_row(name, *row_of(rollout, inner))
    CONSOLE.print(table)


if __name__ == "__main__":
    main()
