"""What every way of getting weights to servers can do."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_stare.rollout.sglang.server import Server
from megatron_stare.sync.parts import Part


class Transport:
    """One way of getting buckets to servers. `session`: whether they must be told where an update
    begins and ends. `counts_changes`: whether it says itself which share of the weights changed.
    """

    session = True
    counts_changes = False

    def send(self, part: Part, servers: Sequence[Server], tag: str | None) -> None:
        """Deliver one bucket to all the servers.
        `tag`, their name for the weights, comes with the last.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Return when the servers have loaded all that was sent; raises what they failed at.
        Nothing where `send` waits.
        """

    def abandon(self, error: Exception) -> None:
        """A stream of weights ended with this error, or arrived wrong; another one follows."""

    def metrics(self) -> dict[str, float]:
        """What it has to say of the last sync."""
        return {}
