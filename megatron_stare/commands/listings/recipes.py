"""`recipes`: what there is to train, with the GPUs it is laid out for."""

from __future__ import annotations

import functools
import inspect

from megatron_stare.recipes import RECIPES, cluster_of


def text() -> str:
    """One line a recipe: name, GPUs that train + of servers, the first sentence of what it says."""
    rows = []
    for name, recipe in RECIPES.items():
        cluster = cluster_of(name)
        gpus = f"{cluster.trainer_gpus} + {cluster.rollout_gpus} GPUs" if cluster else "no GPU"
        original = recipe.args[0] if isinstance(recipe, functools.partial) else recipe
        said = " ".join((inspect.getdoc(original) or "").split()).partition(". ")[0].rstrip(".")
        if original is not recipe:
            said = f"{original.__name__} with GRPO-ds"
        rows.append(f"{name:26}{gpus:16}{said}")
    return "\n".join(rows)
