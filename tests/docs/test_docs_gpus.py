"""Commands of the pages that train on GPUs: what is refused there before the start, is refused here
too, on a machine without a GPU.
"""

from __future__ import annotations

import itertools
import shlex

import pytest

from megatron_stare.commands.plan import refuse_what_cannot_fit
from megatron_stare.config import override
from megatron_stare.recipes import CLUSTERS, find_recipe
from tests.docs.pages import commands

RUNS = {"runs/math": "short_cot_7b", "runs/lora": "short_cot_7b"}  # the recipe of a page's run
H100_BYTES = 80e9


def trained() -> dict[str, list[str]]:
    """The words of the commands that train a recipe under torchrun."""
    found = {}
    for command in commands():
        words = shlex.split(command)
        source = words[words.index("train") + 1] if "train" in words else ""
        if words[0] == "torchrun" and RUNS.get(source, source) in CLUSTERS:
            found[command] = words
    return found


TRAINED = trained()


@pytest.mark.parametrize("command", TRAINED)
def test_a_command_of_the_pages_is_not_refused_on_gpus(command: str) -> None:
    words = TRAINED[command]
    place = words.index("train")
    launcher, source, given = words[:place], words[place + 1], words[place + 2 :]
    sizes = dict(itertools.pairwise(launcher))
    nodes, local = int(sizes.get("--nnodes", 1)), int(sizes["--nproc-per-node"])
    config = override(find_recipe(RUNS.get(source, source)), [w for w in given if "=" in w])
    refuse_what_cannot_fit(config, nodes * local, local, H100_BYTES, gpus=8)


def test_the_pages_have_such_commands() -> None:
    asynchronous = [command for command in TRAINED if "rollout.asynchrony=" in command]
    assert len(TRAINED) >= 26 and len(asynchronous) >= 3
