"""The completion scripts, asked as a shell asks them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from megatron_stare.__main__ import main
from megatron_stare.commands.arguments import command_parsers
from megatron_stare.commands.configuration import PROGRAM, SHELLS, script


def completed(*words: str) -> list[str]:
    """The words that bash offers for the last one."""
    typed = " ".join(f"'{word}'" for word in (PROGRAM, *words))
    ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _megatron_stare"
    text = f"{script('bash', command_parsers())}\n{ask}\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_commands_options_recipes_and_fields() -> None:
    assert completed("con") == ["convert", "config"]
    assert completed("train", "short_cot_7") == ["short_cot_7b", "short_cot_7b_grpo_ds"]
    assert completed("train", "quickstart", "--dr") == ["--dry-run"]
    assert completed("train", "quickstart", "optimizer.l") == [
        "optimizer.lr=",
        "optimizer.lr_decay_style=",
        "optimizer.lr_decay_iters=",
        "optimizer.lr_warmup_iters=",
    ]
    assert completed("report", "quickst") == [], "it takes a directory"


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_accepts_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "quickstart" in text and "optimizer.lr=" in text and "dry-run" in text
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)
