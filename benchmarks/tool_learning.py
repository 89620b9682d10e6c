"""The calculator task learnt in three ways from the same cold starts, seed by seed.

    make agents
    python benchmarks/tool_learning.py runs/ways --seeds 0,1,2

    tool_engine   the recipe tool_use_quickstart: the trainer's own loop of turns
    openai_agents an unmodified agent of openai-agents (examples/agents/calculator_agent.py)
    verifiers     an environment of verifiers 0.1 (examples/agents/calculator_environment.py)

The last two call the model through the endpoint. All arms have the recipe's settings, and void
turns stay in the loss, because an agent's framework does not report them. The table shows the mean
reward of the first and of the last steps for each seed; training problems are not repeated within a
run, so that the reward is that of problems not seen before. A directory with finished runs is
read again, without training.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._measuring import machine
from benchmarks._phases import CONSOLE
from megatron_stare.recipes.quickstart import ARMS
from tests.paths import ROOT

AGENTS = ROOT / ".venv-agents"
ENVIRONMENT = {
    "id": "calculator_environment",
    "path": str(ROOT / "examples" / "agents"),
    "args": {"kind": "quickstart", "count": 4096},
}
MEASURED = {"reward": "reward", "episode/tool_calls": "tool calls", "entropy": "entropy"}


def arms(rows: Path) -> dict[str, list[str]]:
    """The overrides of every arm."""
    common = [*ARMS["stare"], "tools.filter_void_turns=false"]
    endpoint = [
        *("tools.environment=", "scoring.reward=episode", "rollout.rollout_max_response_len=60"),
        "agents.max_calls=3",
    ]
    return {
        "tool_engine": common,
        "openai_agents": [
            *(*common, *endpoint, "agents.function=examples.agents.calculator_agent.run"),
            f"agents.python={AGENTS}/bin/python",
        ],
        "verifiers": [
            *(*common, *endpoint, "agents.function=megatron_stare_agents.verifiers_v0.run"),
            *(f"agents.python={AGENTS}/verifiers-v0/bin/python", f"data.prompt_data={rows}"),
        ],
    }


def train(directory: Path, seeds: str, overrides: list[str]) -> None:
    """Train what is missing in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = directory.resolve() / "verifiers.jsonl"
    python = str(AGENTS / "verifiers-v0" / "bin" / "python")
    module = ["-m", "megatron_stare_agents.rows", "verifiers_v0", json.dumps(ENVIRONMENT)]
    with rows.open("w") as file:
        subprocess.run([python, *module], cwd=ROOT, stdout=file, check=True)
    every = arms(rows)
    command = [sys.executable, "-m", "megatron_stare", "train", "tool_use_quickstart"]
    command += ["--seeds", seeds, f"compare.arms={json.dumps(every)}"]
    command += [f"compare.run=[{','.join(every)}]", f"run.dir={directory.resolve()}"]
    command += ["evaluation.eval_interval=0", *overrides]
    subprocess.run(command, cwd=ROOT, check=True)


def results(directory: Path, last: int) -> Table:
    """The table of all runs in `directory`."""
    table = Table(title=f"means of the first and of the last {last} steps")
    columns = (f"{name}, {part}" for name in MEASURED.values() for part in ("first", "last"))
    for name in ("way", "seed", "steps", *columns):
        table.add_column(name, justify="left" if name == "way" else "right", no_wrap=name == "way")
    for way in arms(Path()):
        for file in sorted(directory.glob(f"seed*/{way}/metrics.jsonl")):
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            seed = file.parents[1].name.removeprefix("seed")
            cells = []
            for name in MEASURED:
                values = [row[name] for row in rows if name in row]
                cells += [sum(part) / len(part) for part in (values[:last], values[-last:])]
            table.add_row(way, seed, str(len(rows)), *(f"{cell:.3f}" for cell in cells))
    return table


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs/tool_learning"))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--last", type=int, default=10, metavar="STEPS")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="OVERRIDE", help="section.field=value, for all"
    )
    options = parser.parse_args()
    train(options.directory, options.seeds, options.set)
    CONSOLE.print(machine(torch.device("cpu")))
    CONSOLE.print(results(options.directory, options.last))


if __name__ == "__main__":
    main()
