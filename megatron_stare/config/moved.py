"""Keys that had another name in an earlier version: old runs go on, old commands are corrected."""

from __future__ import annotations

import copy
from typing import Any

# Since 0.2.0 evaluation.per_set.<name>.* is null where it is unset; 0.1.0 wrote 0, and temperature
# 0 is greedy today. A file of 0.1.0 is known by a key that has moved since: it holds them all.
UNSET_WAS_ZERO = ("n_samples", "temperature", "top_p", "max_response_len")

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

    A key that is there under both names keeps its new one. In a file with moved keys a 0 that
    meant unset becomes null, and is told of.
    """
    result = copy.deepcopy(tree)
    lines = []
    for old, new in MOVED.items():
        (section, name), (new_section, new_name) = old.split("."), new.split(".")
        fields = result.get(section)
        if isinstance(fields, dict) and name in fields:
            value = fields.pop(name)
            result.setdefault(new_section, {}).setdefault(new_name, value)
            lines.append(f"{old} is now {new}")
    return result, lines + (_unset(result) if lines else [])


def _unset(tree: dict[str, Any]) -> list[str]:
    """Write null for each 0 of evaluation.per_set that meant unset, in place; a line for each."""
    evaluation = tree.get("evaluation")
    per_set = evaluation.get("per_set") if isinstance(evaluation, dict) else None
    lines = []
    for name, settings in per_set.items() if isinstance(per_set, dict) else ():
        for key in UNSET_WAS_ZERO:
            if isinstance(settings, dict) and key in settings and settings[key] == 0:
                settings[key] = None
                lines.append(f"evaluation.per_set.{name}.{key}=0 meant unset and is now null")
    return lines
