"""Losses over whole sequences under every layout of two ranks against one rank, and against
float64 twins of their values: context ranks without a loss token, and gradients through the sums.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_stare.config import Config, LossConfig, override
from megatron_stare.losses import find_objective
from megatron_stare.losses.grpo import pessimistic
from megatron_stare.losses.planning import coefficients
from megatron_stare.numerics.sequences import kalman_mean, preceding_minimum
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor
from megatron_stare.records import (
    BoundLoss,
    Group,
    LossTokens,
    Nucleus,
    Prompt,
    Rollout,
    Signals,
    TokenBatch,
)
from tests.distributed import LayoutResults
from tests.losses import reference_losses
from tests.tiny_models import tiny_config, write_checkpoint

CLIPS = LossConfig(name="gspo", eps_clip=0.3, eps_clip_high=0.2, aggregation="seq-mean-token-mean")
TP, PP, CP = (
    f"policy.{name}_parallel_size=2" for name in ("tensor_model", "pipeline_model", "context")
)
VPP, SP = "policy.virtual_pipeline_model_parallel_size=2", "policy.sequence_parallel=true"
PADDED, FULL = "policy.packed_sequences=false", "policy.recompute_granularity=full"
# of its own, so that a context rank has micro-batches without a loss token
EACH, LOGITS = "policy.max_tokens_per_gpu=14", "policy.head=logits"
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"one": (), "padded": (PADDED,), "each": ("policy.max_tokens_per_gpu=28",)},
    2: {
        "CP2": (CP,),
        "CP2 padded": (CP, PADDED),
        "CP2 each": (CP, EACH),
        "CP2 each recompute full": (CP, EACH, FULL),
        "CP2 logits head": (CP, LOGITS),
        "DP2": (),
        "TP2 SP": (TP, SP),
        "PP2 each": (PP, "policy.max_tokens_per_gpu=28"),
        "PP2 VPP2 padded": (PP, VPP, PADDED),
    },
}
# (prompt tokens, loss mask): responses of one token lie on one context rank alone
SHAPES = (
    (4, [1]),
    (3, [1, 1, 0, 1, 1, 1]),
    (2, [1] * 20),
    (7, [0, 0, 1]),
    (5, [0, 0]),
    (3, [1, 0, 1]),
    (12, [1] * 9),
)

# Ranks share two cores: all but these are run with the slow tests.
QUICK = ("one", "CP2 each", "TP2 SP", "PP2 VPP2 padded")
# Sequences whose gradient is not finite, in the middle, and, under this layout, at either end.
BROKEN = ((5, 9), (0,), (2 * len(SHAPES) - 1,))
ENDS = ("CP2",)


def rounds_of_groups() -> list[Group]:
    """Two rollouts to a group, their ids and advantages drawn at random."""
    dice = torch.Generator().manual_seed(3)
    groups = []
    for number, (length, mask) in enumerate(SHAPES):
        ids = torch.randint(1, 71, (length + 2 * len(mask),), generator=dice).tolist()
        sides = (ids[length : length + len(mask)], ids[length + len(mask) :])
        rollouts = tuple(
            Rollout(
                tuple(side),
                (-4.0,) * len(mask),
                tuple(mask),
                status="completed",
                weight_version=0,
                advantage=sign,
            )
            for side, sign in zip(sides, (1.0 + number / 10, -0.5), strict=True)
        )
        groups.append(Group(Prompt(number, tuple(ids[:length]), ""), rollouts))
    return groups


def old_surprisals(batch: TokenBatch) -> Tensor:
    """pi_old's, from the token's number alone: ratios of sequences on both sides of the clips."""
    assert batch.surprisal_T is not None
    index = batch.token_index_T.double()
    return batch.surprisal_T + (0.5 * torch.sin(index % 997) + 0.2 * torch.sin(index // 2**32))


def sequence_form(tokens: LossTokens, config: LossConfig) -> Tensor:
    """GSPO as published: the ratio's gradient goes through the sum, so over the context ranks."""
    ratio = torch.exp(tokens.sequence_mean(tokens.old_surprisal - tokens.surprisal))
    return pessimistic(ratio, tokens.advantage, config.eps_clip, config.eps_clip_high)


def crossed(tokens: LossTokens, config: LossConfig) -> Tensor:
    """An objective of no paper: each token weighs its sequence's mean differently, so that no
    symmetry between ranks hides a wrong gradient.
    """
    mean = tokens.sequence_mean(tokens.surprisal.square()) / 10
    return tokens.advantage * tokens.surprisal * mean + torch.sin(tokens.old_surprisal) * mean


