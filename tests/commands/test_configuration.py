"""`config`: every field with its value, origin and sentence; the schema of them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megatron_stare.__main__ import main
from megatron_stare.commands import configuration
from megatron_stare.config import Config, override
from megatron_stare.config.run import settings
from megatron_stare.recipes import find_recipe


@pytest.mark.parametrize("recipe", ["quickstart", "tool_use_7b", "long_cot_30b_a3b"])
def test_the_printed_overrides_make_the_same_config(recipe: str) -> None:
    config = override(find_recipe(recipe), ["evaluation.eval_data.a=a.jsonl"])
    config = override(
        config, ["evaluation.per_set.a.n_samples=3", "data.system_prompt=it is: {x} \U0001f600"]
    )
    lines = configuration.text(config, config, "recipe").splitlines()
    assert len(lines) == len(settings())
    words = [shlex.split(line, comments=True)[0] for line in lines if "  # default" not in line]
    assert override(Config(), words) == config


def test_the_command_names_the_source_of_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["optimizer.lr=5e-4", "loss.alpha=0.02", "loss.gate=true", "rollout.engine=embedded"]
    assert main(["config", "quickstart", *asked, "sglang.api_key=hidden"]) == 0
    lines = {line.split("=")[0]: line for line in capsys.readouterr().out.splitlines()}
    comments = {key: line.split("  # ")[1] for key, line in lines.items() if "  # " in line}
    assert comments["optimizer.lr"].startswith(
        "override, recipe 0.001, default 1e-06. Peak learning"
    )
    assert comments["loss.alpha"].startswith("override, default 0.01. ")
    assert comments["optimizer.adam_beta2"].startswith("recipe, default 0.98. ")
    assert comments["loss.gate"].startswith("default. ")
    assert "hidden" not in "".join(lines.values())


def test_only_chosen_sections_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "quickstart", "--only", "mismatch"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.startswith("mismatch.") for line in lines)
    capsys.readouterr()
    for words, said in (
        ([], "needs a recipe"),
        (["quickstart", "--only", "mismach"], "no setting; did you mean 'mismatch'? (`config SOU"),
        (["--schema", "/nowhere/s.json"], "/nowhere/s.json: No such file or directory; choose an"),
    ):
        assert main(["config", *words]) == 2
        assert said in capsys.readouterr().err


def test_the_schema_knows_types_ranges_and_choices(tmp_path: Path) -> None:
    assert main(["config", "--schema", str(tmp_path / "schema.json")]) == 0
    sections = json.loads((tmp_path / "schema.json").read_text())["$defs"]
    assert sections["OptimizerConfig"]["properties"]["lr"]["minimum"] == 0
    variant = sections["LossConfig"]["properties"]["variant"]
    assert variant["enum"] == ["O1", "C2"] and variant["description"].startswith("Variant of STARE")
    assert sections["RunConfig"]["additionalProperties"] is False
