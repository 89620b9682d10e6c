"""Rows of the package reasoning-gym: about a hundred procedural data sets, each with a scorer.

A source is `reasoning_gym:NAME?key=value&key=value`: `size` and `seed` of the data set, and its own
settings, e.g. reasoning_gym:chain_sum?size=500&seed=1&max_terms=3. The reward `reasoning_gym`
(scoring/verifiers.py) gives a row to the scorer of its data set.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatron_stare.config import UserError, nearest

PREFIX = "reasoning_gym:"
SIZE, SEED = 1000, 0  # of a source that names none


def gym_rows(source: str) -> Iterator[dict[str, Any]]:
    """Every row of a source. UserError: the package is missing, there is no such data set or
    setting, or the data set's scorer does not accept its own answer.
    """
    name, _, written = source.removeprefix(PREFIX).partition("?")
    dataset = _dataset(source, name, _settings(source, written))
    _check_scorer(source, name, _as_in_a_file(dataset[0]))
    return (_row(name, _as_in_a_file(entry)) for entry in dataset)


def _as_in_a_file(entry: dict[str, Any]) -> dict[str, Any]:
    """Without tuples and other types that JSON lacks."""
    return json.loads(json.dumps(entry, default=str))


def _row(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": entry["question"]}],
        "label": str(entry["answer"]),
        "metadata": {"reasoning_gym": name, "entry": entry},
        "data_source": f"{PREFIX}{name}",
    }


def _settings(source: str, written: str) -> dict[str, Any]:
    found: dict[str, Any] = {"size": SIZE, "seed": SEED}
    for pair in filter(None, written.split("&")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"{source}: {pair!r} is not key=value; write NAME?size=500&seed=1")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _dataset(source: str, name: str, settings: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError(
            f"{source} needs the package reasoning-gym: pip install reasoning-gym==0.1.25"
        ) from None
    if name not in DATASETS:
        raise UserError(
            f"{source}: {name!r} is not a data set of reasoning-gym{nearest(name, DATASETS)}"
        )
    try:
        return reasoning_gym.create_dataset(name, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"{source}: reasoning-gym refuses these settings: {error}") from None


def _check_scorer(source: str, name: str, entry: dict[str, Any]) -> None:
    import reasoning_gym

    score = reasoning_gym.get_score_answer_fn(name)(entry["answer"], entry)
    if score < 1:
        raise UserError(
            f"{source}: the scorer of {name} gives the data set's own answer {score:g} instead of "
            "1, so that no response could be right; choose another data set"
        )