def scanned(tokens: LossTokens, config: LossConfig) -> Tensor:
    """An objective of no paper: weights by every scan along the sequence, over tool output and
    through it.
    """
    shift = tokens.old_surprisal - tokens.surprisal.detach()
    kalman = functools.partial(kalman_mean, process_noise=0.2, measurement_noise=0.5)
    weight = tokens.sequence_scan(preceding_minimum, torch.exp(shift))
    weight = weight + 2.0 * tokens.sequence_scan(kalman, shift)
    weight = weight + 3.0 * tokens.sequence_scan(kalman, shift, every_position=True)
    assert tokens.position is not None
    return tokens.advantage * tokens.surprisal * weight / (1 + tokens.position)


LOSSES = {
    "gspo": find_objective("gspo").loss,
    "sequence form": sequence_form,
    "crossed": crossed,
    "scanned": scanned,
}


def update(
    directory: str, options: tuple[str, ...], name: str, bad: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """One update from the checkpoint: loss, gradient norm, weights, and this rank's tokens.

    With an epsilon of 1 Adam's first step is g / (|g| + 1): the weights show the gradient.
    """
    common = ("policy.max_tokens_per_gpu=2000", "optimizer.lr=1", "optimizer.adam_eps=1")
    paths = (f"policy.hf_checkpoint={directory}",)
    config = override(Config(), [*paths, *common, "optimizer.clip_grad=1e6", *options])
    topology = topologies.start(config.policy)
    actor = Actor(config, topology, total_steps=10)
    packed, nucleus = actor.pack(rounds_of_groups(), 0), Nucleus(0.8, False)
    batch = actor.score(packed, proxy_kappa=0.3, nucleus=nucleus, tempering=1.2)
    batch = dataclasses.replace(batch, old_surprisal_T=old_surprisals(batch).float())
    signals = find_objective("gspo").plan(batch, CLIPS, topology.across, {})
    assert torch.equal(
        signals.coefficient_T, coefficients(batch, CLIPS.aggregation, topology.across)
    )
    bound = BoundLoss(lambda tokens: LOSSES[name](tokens, CLIPS), per_token=False)
    broken = first_broken(actor, batch, bound, signals, bad) if name == "gspo" else []
    metrics, _ = actor.update(batch, bound, signals)
    assert batch.surprisal_T is not None and batch.old_surprisal_T is not None
    columns = (batch.surprisal_T, batch.old_surprisal_T, batch.advantage_T, batch.sequence_T)
    tokens = [column.tolist() for column in columns]
    assert batch.proxy_mass_T is not None and batch.entropy_T is not None
    assert batch.nucleus_entropy_T is not None and batch.tempered_T is not None
    further = [batch.proxy_mass_T, batch.nucleus_entropy_T, batch.tempered_T]
    scores = torch.stack(further, dim=1).tolist()
    scored = dict(zip(batch.token_index_T.tolist(), scores, strict=True))
    weights = {name: tensor.clone() for name, tensor in actor.weights()}
    empty = sum(
        micro.row_N.numel() == 0 and micro.num_sequences > 0 for micro in batch.microbatches
    )
    found = {
        "weights": weights,
        "tokens": tokens,
        "empty": empty,
        "scored": scored,
        "broken": broken,
    }
    return metrics | found


def first_broken(
    actor: Actor,
    batch: TokenBatch,
    bound: BoundLoss,
    signals: Signals,
    broken_sequences: Sequence[tuple[int, ...]],
) -> list[int | None]:
    """The first sequence without a finite gradient, of a loss over sequences and of one per token,
    with NaN coefficients in these sequences.
    """
    per_token = find_objective("dapo").bind(LossConfig(name="dapo"))
    bad = [
        (loss, torch.isin(batch.sequence_T, torch.tensor(those)))
        for loss in (bound, per_token)
        for those in map(list, broken_sequences)
    ]
    return [
        actor.first_without_finite_gradient(
            batch,
            loss,
            dataclasses.replace(
                signals, coefficient_T=torch.where(bad_T, math.nan, signals.coefficient_T)
            ),
        )
        for loss, bad_T in bad
    ]


def losses_under(layout: str) -> list[str]:
    """All where sums go over ranks, and on the rank that all are compared with; scans where a
    sequence's tokens lie otherwise.
    """
    found = list(LOSSES) if layout.startswith("CP2") or layout == "one" else ["gspo"]
    scans = layout in ("one", "each", "CP2", "CP2 padded", "CP2 each")
    return [name for name in found if name != "scanned"] + ["scanned"] * scans


def under_each_layout(
    rank: int, world_size: int, directory: str, layouts: Sequence[str]
) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (layout, name): update(
            directory, LAYOUTS[world_size][layout], name, BROKEN[: 3 if layout in ENDS else 1]
        )
        for layout in layouts
        for name in losses_under(layout)
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> LayoutResults:
    shape = {"num_hidden_layers": 4}
    directory = tmp_path_factory.mktemp("model")
    checkpoint = write_checkpoint(directory, tiny_config("qwen2", **shape), seed=5)
    return LayoutResults(under_each_layout, checkpoint, LAYOUTS, QUICK)


def parameter(layout: str, *rest: str) -> Any:
    return pytest.param(layout, *rest, marks=[] if layout in QUICK else [pytest.mark.slow])


EVERY = [layout for layouts in LAYOUTS.values() for layout in layouts]
OTHERS = [layout for layout in EVERY if layout != "one"]


@pytest.mark.parametrize(
    ("layout", "name"),
    [parameter(layout, name) for layout in OTHERS for name in losses_under(layout)],
)
def test_loss_gradient_norm_and_weights_equal_those_of_one_rank(
    runs: LayoutResults, layout: str, name: str
) -> None:
    (expected,) = runs["one", name]
    assert expected["grad_norm"] > 1e-3
    for found in runs[layout, name]:
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-7)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        tolerance = 1e-6 * max(1.0, expected["grad_norm"])
        for key, tensor in expected["weights"].items():
            torch.testing.assert_close(
                found["weights"][key], tensor, rtol=1e-5, atol=tolerance, msg=key
            )


