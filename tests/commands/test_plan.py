"""`plan` and `recipes` on the command line, and what `train` refuses on a GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from megatron_stare.__main__ import main
from megatron_stare.commands.plan import refuse_what_cannot_fit
from megatron_stare.config import Config, UserError, override
from megatron_stare.config.rollout import SHARE_VARIABLE
from megatron_stare.planning.machine import H100
from megatron_stare.planning.plan import colocated_share, make_plan, share_memory
from megatron_stare.planning.tables import BASIS
from megatron_stare.recipes import CLUSTERS, RECIPES, find_recipe


def test_a_plan_prints_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "short_cot_7b"]) == 0
    shown = capsys.readouterr().out
    for words in ("optimizer state", "weights to servers", "GPU-hours", "tensor group", "\nfits"):
        assert words in shown
    assert BASIS in shown and "With servers on GPUs of their own, 1 step off (4 + 4" in shown


def test_a_plan_that_does_not_fit_has_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "short_cot_7b", "policy.max_tokens_per_gpu=40000"]) == 1
    assert "does not fit: stage 0" in capsys.readouterr().out


def test_the_list_has_every_recipe_with_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--list"]) == 0
    _, *lines, note = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CLUSTERS)
    assert note == BASIS
    assert main(["recipes"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(RECIPES)


def test_adapters_of_32b_fit_where_its_weights_do_not_train(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "long_cot_32b_lora"]) == 0
    capsys.readouterr()
    assert main(["plan", "long_cot_32b_lora", "adapters.rank=0"]) == 1
    assert "most of it is optimizer state" in capsys.readouterr().out


def test_a_plan_names_missing_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2 and "--list" in capsys.readouterr().err
    assert main(["plan", "quickstart"]) == 2 and "give --gpus" in capsys.readouterr().err
    for words in (["--gpus", "-4"], ["--response-tokens", "-1"], ["--response-tokens", "99999"]):
        assert main(["plan", "short_cot_7b", *words]) == 2
        assert f"{words[0]} {words[1]} " in capsys.readouterr().err


def test_a_plan_refuses_lengths_beyond_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    words = "rollout.rollout_max_response_len=3073", "policy.max_tokens_per_gpu=8192"
    assert main(["plan", "short_cot_7b", *words]) == 2
    assert "= 4097 exceed the model's max_position_embeddings=4096" in capsys.readouterr().err


def test_training_is_refused_before_anything_is_launched() -> None:
    """As the command does it on a node of H100s."""
    config = find_recipe("short_cot_7b")
    refuse_what_cannot_fit(config, 4, 4, 80e9, 4)
    refuse_what_cannot_fit(
        find_recipe("quickstart"), 1, 1, 80e9, 1
    )  # its model is still to be made
    with pytest.raises(UserError, match="--force starts the run"):
        refuse_what_cannot_fit(config, 4, 4, 40e9, 4)
    apart = override(config, ["sglang.colocated=false"])
    refuse_what_cannot_fit(apart, 4, 4, 80e9, 8)
    with pytest.raises(UserError, match="need the GPUs 4 to 7, and this node has 7; lower them"):
        refuse_what_cannot_fit(apart, 4, 4, 80e9, 7)
    with pytest.raises(UserError, match="need the GPUs 0 to 3, and this node has 2; lower them or"):
        refuse_what_cannot_fit(config, 4, 2, 80e9, 2)
    with pytest.raises(UserError, match=r"first_gpu=3 is one of the 4 GPUs that train here; leave"):
        refuse_what_cannot_fit(override(apart, ["sglang.first_gpu=3"]), 4, 4, 80e9, 8)
    for elsewhere in ("sglang.urls=[http://node1:30000]", "sglang.server_args=--base-gpu-id 0"):
        refuse_what_cannot_fit(override(apart, [elsewhere]), 4, 4, 80e9, 4)


def test_every_command_that_trains_asks_the_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(config: Config) -> None:
        raise UserError(f"no room in {config.run.dir}")

    monkeypatch.setattr("megatron_stare.commands.plan.refuse_on_gpus", refused)
    for words in (["train", "quickstart"], ["compare", "quickstart", "--losses", "stare"]):
        assert main(words) == 2 and "no room in runs/quickstart" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in CLUSTERS if "grpo" not in name])
def test_a_colocated_server_takes_what_the_trainer_leaves(name: str) -> None:
    """An unknown number of ranks gives a smaller fraction, because a rank may hold more."""
    config, ranks = find_recipe(name), CLUSTERS[name].trainer_gpus
    plan = make_plan(config, CLUSTERS[name])
    share = colocated_share(config, ranks, 80e9)
    held = max(rank.generating for rank in plan.ranks)
    assert held + share * 80e9 + H100.server_bytes <= H100.usable_bytes
    least = 0.5 if name == "short_cot_32b_lora" else 0.6  # its rank keeps a quarter of the weights
    assert least < share <= H100.static_share
    assert least < colocated_share(config, 0, 80e9) <= share


def test_only_started_colocated_servers_get_the_memory_fraction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = find_recipe("short_cot_7b")
    monkeypatch.setenv(SHARE_VARIABLE, "0.1")  # of another run in this process
    share_memory(config)
    assert SHARE_VARIABLE not in os.environ, "there is no GPU"
    properties = SimpleNamespace(total_memory=80e9)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    monkeypatch.setenv("WORLD_SIZE", "4")
    share_memory(override(config, ["sglang.server_args=--x 1"]))
    assert os.environ[SHARE_VARIABLE] == f"{colocated_share(config, 4, 80e9):.2f}"
    for words in (
        "sglang.server_args=--mem-fraction-static 0.5",
        "sglang.urls=[http://a:1]",
        "sglang.colocated=false",
        "rollout.engine=embedded",
        "policy.hf_checkpoint=",
    ):
        share_memory(override(config, [words]))
        assert SHARE_VARIABLE not in os.environ
