"""`plan` and `recipes` on the command line, and what `train` refuses on a GPU."""

from __future__ import annotations

import pytest

from megatron_stare.__main__ import main
from megatron_stare.commands.plan import refuse_what_cannot_fit
from megatron_stare.config import UserError, override
from megatron_stare.planning.tables import BASIS
from megatron_stare.recipes import CLUSTERS, RECIPES, find_recipe


def test_a_plan_prints_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "short_cot_7b"]) == 0
    shown = capsys.readouterr().out
    for words in ("optimizer state", "weights to servers", "GPU-hours", "tensor group", "\nfits"):
        assert words in shown
    assert BASIS in shown and "With servers on GPUs of their own, 1 step off (4 + 4" in shown


def test_what_does_not_fit_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "short_cot_7b", "policy.max_tokens_per_gpu=40000"]) == 1
    assert "does not fit: stage 0" in capsys.readouterr().out


def test_the_list_has_every_recipe_with_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--list"]) == 0
    _, *lines, note = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CLUSTERS)
    assert note == BASIS
    assert main(["recipes"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(RECIPES)


def test_a_plan_says_that_it_does_not_know_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "short_cot_7b", "adapters.rank=8"])
    assert "adapters are not planned yet" in capsys.readouterr().out
    main(["plan", "short_cot_7b"])
    assert "adapters" not in capsys.readouterr().out


def test_what_a_plan_needs_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2 and "--list" in capsys.readouterr().err
    assert main(["plan", "quickstart"]) == 2 and "give --gpus" in capsys.readouterr().err


def test_training_is_refused_before_anything_is_launched() -> None:
    """As the command does it on a node of H100s."""
    config = find_recipe("short_cot_7b")
    refuse_what_cannot_fit(config, 4, 4, 80e9)
    with pytest.raises(UserError, match="--force starts the run"):
        refuse_what_cannot_fit(config, 4, 4, 40e9)
    beside = override(config, ["sglang.colocated=false", "sglang.sync_method=broadcast"])
    with pytest.raises(UserError, match="one of the 4 GPUs that train"):
        refuse_what_cannot_fit(beside, 4, 4, 80e9)
    elsewhere = override(beside, ["sglang.urls=[http://node1:30000]"])
    refuse_what_cannot_fit(elsewhere, 4, 4, 80e9)
