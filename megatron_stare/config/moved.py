"""Keys that had another name in an earlier version: old runs go on, old commands are corrected."""

from __future__ import annotations

from typing import Any

# old dotted key -> today's, with the version that changed it. CHANGELOG.md lists the same pairs.
MOVED = {
    # 0.2.0
    "scoring.dynamic_sampling": "rollout.dynamic_sampling",
    "scoring.max_generation_rounds": "rollout.max_generation_rounds",
    "scoring.accept_partial_batch": "rollout.accept_partial_batch",
    "scoring.max_staleness": "rollout.max_staleness",
    "train.updates_per_rollout": "train.num_steps_per_rollout",
}


def renamed(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The nested settings with every moved key under its new name, and one line for each of them.

    A key that is there under both names keeps its new one.
    """
    result = {
        section: dict(fields) if isinstance(fields, dict) else fields
        for section, fields in tree.items()
    }
    lines = []
    for old, new in MOVED.items():
        (section, name), (new_section, new_name) = old.split("."), new.split(".")
        fields = result.get(section)
        if isinstance(fields, dict) and name in fields:
            value = fields.pop(name)
            result.setdefault(new_section, {}).setdefault(new_name, value)
            lines.append(f"{old} is now {new}")
    return result, lines
