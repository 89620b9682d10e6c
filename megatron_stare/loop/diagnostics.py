"""The diagnostics of a training step: the entropy before, in and after its updates, which nothing
here changes, and the file that explains its change: tables of tokens, and a few rollouts.

The tables hold counts and sums over the tokens of all ranks: by surprisal, position, quadrant and
vocabulary id. Each rank fills its own bins; one sum over the ranks makes them everyone's, so the
counts are exact, and the sums are those of fp64. Which rollouts are sampled, all ranks know from
RolloutMeta alike. Their texts lie where they were sampled, their statistics where they are trained,
and both travel as arrays.

Shape legend: T loss tokens of this rank, K bins, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_stare.collect.journal import frame, whole_frames
from megatron_stare.config import Config
from megatron_stare.loop.metrics import (
    QUADRANTS,
    View,
    batch_metrics,
    change_metrics,
    clip_metrics,
    factor,
    mean_metrics,
    quadrants,
    view_of,
)
from megatron_stare.loop.prepare import PreparedStep, effective_loss, require_finite, target_of
from megatron_stare.losses import Objective
from megatron_stare.losses.planning import batch_mean
from megatron_stare.numerics.exchange import gather_bytes
from megatron_stare.numerics.selection import Across
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.layout import response_position
from megatron_stare.policy.topology import Topology
from megatron_stare.records import EVERY_RANK, Group, Prompt, Rollout, Signals, TokenBatch
from megatron_stare.reporting import diagnostics as schema
from megatron_stare.system import BestEffort

# The same for every step, so that steps can be laid side by side [nats].
SURPRISAL_EDGES = (
    *(0.0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0),
    *(2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0),
)
ADVANTAGE_EDGES = tuple(number / 4 for number in range(-12, 13))
MOST_POSITION_BINS = 32
_ROW = numpy.dtype(
    [
        *((name, "<i8") for name in ("part", "sequence", "position")),
        *((name, "<f4") for name in ("surprisal", "entropy", "sensitivity", "weight")),
        *(("change", "<f8"), ("chosen", "<i8")),
    ]
)
MOST_BYTES = 4  # of one character in UTF-8
DIGITS = 5  # significant ones, of what is written of a token


class EntropyObserver:
    """Predicted and realised changes of entropy, and clip fractions; with a tokenizer also the
    files `<run.dir>/diagnostics/step_<n>.json.gz`. Every method is collective.
    """

    def __init__(
        self,
        config: Config,
        objective: Objective,
        actor: Actor,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.config, self.settings = config, config.diagnostics
        self.objective = objective
        self.actor = actor
        self.tokenizer = tokenizer
        self.loss = effective_loss(config)
        self.across = actor.topology.across
        self._best_effort = BestEffort("the report lacks diagnostics of this step")

    def before_updates(self, prepared: PreparedStep) -> dict[str, float]:
        """The predicted change of entropy, and the step's diagnostics file where it is due. A batch
        without sensitivity is then scored once more for them. NonFiniteError: a statistic is not
        finite.
        """
        interval, step = self.settings.interval, prepared.number
        tokenizer = self.tokenizer if interval and (step == 1 or step % interval == 0) else None
        measured = prepared.has_sensitivity and interval
        tokens = self.across.count(sum(b.advantage_T.numel() for b in prepared.batches))
        if not tokens or (tokenizer is None and not measured):
            return {}
        loss = self.objective.bind(self.loss, self.objective.passes_of(self.loss)[0])
        views = []
        for groups, batch, plan in zip(
            prepared.parts, prepared.batches, prepared.plans, strict=True
        ):
            if not prepared.has_sensitivity:
                batch = self.actor.score(batch, sensitivity=True)
                require_finite(groups, batch, self.across)
            views.append(view_of(groups, batch, plan, self.actor, loss))
        if tokenizer is not None:
            self._write(step, views, tokenizer)
        return mean_metrics([change_metrics(view, self.across) for view in views])

    def _write(self, step: int, views: Sequence[View], tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the step's file. Collective."""
        topology, values = self.actor.topology, merged(views)
        metrics = mean_metrics([batch_metrics(v.batch, v.plan, self.across) for v in views])
        tables = tables_of(
            values,
            self.across,
            longest=self.config.rollout.rollout_max_response_len,
            vocabulary=self.actor.hf.vocab_size,
            rows=self.settings.tokens,
            text_of=lambda number: tokenizer.decode([number], skip_special_tokens=False),
            chooses=views[0].plan.chosen_T is not None,
        )
        places = places_of([view.groups for view in views], self.settings.rollouts, step)
        rollouts = sampled_rollouts(places, values, topology, tokenizer)
        if not topology.is_first:
            return
        gate = views[0].plan.metrics.get("gate")
        found = schema.Diagnostics(
            step=step,
            entropy=metrics["entropy"],
            target_entropy=target_of(self.config, self.objective),
            gate=None if gate is None else bool(gate),
            weight_w=metrics.get("weight_w"),
            weight_m=metrics.get("weight_m"),
            loss_tokens=sum(tables.position_bins.count),
            predicts=views[0].predicts,
            rollouts=rollouts,
            **vars(tables),
        )
        self._best_effort(lambda: schema.write(Path(self.config.run.dir), found))

    def of_update(
        self, settings: Mapping[str, Any], seen: TokenBatch, plan: Signals
    ) -> dict[str, float]:
        """clip_fraction of the update, measured without the KL term."""
        bare = self.objective.bind(dataclasses.replace(self.loss, kl_loss_coef=0.0), settings)
        if not self.settings.interval or bare.logits:
            return {}
        by_T = self.actor.token_gradient(seen, bare, plan)[:, 0]
        return clip_metrics(by_T, seen, plan, self.across)

    def after_updates(
        self, prepared: PreparedStep, metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """The realised change of entropy, from one more scoring pass over the same tokens."""
        if not (prepared.updates and self.settings.realised and "entropy_of_loss" in metrics):
            return {}
        means = []
        for batch, plan in zip(prepared.batches, prepared.plans, strict=True):
            entropy_T = self.actor.score(batch).entropy_T
            assert entropy_T is not None, "a scored batch"
            if self.across.count(entropy_T.numel()):
                means.append(batch_mean(entropy_T, plan.coefficient_T, self.across))
        return {"entropy_change/realised": sum(means) / len(means) - metrics["entropy_of_loss"]}


def merged(views: Sequence[View]) -> dict[str, Tensor]:
    """The flat values of several mini-batches of this rank, one after another; changes are those
    of the mean mini-batch. `part` is the number of the mini-batch.
    """
    parts: dict[str, list[Tensor]] = {}
    for number, view in enumerate(views):
        batch, plan = view.batch, view.plan
        ids = [micro.target_N for micro in batch.microbatches]
        chosen_T = plan.chosen_T
        row = {
            "change": view.change_T / len(views),
            "plain_change": view.plain_T / len(views),
            "surprisal": batch.surprisal_T,
            "entropy": batch.entropy_T,
            "sensitivity": batch.sensitivity_T,
            "gap": _where_sampled(batch, batch.surprisal_T, batch.entropy_T),
            "variance": _where_sampled(batch, batch.variance_T, None),
            "advantage": batch.advantage_T,
            "weight": factor(plan),
            "chosen": torch.zeros_like(batch.sequence_T) if chosen_T is None else chosen_T,
            "id": torch.cat(ids),
            "token_index": batch.token_index_T,
            "sequence": batch.sequence_T,
            "part": torch.full_like(batch.sequence_T, number),
        }
        for name, value_T in row.items():
            assert value_T is not None, "a scored batch"
            parts.setdefault(name, []).append(value_T)
    return {name: torch.cat(values) for name, values in parts.items()}


def _where_sampled(batch: TokenBatch, value_T: Tensor | None, less_T: Tensor | None) -> Tensor:
    """value - less where the current weights sampled the token; 0 elsewhere, or without values."""
    if value_T is None:
        return torch.zeros_like(batch.advantage_T)
    return torch.where(batch.sampled_T, value_T if less_T is None else value_T - less_T, 0.0)


def position_edges(longest: int) -> tuple[int, ...]:
    """At most MOST_POSITION_BINS stretches of equal length over a response of `longest` tokens."""
    width = -(-longest // MOST_POSITION_BINS)
    return tuple(range(0, longest + width, width))


def tables_of(
    values: Mapping[str, Tensor],
    across: Across,
    *,
    longest: int,
    vocabulary: int,
    rows: int,
    text_of: Callable[[int], str],
    chooses: bool,
) -> schema.Tables:
    """The tables of the flat values of `merged`. `rows` is the length of each table of tokens,
    `text_of` an id's text; `chooses`: tables of L+ and L-, else of tokens with g > 0 and others.
    Collective.
    """
    advantage_T, surprisal_T = values["advantage"], values["surprisal"]
    position = position_edges(longest)
    surprisal_bin_T = _bin(surprisal_T, SURPRISAL_EDGES)
    position_bin_T = _bin(response_position(values["token_index"]), position)
    advantages = len(ADVANTAGE_EDGES) - 1
    density_bin_T = surprisal_bin_T * advantages + _bin(advantage_T, ADVANTAGE_EDGES)
    everywhere_T = torch.ones_like(advantage_T, dtype=torch.bool)
    quadrant_T = quadrants(advantage_T, values["sensitivity"])
    sides = _sides(values, chooses)
    changes = ("change", "plain_change")
    places = ("change", "entropy", "surprisal", "gap", "variance")
    count, cells = len(SURPRISAL_EDGES) - 1, (len(SURPRISAL_EDGES) - 1) * advantages
    zero_T = torch.zeros_like(surprisal_bin_T)
    wanted = [
        (surprisal_bin_T, advantage_T > 0, count, changes),
        (surprisal_bin_T, advantage_T < 0, count, changes),
        (position_bin_T, everywhere_T, len(position) - 1, places),
        (density_bin_T, everywhere_T, cells, ()),
        (zero_T, everywhere_T, 1, changes),
        *((zero_T, mask_T, 1, changes) for mask_T in quadrant_T),
        *((values["id"], mask_T, vocabulary, ("change", "surprisal")) for mask_T in sides.values()),
    ]
    parts = [_binned(values, *each) for each in wanted]
    found = _over_ranks(parts, across)
    positive, negative, by_position, density, whole = found[:5]
    every = [schema.Quadrant(int(each[0, 0]), *each[1:, 0].tolist()) for each in found[5:9]]
    change, plain_change = whole[1:, 0].tolist()
    counts = density[0].long().view(-1, advantages).tolist()
    return schema.Tables(
        change=change,
        plain_change=plain_change,
        quadrants=dict(zip(QUADRANTS, every, strict=True)),
        surprisal_bins=schema.SurprisalBins([*SURPRISAL_EDGES], _tally(positive), _tally(negative)),
        position_bins=_positions(position, by_position),
        density=schema.Density([*SURPRISAL_EDGES], [*ADVANTAGE_EDGES], counts),
        tokens={
            name: _token_rows(each, rows, text_of)
            for name, each in zip(sides, found[9:], strict=True)
        },
    )


def _sides(values: Mapping[str, Tensor], chooses: bool) -> dict[str, Tensor]:
    if chooses:
        chosen_T = values["chosen"]
        return {"chosen_positive": chosen_T > 0, "chosen_negative": chosen_T < 0}
    rising_T = values["sensitivity"] > 0
    return {"rising": rising_T, "falling": ~rising_T}


def _bin(value_T: Tensor, edges: Sequence[float]) -> Tensor:
    """The bin of each value; what lies beyond the outermost edges is in the outermost bins."""
    inner = torch.tensor(edges[1:-1], dtype=value_T.dtype, device=value_T.device)
    return torch.bucketize(value_T, inner, right=True)


def _binned(
    values: Mapping[str, Tensor], bin_T: Tensor, mask_T: Tensor, size: int, names: Sequence[str]
) -> Tensor:
    """[1 + names, size] fp64: per bin the tokens in the mask, and the sums of their values."""
    inside_T = bin_T[mask_T]
    rows = [torch.bincount(inside_T, minlength=size).double()]
    rows += [
        torch.bincount(inside_T, values[name][mask_T].double(), minlength=size) for name in names
    ]
    return torch.stack(rows)


def _over_ranks(parts: Sequence[Tensor], across: Across) -> list[Tensor]:
    """The sums over all ranks, in host memory; one collective."""
    total = torch.cat([part.flatten() for part in parts])
    if across.group is not None:
        dist.all_reduce(total, group=across.group)
    total = total.cpu()
    ends = [0, *itertools.accumulate(part.numel() for part in parts)]
    cut = itertools.pairwise(ends)
    return [total[a:b].view(part.shape) for (a, b), part in zip(cut, parts, strict=True)]


def _tally(found: Tensor) -> schema.Tally:
    return schema.Tally(found[0].long().tolist(), found[1].tolist(), found[2].tolist())


def _positions(edges: Sequence[int], found: Tensor) -> schema.PositionBins:
    count, change, entropy, surprisal, gap, variance = found.tolist()

    def means(sums: list[float]) -> list[float | None]:
        return [one / n if n else None for one, n in zip(sums, count, strict=True)]

    z = [a / math.sqrt(b) if b > 0 else None for a, b in zip(gap, variance, strict=True)]
    counts = [int(n) for n in count]
    return schema.PositionBins([*edges], counts, change, means(entropy), means(surprisal), z)


def _token_rows(found: Tensor, rows: int, text_of: Callable[[int], str]) -> list[schema.TokenRow]:
    """The ids that change most, half of the rows, and of the others the commonest; by how often
    they came.
    """
    count_V, change_V, surprisal_V = found
    seen = int((count_V > 0).sum())
    moved = change_V.abs().topk(min(seen, rows // 2)).indices.tolist()
    common = count_V.topk(min(seen, rows)).indices.tolist()
    ids = [number for number in dict.fromkeys(moved + common) if count_V[number] > 0][:rows]
    ids.sort(key=lambda number: (-float(count_V[number]), number))
    return [
        schema.TokenRow(
            number,
            text_of(number),
            int(count_V[number]),
            float(change_V[number]),
            float(surprisal_V[number] / count_V[number]),
        )
        for number in ids
    ]


class Place(NamedTuple):
    """A rollout of a step: mini-batch and sequence in it, its group, its number there."""

    part: int
    sequence: int
    group: Group
    sample: int


def places_of(parts: Sequence[Sequence[Group]], count: int, step: int) -> list[Place]:
    """`count` rollouts, or all there are: groups with right and wrong answers first, as a whole
    where they fit, else right and wrong in turn. `step` decides with which group it begins.
    """
    groups: list[list[Place]] = []
    for number, part in enumerate(parts):
        sequence = 0
        for group in part:
            groups.append(
                [Place(number, sequence + k, group, k) for k in range(len(group.rollouts))]
            )
            sequence += len(group.rollouts)
    groups = [groups[(step + k) % len(groups)] for k in range(len(groups))]
    groups.sort(key=lambda places: not _mixed(places[0].group))
    found: list[Place] = []
    for places in groups:
        room = count - len(found)
        found += places if len(places) <= room else _in_turn(places)[:room]
    return found


def _mixed(group: Group) -> bool:
    return len({rollout.verdict == "correct" for rollout in group.rollouts}) == 2


def _in_turn(places: list[Place]) -> list[Place]:
    """The rollouts in the order right, wrong, right, wrong; then the rest."""
    right = [p for p in places if p.group.rollouts[p.sample].verdict == "correct"]
    wrong = [p for p in places if p.group.rollouts[p.sample].verdict != "correct"]
    both = [p for pair in zip(right, wrong, strict=False) for p in pair]
    return [*both, *right[len(wrong) :], *wrong[len(right) :]]


def sampled_rollouts(
    places: Sequence[Place],
    values: Mapping[str, Tensor],
    topology: Topology,
    tokenizer: PreTrainedTokenizerBase,
) -> list[schema.SampledRollout]:
    """The sampled rollouts on the first rank; none elsewhere. `values` as of `merged`.
    Collective.
    """
    own_rows = _rows(places, values) if _speaks(topology) else b""
    rows = gather_bytes(own_rows, topology.host)
    frames = gather_bytes(_frames(places, topology), topology.host)
    if not topology.is_first:
        return []
    table = numpy.concatenate([numpy.frombuffer(content, _ROW) for content in rows])
    prompts, texts = dict[tuple[int, int], Prompt](), dict[tuple[int, int], Rollout]()
    for content in frames:
        for _, record, labels in whole_frames(content):
            key = (labels["part"], labels["sequence"])
            if isinstance(record, Prompt):
                prompts[key] = record
            else:
                texts[key] = record
    found = []
    for place in places:
        key = (place.part, place.sequence)
        own = table[(table["part"] == place.part) & (table["sequence"] == place.sequence)]
        found.append(_described(prompts[key], texts[key], place.sample, own, tokenizer))
    return found


def _speaks(topology: Topology) -> bool:
    """Whether this rank describes its tokens: one of the ranks that train on them does."""
    return topology.ranks_of_tokens(topology.data_rank, topology.context_rank)[0] == topology.rank


def _rows(places: Sequence[Place], values: Mapping[str, Tensor]) -> bytes:
    """The statistics of this rank's tokens of these rollouts."""
    wanted_T = torch.zeros_like(values["sequence"], dtype=torch.bool)
    for place in places:
        wanted_T |= (values["part"] == place.part) & (values["sequence"] == place.sequence)
    rows = numpy.zeros(int(wanted_T.sum()), _ROW)
    for name in _ROW.names or ():
        value_T = response_position(values["token_index"]) if name == "position" else values[name]
        rows[name] = value_T[wanted_T].cpu().numpy()
    return rows.tobytes()


def _frames(places: Sequence[Place], topology: Topology) -> bytes:
    """The rollouts that this rank has whole, each after its prompt."""
    found = []
    for place in places:
        holder = 0 if place.group.holder == EVERY_RANK else place.group.holder
        rollout = place.group.rollouts[place.sample]
        if holder != topology.rank or not isinstance(rollout, Rollout):
            continue
        labels = {"part": place.part, "sequence": place.sequence}
        found += [frame(place.group.prompt, **labels), frame(rollout, **labels)]
    return b"".join(found)


def _described(
    prompt: Prompt,
    rollout: Rollout,
    sample: int,
    rows: numpy.ndarray,
    tokenizer: PreTrainedTokenizerBase,
) -> schema.SampledRollout:
    def column(name: str) -> list[Any]:
        found: list[Any] = [None] * rollout.length
        for position, value in zip(rows["position"].tolist(), rows[name].tolist(), strict=True):
            found[position] = value if name == "chosen" else float(f"{value:.{DIGITS}g}")
        return found

    return schema.SampledRollout(
        prompt_index=prompt.index,
        sample=sample,
        reward=rollout.reward,
        verdict=rollout.verdict,
        finish_reason=rollout.status,
        versions=[rollout.oldest_version, rollout.weight_version],
        prompt=prompt.text or tokenizer.decode(prompt.token_ids.tolist()),
        label=prompt.label,
        advantage=rollout.advantage,
        text=pieces(rollout.response_ids.tolist(), tokenizer),
        loss_mask=rollout.loss_mask.astype(int).tolist(),
        chosen=[value or 0 for value in column("chosen")],
        **{
            name: column(name)
            for name in ("surprisal", "entropy", "sensitivity", "weight", "change")
        },
    )


def pieces(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text that each token adds, special tokens as they are written; a character whose bytes
    are several tokens' is the last one's.

    A token is decoded after the piece before it, as some tokenizers write it otherwise at the
    beginning of a text.
    """
    found: list[str] = []
    start = done = 0
    before = ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        if text.endswith("\ufffd") and end < len(ids) and end - done < MOST_BYTES:
            found.append("")
            continue
        found.append(text[len(before) :])
        start, done = done, end
        before = tokenizer.decode(ids[start:done], skip_special_tokens=False)
    return found
