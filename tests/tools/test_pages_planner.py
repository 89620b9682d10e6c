"""docs/recipes.md and docs/scale.md say what the planner says, and their commands are taken."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import megatron_stare.__main__  # noqa: F401 -- the commands register there
from megatron_stare.commands.arguments import parse
from megatron_stare.config import override
from megatron_stare.recipes import CLUSTERS, find_recipe
from tests.paths import ROOT
from tools.pages.planner import PAGES, commands, rewritten, tables


def test_the_pages_are_up_to_date() -> None:
    """Else: python -m tools.pages"""
    found = tables(ROOT / "docs")
    marks: set[str] = set()
    for name in PAGES:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert rewritten(text, found) == text, name
        marks |= set(re.findall(r"<!-- plan: ([\w ]+) -->", text))
    assert marks == found.keys()


@pytest.mark.parametrize("name", CLUSTERS)
def test_commands_are_those_of_their_recipe(name: str) -> None:
    """Each command is valid: the program's own parser takes it, the configuration takes its
    overrides, and ranks, servers and places are the recipe's.
    """
    config, cluster = find_recipe(name), CLUSTERS[name]
    found = {}
    for command in commands(name, config, cluster):
        words = shlex.split(command)
        if words[0] == "hf":
            owner, model = words[2].split("/")
            assert owner and words[:2] == ["hf", "download"] and words[3] == "--local-dir"
            assert words[4] == config.policy.hf_checkpoint == f"models/{model}"
            continue
        if words[0] == "torchrun":
            launch = get_args_parser().parse_args(words[1:])
            assert launch.module and launch.training_script == "megatron_stare"
            ranks = int(launch.nnodes.split(":")[-1]) * int(launch.nproc_per_node)
            assert ranks == cluster.trainer_gpus
            words = ["python", "-m", "megatron_stare", *launch.training_script_args]
        assert words[:3] == ["python", "-m", "megatron_stare"]
        options = parse(words[3:])
        found[options.command] = options
        if hasattr(options, "overrides"):
            changed = override(config, options.overrides)
            if changed.sglang.urls:
                servers = len(set(changed.sglang.urls))
                assert servers * config.sglang.gpus_per_server == cluster.gpus
    assert found.keys() >= {"doctor", "plan", "train", "evaluate", "convert"}
    assert ("serve" in found) == (cluster.nodes > 1)
    run = Path(found["evaluate"].source)
    assert run.is_relative_to(config.run.dir) and found["convert"].checkpoint == run
    assert not config.compare.arms or run.name in config.compare.run
