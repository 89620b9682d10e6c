"""The verifier of rows of reasoning-gym (data/sources.py). It is apart from the others, because
`warm_up` is called for a verifier's whole module.
"""

from __future__ import annotations

import contextlib
from typing import Any

from megatron_stare.scoring.verdict import Verdict, unverifiable
from megatron_stare.scoring.verifiers import extract


def reasoning_gym(
    response: str,
    label: str,
    metadata: dict[str, Any],
    extraction: str = "any",
    tag: str = "answer",
) -> Verdict:
    """The score of reasoning-gym's own scorer for the extracted answer, in [0, 1]; correct at 1.

    The whole response is never scored: some scorers give a part of the score to any text that holds
    the answer. Unverifiable: a row of another source, or the package is missing.
    """
    name, entry = metadata.get("reasoning_gym"), metadata.get("entry")
    if not isinstance(name, str) or not isinstance(entry, dict):
        return unverifiable("the row's metadata has no reasoning_gym and entry; see docs/data.md")
    from reasoning_gym import get_score_answer_fn

    answer = extract(response, extraction, tag)
    score = float(get_score_answer_fn(name)(answer, entry))
    return Verdict(score, "correct" if score >= 1 else "wrong", answer)


def warm_up() -> None:
    """Import the package, which takes seconds of a busy machine: the first sample's deadline must
    not pay for that. Without it the samples are unverifiable.
    """
    with contextlib.suppress(ImportError):
        import reasoning_gym  # noqa: F401
