"""Recipes: functions without arguments that return a Config. `train <name>` runs one."""

from collections.abc import Callable

from megatron_stare.config import Config, UserError, nearest
from megatron_stare.recipes.quickstart import quickstart
from megatron_stare.recipes.short_cot import short_cot_7b
from megatron_stare.recipes.tool_use_quickstart import tool_use_quickstart

RECIPES: dict[str, Callable[[], Config]] = {
    recipe.__name__: recipe for recipe in (quickstart, short_cot_7b, tool_use_quickstart)
}


def find_recipe(name: str) -> Config:
    """The Config of a recipe; UserError lists the valid names and the nearest."""
    if name not in RECIPES:
        raise UserError(
            f"recipe {name!r} is unknown{nearest(name, RECIPES)}; or give the path of a config.yaml"
        )
    return RECIPES[name]()
