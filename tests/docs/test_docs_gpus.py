"""Commands of the pages that train on GPUs: what is refused there before the start, is refused here
too, on a machine without a GPU.
"""

from __future__ import annotations

import shlex

import pytest

from megatron_stare.commands.plan import refuse_what_cannot_fit
from megatron_stare.config import override
from megatron_stare.recipes import CLUSTERS, find_recipe
from tests.docs.pages import commands

LAUNCHER = "torchrun --nproc-per-node "
RUNS = {"runs/math": "short_cot_7b", "runs/lora": "short_cot_7b"}  # the recipe of a page's run
H100_BYTES = 80e9


def trained() -> dict[str, tuple[int, str, list[str]]]:
    """Command -> ranks, recipe and overrides."""
    found = {}
    for command in commands():
        words = shlex.split(command)
        if not command.startswith(LAUNCHER) or "train" not in words:
            continue
        ranks, source, *given = (words[2], *words[words.index("train") + 1 :])
        recipe = RUNS.get(source, source)
        if recipe in CLUSTERS:
            overrides = [word for word in given if "=" in word]
            found[command] = (int(ranks), recipe, overrides)
    return found


TRAINED = trained()


@pytest.mark.parametrize("command", TRAINED)
def test_a_command_of_the_pages_is_not_refused_on_gpus(command: str) -> None:
    ranks, recipe, overrides = TRAINED[command]
    config = override(find_recipe(recipe), overrides)
    refuse_what_cannot_fit(config, ranks, ranks, H100_BYTES)


def test_the_pages_have_such_commands() -> None:
    asynchronous = [command for command in TRAINED if "rollout.asynchrony=" in command]
    assert len(TRAINED) >= 8 and len(asynchronous) >= 3
