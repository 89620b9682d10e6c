"""`algorithms NAME`: an objective in full, and all of them as the table of docs/algorithms.md; made
from the registry.
"""

from __future__ import annotations

import inspect

from megatron_stare.losses.registry import Objective, all_objectives, find_objective
from megatron_stare.losses.settings import REQUIRED, Setting

HEADER = ("name", "family", "needs", "defaults", "source", "known from", "head")


def rows() -> list[tuple[str, ...]]:
    """One row per objective, under HEADER."""
    return [
        (
            objective.name,
            objective.family,
            ", ".join(objective.needs),
            _defaults(objective),
            objective.source,
            objective.confidence,
            objective.head,
        )
        for objective in all_objectives().values()
    ]


def markdown() -> str:
    """The table as docs/algorithms.md has it."""
    lines = [HEADER, ("---",) * len(HEADER), *rows()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(name: str) -> str:
    """All that is known of one objective. UserError: an unknown name."""
    objective = find_objective(name)
    plan = inspect.getdoc(objective.planner) if objective.needs_scores else ""
    facts = [
        f"{objective.name}: {objective.family}"
        + (f", arXiv {objective.source}" if objective.source else ""),
        f"known from: {objective.confidence}",
        f"loss.aggregation={objective.aggregation}",
        f"head: {objective.head}",
        f"needs: {', '.join(('log_prob', 'advantages', *objective.needs))}",
    ]
    settings = [
        f"  {setting.key}={_value(setting)}  ({setting.values})"
        for setting in objective.settings.values()
    ]
    parts = ["\n".join(facts), inspect.getdoc(objective.function) or ""]
    parts += [f"Its plan: {plan}"] if plan else []
    parts += ["Settings:\n" + "\n".join(settings)] if settings else []
    return "\n\n".join(parts)


def _defaults(objective: Objective) -> str:
    common = ("aggregation", "padded_length")
    own = [setting for setting in objective.settings.values() if setting.name not in common]
    return ", ".join(f"{setting.name} {_value(setting)}" for setting in own)


def _value(setting: Setting) -> str:
    if setting.default is REQUIRED:
        return "required"
    if setting.default is None:
        return "unset"
    return f"{setting.default:g}" if setting.kind is float else str(setting.default)