@pytest.mark.parametrize("layout", list(map(parameter, EVERY)))
def test_the_first_rollout_without_a_finite_gradient_is_found(
    runs: LayoutResults, layout: str
) -> None:
    """Every rank finds it; and the search does not affect the next update, compared above."""
    expected = [those[0] for those in BROKEN[: 3 if layout in ENDS else 1]]
    for rank in runs[layout, "gspo"]:
        assert rank["broken"] == 2 * expected


@pytest.mark.parametrize("layout", list(map(parameter, OTHERS)))
def test_the_further_scores_are_those_of_one_rank(runs: LayoutResults, layout: str) -> None:
    """The log of the mass of tokens with p >= 0.3 max p, of every token somewhere, the entropy of
    its nucleus, and what another temperature makes of its log-prob.
    """
    (one,) = runs["one", "gspo"]
    mass, entropy, tempered = zip(*one["scored"].values(), strict=True)
    assert min(tempered) < 0 < max(tempered)
    assert min(mass) < -0.1 and max(mass) == math.inf and 0 < min(entropy) < max(entropy)
    found = {key: value for rank in runs[layout, "gspo"] for key, value in rank["scored"].items()}
    for key, values in one["scored"].items():
        assert found[key] == pytest.approx(values, rel=1e-4, abs=1e-6)


def test_the_loss_equals_the_twins(runs: LayoutResults) -> None:
    """Loss of the published sequence form in float64, from the surprisals that one rank scored."""
    (one,) = runs["one", "gspo"]
    loss, gradients = reference_losses.gspo_of_sequences(*one["tokens"], CLIPS)
    assert one["loss"] == pytest.approx(loss, rel=1e-5)
    assert 0 < sum(gradient == 0 for gradient in gradients) < len(gradients), "some are clipped"
    values, _ = reference_losses.gspo(*one["tokens"], CLIPS)
    assert one["loss"] == pytest.approx(
        reference_losses.aggregate(values, one["tokens"][3], CLIPS.aggregation), rel=1e-5
    )


@pytest.mark.parametrize(
    "layout",
    [parameter(layout) for layout in EVERY if "sequence form" in losses_under(layout)],
)
def test_token_form_and_sequence_form_make_one_step(runs: LayoutResults, layout: str) -> None:
    for ours, theirs in zip(runs[layout, "gspo"], runs[layout, "sequence form"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert math.isfinite(ours["loss"])


def test_some_context_rank_had_no_loss_token(
    runs: LayoutResults,
) -> None:
    empty = [rank["empty"] for rank in runs["CP2 each", "crossed"]]
    assert empty[0] != empty[1] and max(empty) >= 2
