"""What one rank found out, or failed at, known to all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_stare.config import EngineError, NoSignalError, UserError
from megatron_stare.policy.topology import Topology


def agreed[T](topology: Topology, work: Callable[[], T]) -> list[T]:
    """What `work` returns on each rank, on every rank; nothing that grows with tokens. Collective.

    What it raises on one rank is raised on all of them, so that they can save together: a UserError
    as it is, anything else as an EngineError that names the rank.
    """
    outcome: tuple[str, Any] = ("", None)
    failure: Exception | None = None
    try:
        outcome = ("", work())
    except Exception as error:
        failure, outcome = error, (type(error).__name__, str(error))
    everyone = topology.gather(outcome)
    if isinstance(failure, UserError | EngineError):
        raise failure
    for rank, (kind, text) in enumerate(everyone):
        if kind == "NoSignalError":
            raise NoSignalError(text)
        if kind == "UserError":
            raise UserError(text)
        if kind:
            raise EngineError(f"rank {rank}: {kind}: {text}") from failure
    return [value for _, value in everyone]
