"""How long it would take to send all weights, or what changed of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Rates:
    """Seconds per byte of weights, but for `wire`; 0 where nothing was measured yet.

    compare, encode: what it takes here to compare with the last weights, and to make deltas too.
    whole, changed: what a mirror needs for weights that come whole, or as deltas. wire: seconds per
    byte that is sent. ratio: bytes of deltas per byte of weights.
    """

    compare: float = 0.0
    encode: float = 0.0
    ratio: float = 0.0
    wire: float = 0.0
    whole: float = 0.0
    changed: float = 0.0

    @property
    def full_seconds(self) -> float:
        """Per byte of weights, of a full sync: a bucket is sent while the next one is compared."""
        return max(self.compare, self.wire + self.whole)

    @property
    def delta_seconds(self) -> float:
        """The same of deltas."""
        return max(self.encode, self.wire * self.ratio + self.changed)

    @property
    def delta_pays(self) -> bool:
        """Whether deltas take less time than all weights."""
        return self.delta_seconds < self.full_seconds
