"""A directory with every file that the commands of the pages name: tiny, but real."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.docs.pages import blocks
from tests.docs.table import COMMANDS
from tests.docs.ways import Run
from tests.forked import Command
from tests.paths import ROOT
from tests.tiny_models import save_tokenizer, tiny_config, write_checkpoint

MODEL = "/models/Qwen2.5-Math-7B"
# Benchmarks that start no process. The others' processes import their file again, so they need a
# separate `python`.
ALONE = tuple(f"benchmarks/{name}.py" for name in ("study", "paired", "entropy_prediction"))


@dataclass(frozen=True)
class Done:
    """The exit code of a command, and its output on either stream."""

    code: int | None
    output: str


class World:
    """The directory, and the commands that have run in it; each runs once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.done: dict[str, Done] = {}
        self.forks = 0
        write_files(directory)

    def run(self, command: str, **special: Any) -> Done:
        """The result of the command, run as the table says, after the commands that it needs.

        `special` are fields of the entry that only the test knows.
        """
        if command not in self.done:
            way = dataclasses.replace(how(command), **special)
            for other in way.needs:
                assert self.run(other).code == 0, self.run(other).output
            if way.copy_of_the_run:
                shutil.copytree(self.directory / "runs/math", self.directory / way.copy_of_the_run)
            self.done[command] = self._run(command, way)
        return self.done[command]

    def expect(self, command: str, **special: Any) -> None:
        """Assert that the command ends with exit code 0."""
        done = self.run(command, **special)
        assert done.code == 0, done.output[-4000:]

    def _run(self, command: str, way: Run) -> Done:
        words = [words_for(word, way) for word in shlex.split(command)] + list(way.more)
        variables = []
        while "=" in words[0] and not words[0].startswith("-"):
            variables.append(words.pop(0))
        added = dict(variable.split("=", 1) for variable in variables)
        in_python = python_part(words)
        if in_python and (not in_python[0].startswith("benchmarks/") or in_python[0] in ALONE):
            return self._forked(in_python, added, way.seconds)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | added
        done = subprocess.run(
            words,
            cwd=self.directory if way.in_world else ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=way.seconds,
        )
        return Done(done.returncode, done.stdout)

    def _forked(self, words: list[str], added: dict[str, str], seconds: float) -> Done:
        self.forks += 1
        log = self.directory / f"output_{self.forks}.txt"
        command = Command(words, log, directory=self.directory, variables=added)
        return Done(command.wait(seconds), command.output)


def how(command: str) -> Run:
    """The table's entry for a command that is run in a world."""
    way = COMMANDS[command]
    run = way if isinstance(way, Run) else way.run
    assert run is not None, f"{command} is not run here"
    return run


def python_part(words: list[str]) -> list[str]:
    """The words after `python`; a torchrun of n processes counts as one of a single process."""
    program = Path(words[0]).name
    if program == "torchrun":
        assert words[1] == "--nproc-per-node" and words[3] == "-m", words
        return words[3:]
    return words[1:] if program in ("python", "python3") else []


def words_for(word: str, way: Run) -> str:
    """A word of the page, with its placeholder replaced by a path of this directory."""
    for placeholder, ours in {MODEL: "model", **dict(way.instead)}.items():
        if word == placeholder or word.endswith(f"={placeholder}"):
            return word.removesuffix(placeholder) + ours
    return word


def write_files(directory: Path) -> None:
    """Write every file that a page names; link the repository's own files."""
    model = tiny_config("qwen2", vocab_size=257, max_position_embeddings=2048)
    for name in ("model", "MODEL"):
        write_checkpoint(directory / name, model)
        save_tokenizer(directory / name)
    for name in ("tools", "benchmarks", ".venv"):
        (directory / name).symlink_to(ROOT / name)
    asked = [("What is $2+2$?", "4"), ("What is $3^2$?", "9"), ("What is $7-6$?", "1")]
    asked += [(f"What is {n} times seven, in plain digits?", str(7 * n)) for n in range(9)]
    rows = [problem(question, answer) for question, answer in asked]
    for name in ("dapo17k", "dapo17k_first2000", "aime24", "aime25", "amc23", "math500"):
        mine = rows if name.startswith("dapo") else rows[:2]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(mine), directory / f"{name}.parquet")
    plain = [{"prompt": question, "label": answer} for question, answer in asked]
    (directory / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
    (directory / "responses.jsonl").write_text(responses_of_the_page())
    for name, text in files_of_the_tutorials().items():
        (directory / name).write_text(text)


def files_of_the_tutorials() -> dict[str, str]:
    """Name -> content of every block of docs/tutorials/ that has a title."""
    found = {}
    for page in sorted((ROOT / "docs/tutorials").glob("*.md")):
        for block in filter(lambda block: block.title, blocks(page.read_text(encoding="utf-8"))):
            assert block.title not in found, f"two blocks are named {block.title}"
            found[block.title] = "".join(f"{line}\n" for line in block.lines)
    return found


def problem(question: str, answer: str) -> dict[str, object]:
    """A row of DAPO-Math-17k."""
    framed = (
        "Solve the following math problem step by step. The last line is the answer.\n\n"
        f'{question}\n\nRemember to put your answer on its own line after "Answer:".'
    )
    return {
        "prompt": [{"role": "user", "content": framed}],
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": question},
    }


def responses_of_the_page() -> str:
    """responses.jsonl as docs/rewards.md prints it."""
    text = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    block = text.split("$ cat responses.jsonl\n")[1].split("\n\n")[0]
    return "".join(f"{line.strip()}\n" for line in block.splitlines())
