"""Recipes: functions without arguments that return a Config. `train <name>` runs one.

`recipes` lists them. CLUSTERS has the GPUs of those that need more than a laptop, and each of these
has a baseline under <name>_grpo_ds: the same run with the objective GRPO-ds.
"""

import dataclasses
from pathlib import Path

from megatron_stare.config import Config, UserError, load, nearest, override
from megatron_stare.recipes.published import BASELINE, CLUSTERS, PUBLISHED, Cluster, Recipe
from megatron_stare.recipes.quickstart import quickstart
from megatron_stare.recipes.smollm2 import smollm2_135m, smollm2_135m_lcm

# isort: off
# Published recipes register on import; `recipes` lists them in this order.
import megatron_stare.recipes.short_cot
import megatron_stare.recipes.long_cot  # noqa: F401
from megatron_stare.recipes.tool_use import tool_use_quickstart
# isort: on

QUICKSTARTS = (quickstart, smollm2_135m, smollm2_135m_lcm, tool_use_quickstart)
RECIPES: dict[str, Recipe] = {each.__name__: each for each in QUICKSTARTS} | PUBLISHED


def find_recipe(name: str) -> Config:
    """The Config of a recipe; UserError lists the valid names and the nearest."""
    if name not in RECIPES:
        raise UserError(
            f"recipe {name!r} is unknown{nearest(name, RECIPES, 'recipes')}; or give a YAML file"
        )
    return RECIPES[name]()


def cluster_of(name: str) -> Cluster | None:
    """The GPUs that a recipe, or the baseline of one, is laid out for; None for the quickstarts."""
    return CLUSTERS.get(name.removesuffix(f"_{BASELINE}"))


def config_of(source: str, overrides: list[str]) -> Config:
    """The Config of a recipe, a YAML file or a run directory, with the overrides applied."""
    path = Path(source)
    directory = path if path.is_dir() else None
    if directory:
        path = directory / "config.yaml"
    if path.suffix not in (".yaml", ".yml"):
        return override(find_recipe(source), overrides)
    if directory and (directory / "config.json").is_file() and not path.is_file():
        raise UserError(
            f"{source} is a model; give a recipe, a YAML file or a run directory, and then "
            f"policy.hf_checkpoint={source}"
        )
    if not path.is_file():
        raise UserError(
            f"{path} does not exist; give a recipe (`recipes` lists them), a YAML file or a run "
            "directory"
        )
    config = load(path)
    if directory:
        run = dataclasses.replace(config.run, dir=str(directory))
        config = dataclasses.replace(config, run=run)
    return override(config, overrides)
