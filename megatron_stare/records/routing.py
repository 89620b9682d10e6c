"""The experts that a rollout's tokens were sent to, as bytes.

Of every position that the model has read, from the first one on, a rollout has the numbers of the
chosen experts: for each layer with experts `top_k` of them, one byte each, or two (little-endian)
where there are more than 256. Qwen3-30B-A3B: 48 layers x 8 = 384 bytes a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy


@dataclass(frozen=True)
class RoutingShape:
    """`layers` are the numbers of those with experts, of `experts` of which each token gets
    `top_k`.
    """

    layers: tuple[int, ...]
    top_k: int
    experts: int

    @property
    def kind(self) -> numpy.dtype:
        """The dtype of an expert's number."""
        return numpy.dtype(numpy.uint8 if self.experts <= 256 else "<u2")

    @property
    def width(self) -> int:
        """Bytes of one position."""
        return len(self.layers) * self.top_k * self.kind.itemsize

    def encoded(self, choices_PLK: numpy.ndarray) -> numpy.ndarray:
        """Choices of P positions, as a rollout's `routing`.

        ValueError: they are not of this shape, or name an unknown expert, or one expert twice for a
        token. A server that has not kept its choices gives such an answer.
        """
        wanted = (len(choices_PLK), len(self.layers), self.top_k)
        if choices_PLK.shape != wanted:
            raise ValueError(f"expert choices of shape {choices_PLK.shape}, not {wanted}")
        if choices_PLK.size and not 0 <= choices_PLK.min() <= choices_PLK.max() < self.experts:
            raise ValueError(
                f"expert choices {choices_PLK.min()} to {choices_PLK.max()} of {self.experts}"
            )
        found = numpy.ascontiguousarray(choices_PLK, self.kind)
        ordered = numpy.sort(found, axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise ValueError("expert choices that send a token to one expert twice")
        return found.reshape(-1).view(numpy.uint8)

    def decoded(self, routing: numpy.ndarray) -> numpy.ndarray:
        """[P, L, K] of a rollout's `routing`. ValueError: it is of another model."""
        if len(routing) % self.width:
            raise ValueError(
                f"{len(routing)} bytes of expert choices are no multiple of the {self.width} of "
                f"one position ({len(self.layers)} layers, {self.top_k} of {self.experts} experts)"
            )
        return routing.view(self.kind).reshape(-1, len(self.layers), self.top_k)

    def positions(self, size: int) -> int:
        """The number of positions that `size` bytes hold."""
        return size // self.width
