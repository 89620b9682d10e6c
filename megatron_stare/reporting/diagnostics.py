"""Token statistics of one step: `<run.dir>/diagnostics/step_00000012.json.gz`.

`change` everywhere is the predicted first-order change of entropy caused by the step's update. It
follows from the derivative of the whole loss (with coefficients, weights and corrections) by each
token's surprisal: sum of -dL/dlogits . dH/dlogits = (dL/ds) g over the tokens, g = p (s - H) - c
(arXiv 2606.19236). `plain_change` is the same quantity for the bare policy gradient, sum of A g / T
over T loss tokens. Both are per unit of step size in the logits: signs and shape are predictions,
the scale depends on the optimizer and has to be fitted. Surprisal and entropy are in nats; `step`
is that of the row in metrics.jsonl. A number that is not finite is null. A new field must have a
default.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import SkipValidation, TypeAdapter

from megatron_stare.config import UserError
from megatron_stare.system import atomic_write

VERSION = 1
DIRECTORY = "diagnostics"
_NAME = re.compile(r"step_(\d{8,})\.json\.gz")
Text = Annotated[str, SkipValidation]  # half a surrogate pair of the data is allowed
Number = Annotated[float, SkipValidation]  # null in a file: it was not finite


@dataclass(frozen=True)
class Tally:
    """Number of loss tokens per bin, and their predicted changes of entropy."""

    count: list[int]
    change: list[Number]
    plain_change: list[Number]


@dataclass(frozen=True)
class SurprisalBins:
    """Tokens by surprisal for each sign of the advantage; tokens of advantage 0 are in neither.

    Bin i is edges[i] <= s < edges[i + 1]; the last bin also holds all larger values.
    """

    edges: list[float]
    positive: Tally
    negative: Tally


@dataclass(frozen=True)
class PositionBins:
    """Loss tokens by position in the response; edges as in SurprisalBins, means null in empty
    bins.
    """

    edges: list[int]
    count: list[int]
    change: list[Number]
    entropy: list[float | None]
    surprisal: list[float | None]
    # sum (s - H) / sqrt(sum Var s): N(0, 1) if the engine samples from the policy
    exactness_z: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class Density:
    """count[i][j]: loss tokens in surprisal bin i and advantage bin j; the outermost advantage bins
    also hold all values outside the edges.
    """

    surprisal_edges: list[float]
    advantage_edges: list[float]
    count: list[list[int]]


@dataclass(frozen=True)
class Quadrant:
    """Tokens of one sign of A and of g, and their predicted changes of entropy."""

    count: int
    change: Number
    plain_change: Number


@dataclass(frozen=True)
class TokenRow:
    """One id of the vocabulary among the tokens of a table."""

    id: int
    text: Text
    count: int
    change: Number  # sum
    surprisal: Number  # mean


@dataclass(frozen=True)
class SampledRollout:
    """One rollout. Each list of PER_TOKEN has one value per response token; values that exist for
    loss tokens only are null elsewhere.
    """

    prompt_index: int
    sample: int
    reward: float | None
    verdict: str
    finish_reason: str  # completed | truncated | aborted
    versions: list[int]  # of the weights that sampled the oldest and the newest token
    prompt: Text
    label: Text
    advantage: float | None
    # Pieces of the decoded response; empty if a character's bytes continue in the next token.
    text: list[Text]
    loss_mask: list[int]
    surprisal: list[float | None]
    entropy: list[float | None]
    sensitivity: list[float | None]
    weight: list[float | None]  # all factors of the token's loss (omega, correction)
    change: list[float | None]
    chosen: list[int]  # 1 in L+, -1 in L-, else 0

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in PER_TOKEN}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"per-token lists of different lengths: {lengths}")


PER_TOKEN = (
    *("text", "loss_mask", "surprisal", "entropy", "sensitivity", "weight", "change", "chosen"),
)


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Counts and sums over a step's loss tokens."""

    change: float | None  # null: the loss of this step was not finite
    plain_change: float | None
    # positive_rising, positive_falling, negative_rising, negative_falling: sign of A, and g > 0
    quadrants: dict[str, Quadrant]
    surprisal_bins: SurprisalBins
    position_bins: PositionBins
    density: Density
    # chosen_positive (L+), chosen_negative (L-); without that choice rising (g > 0), falling
    tokens: dict[str, list[TokenRow]]


@dataclass(frozen=True, kw_only=True)
class Diagnostics(Tables):
    """One step; values that the loss does not have are null."""

    step: int
    entropy: Number
    target_entropy: float | None
    gate: bool | None
    weight_w: float | None  # W on L+
    weight_m: float | None  # M on L-
    loss_tokens: int
    # The basis of `change`: objective (the whole loss), surprisal_part (without the loss's own term
    # in H) or weights (coefficient, weight and A g, for losses that read whole distributions).
    predicts: str
    rollouts: list[SampledRollout] = field(default_factory=list)


_READER = TypeAdapter(Diagnostics)


def path_of(directory: Path, step: int) -> Path:
    """The file of a step's diagnostics in a run directory."""
    return Path(directory) / DIRECTORY / f"step_{step:08d}.json.gz"


def steps(directory: Path) -> list[int]:
    """The steps with diagnostics in a run directory, ascending."""
    found = (_NAME.fullmatch(path.name) for path in (Path(directory) / DIRECTORY).glob("step_*"))
    return sorted(int(match[1]) for match in found if match)


def write(directory: Path, diagnostics: Diagnostics) -> Path:
    """Write a step's file into a run directory: whole, or not at all."""
    path = path_of(directory, diagnostics.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = {"version": VERSION} | _finite(dataclasses.asdict(diagnostics))
    text = json.dumps(tree, allow_nan=False, separators=(",", ":"))
    atomic_write(path, gzip.compress(text.encode("ascii"), compresslevel=6, mtime=0))
    return path


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def read(directory: Path, step: int) -> Diagnostics:
    """A step's diagnostics without fields that this version does not know. UserError: the file is
    missing, torn or of a newer format.
    """
    path = path_of(directory, step)
    try:
        tree = json.loads(gzip.decompress(path.read_bytes()))
        if tree["version"] > VERSION:
            raise UserError(
                f"{path}: version {tree['version']}, and this program reads up to {VERSION}; "
                "update it"
            )
        return _READER.validate_python(tree)
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; diagnostics.interval says which steps have one"
        ) from None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: torn or no diagnostics ({type(error).__name__}: {error}); remove it"
        ) from None
