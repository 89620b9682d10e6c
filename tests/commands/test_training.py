"""What `train` says at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stare.__main__ import main
from megatron_stare.api import TrainingResult
from megatron_stare.commands import training


@pytest.mark.parametrize("option", [["--load", "step_00000050"], ["--load=best"], []])
def test_the_command_that_continues_a_run_does_not_go_back_again(
    option: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["train", "quickstart", *option, f"run.dir={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["megatron_stare", *words])
    monkeypatch.setattr(training, "train", lambda config, **_: TrainingResult(tmp_path, False))
    assert main(words) == 0
    again = f"python -m megatron_stare train quickstart run.dir={tmp_path}"
    assert capsys.readouterr().err == f"stopped; `{again}` continues from the last checkpoint\n"
