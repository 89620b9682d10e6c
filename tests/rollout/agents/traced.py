"""An agent of verifiers that also writes down the tokens that verifiers itself would train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_stare_agents import verifiers_v1


async def run(row: Any, endpoint: Any) -> dict[str, Any]:
    """One episode; every branch of its traces goes to the file that the row's metadata names."""
    episode = await verifiers_v1.episode_of(row, endpoint)
    branches = [
        {name: list(getattr(branch, name)) for name in ("token_ids", "sampled_mask", "logprobs")}
        for trace in episode.traces
        for branch in trace.branches
    ]
    Path(row.metadata["branches"]).write_text(json.dumps(branches))
    return verifiers_v1.outcome_of(episode)
