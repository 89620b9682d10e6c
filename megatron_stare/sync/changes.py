"""The fraction of the weights that an optimizer step changes, in the precision that servers get.

At a learning rate of 1e-6 most steps are smaller than half the distance between two neighbours in
bf16, so that few weights differ from one sync to the next.
"""

from __future__ import annotations

import numpy

from megatron_stare.sync.delta.encoding import Words, words_of
from megatron_stare.sync.transport import NamedTensors

# Of tensors with more elements than ALL_UP_TO every 61st is compared: 61 is prime, so that the rows
# of a matrix are compared in different columns. This keeps a copy of 2 % of the weights.
ALL_UP_TO, STEP = 1 << 16, 61


class ChangedFraction:
    """The fraction from one version of the weights to the next; None before the second version.

    A version may be sent several times, and not always to its end: changes add up until one stream
    is whole.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._tag = ""

    def end(self, tag: str, changed: float, elements: float) -> None:
        """A stream of the weights `tag` is whole: `changed` of its elements differ from the last
        whole stream.
        """
        if self._tag and tag != self._tag and elements:
            self.value = changed / elements
        self._tag = tag

    def metrics(self) -> dict[str, float]:
        """changed_fraction, if there is one."""
        return {} if self.value is None else {"changed_fraction": self.value}


class ChangeSampler:
    """Estimates the fraction from a sample of the elements: all of a small tensor."""

    def __init__(self) -> None:
        self.fraction = ChangedFraction()
        self._samples: dict[str, Words] = {}
        self._elements: dict[str, int] = {}
        self._changed = 0.0

    def note(self, tensors: NamedTensors) -> None:
        """Compare the tensors with their last values, if there are any."""
        for name, tensor in tensors:
            count = tensor.numel()
            sample = words_of(tensor.detach().reshape(-1)[:: STEP if count > ALL_UP_TO else 1])
            before = self._samples.get(name)
            self._elements[name] = count
            if before is not None:
                share = float(numpy.count_nonzero(sample != before)) / len(sample)
                self._changed += share * count
            self._samples[name] = sample.copy()

    def end(self, tag: str) -> None:
        """All tensors of the weights `tag` were noted."""
        self.fraction.end(tag, self._changed, sum(self._elements.values()))
        self._changed = 0.0
