"""`algorithms`: the objectives in a table for the terminal, as their source declares them, and one
in full, from the registry. The source is read, not run: running it imports torch, which would be
most of the command's seconds.
"""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megatron_stare
from megatron_stare.commands.arguments import argument, command

if TYPE_CHECKING:
    from megatron_stare.losses.registry import Objective
    from megatron_stare.losses.settings import Setting

LOSSES = Path(megatron_stare.__file__).parent / "losses"
FACTS = ("family", "source", "confidence", "head", "needs")
HEADER = ("name", "family", "needs", "defaults", "source", "known from", "head")


@command(
    "algorithms",
    "list every objective, or show one with its settings",
    argument("name", nargs="?", default="", help="an objective, e.g. ce_gppo"),
    examples=("algorithms", "algorithms stare"),
)
def _algorithms(options: argparse.Namespace) -> int:
    print(page(options.name) if options.name else text())
    return 0


def text() -> str:
    """The table; `algorithms NAME` has an objective's settings."""
    table = [("name", "family", "source", "known from", "head", "needs")]
    for name, facts in declared().items():
        needs = ", ".join(facts["needs"])
        table.append(
            (name, *(facts[key] for key in ("family", "source", "confidence", "head")), needs)
        )
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def declared() -> dict[str, dict[str, Any]]:
    """Name -> FACTS of every objective under losses/, in the order of their names."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in LOSSES.rglob("*.py")}
    calls = dict(call for tree in trees.values() for call in _declarations(tree))
    defaults = _declared_defaults(trees[LOSSES / "registry.py"])
    return {name: _facts(name, calls, defaults) for name in sorted(calls)}


def _declarations(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """The name and the call of every `@policy_loss(...)` and `variant(name, of, ...)`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if call := _call(decorator, "policy_loss"):
                    yield node.name, call
        elif isinstance(node, ast.Expr) and (call := _call(node.value, "variant")):
            yield ast.literal_eval(call.args[0]), call


def _call(node: ast.expr, function: str) -> ast.Call | None:
    """The node, if it calls the function of that name."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node if node.func.id == function else None
    return None


def _declared_defaults(registry: ast.Module) -> dict[str, Any]:
    """The defaults of FACTS in the class Objective."""
    (objective,) = (
        node
        for node in registry.body
        if isinstance(node, ast.ClassDef) and node.name == "Objective"
    )
    return {
        node.target.id: ast.literal_eval(node.value)
        for node in objective.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id in FACTS
        and node.value is not None
    }


def _facts(name: str, calls: Mapping[str, ast.Call], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The declared facts over those it starts from: the defaults, or a variant's parent."""
    call = calls[name]
    base = defaults
    if _call(call, "variant"):
        base = _facts(ast.literal_eval(call.args[1]), calls, defaults)
    said = {
        keyword.arg: ast.literal_eval(keyword.value)
        for keyword in call.keywords
        if keyword.arg in FACTS
    }
    return {**base, **said}


def rows() -> list[tuple[str, ...]]:
    """One row per objective, under HEADER."""
    from megatron_stare.losses.registry import all_objectives

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
    from megatron_stare.losses.registry import find_objective

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
    from megatron_stare.losses.settings import REQUIRED

    if setting.default is REQUIRED:
        return "required"
    if setting.default is None:
        return "unset"
    return f"{setting.default:g}" if setting.kind is float else str(setting.default)
