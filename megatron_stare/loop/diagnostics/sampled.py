"""A few rollouts of a step, token by token, on the first rank.

Which ones, all ranks know from RolloutMeta alike. Their texts lie where they were sampled, their
statistics where they are trained, and both travel as arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_stare.collect.journal import frame, whole_frames
from megatron_stare.numerics.exchange import gather_bytes
from megatron_stare.policy.layout import response_position
from megatron_stare.policy.topology import Topology
from megatron_stare.records import EVERY_RANK, Group, Prompt, Rollout
from megatron_stare.reporting.diagnostics import SampledRollout

_ROW = numpy.dtype(
    [
        *((name, "<i8") for name in ("part", "sequence", "position")),
        *((name, "<f4") for name in ("surprisal", "entropy", "sensitivity", "weight")),
        *(("change", "<f8"), ("chosen", "<i8")),
    ]
)
DIGITS = 5  # significant ones, of what is written of a token


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
) -> list[SampledRollout]:
    """The sampled rollouts on the first rank; none elsewhere. `values` as of predicted.merged.
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
) -> SampledRollout:
    def column(name: str) -> list[Any]:
        found: list[Any] = [None] * rollout.length
        for position, value in zip(rows["position"].tolist(), rows[name].tolist(), strict=True):
            found[position] = value if name == "chosen" else float(f"{value:.{DIGITS}g}")
        return found

    return SampledRollout(
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


MOST_BYTES = 4  # of one character in UTF-8
