"""Which share of the weights an optimizer step changes, in the precision that servers get.

At a learning rate of 1e-6 most steps are smaller than half the distance between two neighbours in
bf16, so that few weights differ from one sync to the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from torch import Tensor

from megatron_stare.sync.delta.encoding import Words, words_of

# Of tensors with more elements every 61st is looked at: a prime, so that no matrix has the same
# columns looked at in all its rows. 2 % of the weights are kept for it.
ALL_UP_TO, STEP = 1 << 16, 61


class ChangedFraction:
    """The share from one version of the weights to the next; None before there are two.

    A version may be passed several times, and not always to its end: what changed is added up until
    one pass is whole.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._tag = ""

    def end(self, tag: str, changed: float, elements: float) -> None:
        """A pass of the weights `tag` is whole: so many of their elements changed since the last
        that was.
        """
        if self._tag and tag != self._tag and elements:
            self.value = changed / elements
        self._tag = tag

    def metrics(self) -> dict[str, float]:
        """changed_fraction, where there is one."""
        return {} if self.value is None else {"changed_fraction": self.value}


class Sample:
    """The share, estimated from a sample of the elements: every one of a small tensor."""

    def __init__(self) -> None:
        self.fraction = ChangedFraction()
        self._pieces: dict[str, Words] = {}
        self._elements: dict[str, int] = {}
        self._changed = 0.0

    def note(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Compare the tensors with what they were, where they were seen before."""
        for name, tensor in bucket:
            count = tensor.numel()
            piece = words_of(tensor.detach().reshape(-1)[:: STEP if count > ALL_UP_TO else 1])
            before, self._elements[name] = self._pieces.get(name), count
            if before is not None:
                self._changed += float(numpy.count_nonzero(piece != before)) / len(piece) * count
            self._pieces[name] = piece.copy()

    def end(self, tag: str) -> None:
        """All tensors of the weights `tag` have passed."""
        self.fraction.end(tag, self._changed, sum(self._elements.values()))
        self._changed = 0.0
