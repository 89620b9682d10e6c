"""What a run saw of one step's tokens: `<run.dir>/diagnostics/step_00000012.json.gz`.

`change` everywhere is the first-order change of entropy that the step's update is predicted to
bring, from the derivative of the whole loss by each token's surprisal, with coefficients, weights
and corrections: sum of -dL/dlogits . dH/dlogits = (dL/ds) g over the tokens, g = p (s - H) - c
(arXiv 2606.19236). `plain_change` is the same of the bare policy gradient, sum of A g / T over T
loss tokens. Both are per unit of step size in the logits: signs and shape are predictions, the
scale is the optimizer's and has to be fitted. Surprisal and entropy are in nats; `step` is that of
the row in metrics.jsonl. Fields are only ever added, with a default.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import types
import typing
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_stare.config import UserError
from megatron_stare.system import atomic_write

VERSION = 1
DIRECTORY = "diagnostics"
_NAME = re.compile(r"step_(\d{8,})\.json\.gz")


@dataclass(frozen=True)
class Tally:
    """Per bin: loss tokens, and their predicted changes of entropy."""

    count: list[int]
    change: list[float]
    plain_change: list[float]


@dataclass(frozen=True)
class SurprisalBins:
    """Tokens by surprisal, of each sign of the advantage; bin i is edges[i] <= s < edges[i + 1],
    the last one also takes what is larger. Tokens of advantage 0 are in neither.
    """

    edges: list[float]
    positive: Tally
    negative: Tally


@dataclass(frozen=True)
class PositionBins:
    """Loss tokens by their place in the response, edges as of SurprisalBins; means are null where
    a bin is empty.
    """

    edges: list[int]
    count: list[int]
    change: list[float]
    entropy: list[float | None]
    surprisal: list[float | None]


@dataclass(frozen=True)
class Density:
    """count[i][j]: loss tokens in surprisal bin i and advantage bin j; the outermost advantage bins
    take what lies beyond them.
    """

    surprisal_edges: list[float]
    advantage_edges: list[float]
    count: list[list[int]]


@dataclass(frozen=True)
class Quadrant:
    """Tokens of one sign of A and of g, and their predicted changes of entropy."""

    count: int
    change: float
    plain_change: float


@dataclass(frozen=True)
class TokenRow:
    """One id of the vocabulary among the tokens of a table: how many there are, the sum of their
    changes, their mean surprisal.
    """

    id: int
    text: str
    count: int
    change: float
    surprisal: float


@dataclass(frozen=True)
class SampledRollout:
    """One rollout with one value per response token in each list.

    `text` are pieces that concatenate to the response as it was decoded; a piece is empty where a
    character's bytes go on in the next token. What is known of loss tokens alone (surprisal,
    entropy, g, weight) is null elsewhere. `chosen`: 1 in L+, -1 in L-, 0. `weight` is everything
    that multiplies the token's loss (omega, correction). `finish_reason`: completed | truncated |
    aborted. `versions`: of the weights that sampled the oldest token and the newest.
    """

    prompt_index: int
    sample: int
    reward: float | None
    verdict: str
    finish_reason: str
    versions: list[int]
    prompt: str
    label: str
    advantage: float | None
    text: list[str]
    loss_mask: list[int]
    surprisal: list[float | None]
    entropy: list[float | None]
    sensitivity: list[float | None]
    weight: list[float | None]
    change: list[float | None]
    chosen: list[int]

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in PER_TOKEN}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"per-token lists of different lengths: {lengths}")


PER_TOKEN = (
    *("text", "loss_mask", "surprisal", "entropy", "sensitivity", "weight", "change", "chosen"),
)


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Counts and sums over a step's loss tokens; `change` and `plain_change` are of all.
    `quadrants` by positive_rising, positive_falling, negative_rising, negative_falling (the sign of
    A, and whether g > 0). `tokens` by table: chosen_positive (L+) and chosen_negative (L-), or
    rising and falling (g > 0 or not) of a loss that chooses none.
    """

    change: float
    plain_change: float
    quadrants: dict[str, Quadrant]
    surprisal_bins: SurprisalBins
    position_bins: PositionBins
    density: Density
    tokens: dict[str, list[TokenRow]]


@dataclass(frozen=True, kw_only=True)
class Diagnostics(Tables):
    """One step.

    `predicts`: objective (the whole loss) | surprisal_part (without a loss's own term in H) |
    weights (coefficient, weight and A g, of a loss that reads whole distributions).
    `target_entropy`, `gate`, `weight_w` (W on L+) and `weight_m` (M on L-) are null where the loss
    has none.
    """

    step: int
    entropy: float
    target_entropy: float | None
    gate: bool | None
    weight_w: float | None
    weight_m: float | None
    loss_tokens: int
    predicts: str
    rollouts: list[SampledRollout] = field(default_factory=list)


def path_of(directory: Path, step: int) -> Path:
    """Where a run directory keeps a step's diagnostics."""
    return Path(directory) / DIRECTORY / f"step_{step:08d}.json.gz"


def steps(directory: Path) -> list[int]:
    """The steps that a run directory has diagnostics of, ascending."""
    found = (_NAME.fullmatch(path.name) for path in (Path(directory) / DIRECTORY).glob("step_*"))
    return sorted(int(match[1]) for match in found if match)


def write(directory: Path, diagnostics: Diagnostics) -> Path:
    """Write a step's file into a run directory: whole, or not at all."""
    path = path_of(directory, diagnostics.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = {"version": VERSION} | dataclasses.asdict(diagnostics)
    text = json.dumps(tree, allow_nan=False, separators=(",", ":"))
    atomic_write(path, gzip.compress(text.encode("ascii"), compresslevel=6, mtime=0))
    return path


def read(directory: Path, step: int) -> Diagnostics:
    """A step's diagnostics. UserError, naming the file: none is there, it is torn, or of a later
    version. Unknown fields are a later version's additions, and are left out.
    """
    path = path_of(directory, step)
    try:
        tree = json.loads(gzip.decompress(path.read_bytes()))
        if tree["version"] > VERSION:
            raise UserError(
                f"{path}: version {tree['version']}, and this program reads up to {VERSION}; "
                "update it"
            )
        made: Diagnostics = _built(Diagnostics, tree)
    except FileNotFoundError:
        raise UserError(f"{path} is not there; diagnostics.interval says which steps are") from None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: torn or no diagnostics ({type(error).__name__}: {error}); remove it"
        ) from None
    return made


def _built(kind: Any, value: Any) -> Any:
    """`value` as it was before dataclasses.asdict. KeyError, TypeError: it is another thing."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        known = [each.name for each in dataclasses.fields(kind)]
        fields = {name: _built(hints[name], value[name]) for name in known if name in value}
        return typing.cast(Any, kind)(**fields)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        if arguments[0] in (int, float, str) or typing.get_origin(arguments[0]) is types.UnionType:
            return [*value]
        return [_built(arguments[0], each) for each in value]
    if origin is dict:
        return {key: _built(arguments[1], each) for key, each in value.items()}
    return value
