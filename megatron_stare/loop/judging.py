"""The judge of a run, of an evaluation and of `grade`. Imports neither the policy nor an engine."""

from __future__ import annotations

from megatron_stare.config import Config
from megatron_stare.scoring.judge import Judge


def build_judge(config: Config) -> Judge:
    """The judge of scoring.reward and scoring.rewards; its user closes it. UserError for what it cannot work with.

    A reward that needs another layer (one that runs code in a sandbox) is built here and passed as `others`.
    """
    return Judge(config.scoring, config.rollout.rollout_max_response_len)
