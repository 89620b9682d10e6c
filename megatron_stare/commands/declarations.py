"""`algorithms`: the objectives in a table for the terminal, as their source declares them. It is
read, not run: running it imports torch, which would be most of the command's seconds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import megatron_stare

LOSSES = Path(megatron_stare.__file__).parent / "losses"
FACTS = ("family", "source", "confidence", "head", "needs")


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
    defaults = _defaults(trees[LOSSES / "registry.py"])
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


def _defaults(registry: ast.Module) -> dict[str, Any]:
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
