"""Runs the adapters of other libraries' environments on a scripted model."""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import Any

from megatron_stare.config import AgentsConfig
from megatron_stare.records import Prompt, Rollout
from megatron_stare.rollout.agents.agent_engine import AgentEngine
from megatron_stare.rollout.engine import Request, SamplingParams
from tests.paths import ROOT
from tests.rollout.agents.scripted import Scripted

AGENTS = ROOT / ".venv-agents"
CALL = '<tool_call>{{"name":  "{}", "arguments": {{ "{}" :"{}"}}}}</tool_call><|end|>'


def python_of(name: str) -> str:
    return str(AGENTS / name / "bin" / "python")


def rows_of(python: str, module: str, settings: dict[str, Any], count: int = 4) -> list[Any]:
    command = [python, "-m", "megatron_stare_agents.rows", module, json.dumps(settings)]
    command += ["--count", str(count)]
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def play(
    inner: Scripted, tokenizer: Any, python: str, module: str, rows: list[Any], **settings: Any
) -> list[Rollout]:
    """An episode of every row, all at once; `module`: an adapter, or a dotted path."""
    function = f"{module if '.' in module else f'megatron_stare_agents.{module}'}.run"
    config = AgentsConfig(hosts=1, function=function, python=python, **settings)
    engine = AgentEngine(inner, tokenizer, config, 100_000)  # type: ignore[arg-type]
    asked = []
    for number, row in enumerate(rows):
        messages, label = tuple(row["prompt"]), row["label"]
        prompt = Prompt(number, [1], label, metadata=row["metadata"], messages=messages)
        asked.append(Request(prompt.token_ids, (0, number, 0, 0), prompt=prompt))
    try:
        futures = engine.submit(asked, SamplingParams(1.0, 1.0, 1000))
        return [future.result(timeout=240) for future in futures]
    finally:
        engine.close()


def multiplies(tool: str = "calculator") -> Any:
    """Calls the tool with the first product of the prompt, then answers with the tool's value."""

    def answer(text: str, number: int) -> str:
        (a, b), *_ = re.findall(r"(\d)\*(\d)=", text)
        if "<tool>" not in text:
            return "<think>hm</think>\n\n" + CALL.format(tool, "expression", f"{a}*{b}")
        return f"<think>good</think>\n\n\\boxed{{{int(a) * int(b)}}}<|end|>"

    return answer
